"""The packet filter of this host: which local rule may drop a given packet.

Reads what `nft list ruleset` and `iptables-save` say, where they may be run, and walks a packet
through the rules. The walk is three-valued: a rule matches, does not match, or may match (a
condition that is not understood here, such as a rate limit or a named set). Only a rule that
surely matches, with no earlier rule that may accept, is a sure hit.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

DROPPING = ("drop", "reject")
DIVERTING = ("redirect",)
MAX_LINES = 20
_IN = ("ingress", "prerouting", "input")
_OUT = ("output", "postrouting", "egress")
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/sbin:/usr/local/bin"
_FAMILIES = {"ip": (4,), "ip6": (6,), "inet": (4, 6), "netdev": (4, 6)}


@dataclass(frozen=True)
class Packet:
    """One tcp packet as a host sees it.

    `ports` are (lowest, highest): an ephemeral port that is not known is the whole range.
    `state` is conntrack's: `new` for the first packet, `established` for the reply.
    """

    incoming: bool
    interface: str
    source: str
    target: str
    source_ports: tuple[int, int]
    target_ports: tuple[int, int]
    state: str = "new"
    length: int = 60


@dataclass(frozen=True)
class Condition:
    """One test of a rule: `field` is in `values` (or is not). No values: not understood."""

    field: str
    values: tuple[str, ...] = ()
    negated: bool = False


@dataclass(frozen=True)
class Rule:
    """`verdict` is accept, drop, reject, redirect, jump, goto, return or `none`."""

    text: str
    verdict: str
    target: str = ""
    conditions: tuple[Condition, ...] = ()
    handle: str = ""


@dataclass(frozen=True)
class Chain:
    """One chain; `hook` is empty where it is only jumped to."""

    tool: str
    table: str
    name: str
    versions: tuple[int, ...] = (4, 6)
    hook: str = ""
    policy: str = "accept"
    rules: tuple[Rule, ...] = ()

    @property
    def place(self) -> str:
        """As people write it: `nft inet filter input`."""
        return f"{self.tool} {self.table} {self.name}"


@dataclass(frozen=True)
class Hit:
    """A rule (or the policy of a chain) that takes a packet. `sure`: it surely does."""

    chain: Chain
    rule: Rule | None
    verdict: str
    sure: bool

    def to_json(self) -> dict[str, Any]:
        """Plain data; `rule` is quoted as its tool prints it."""
        rule = self.rule
        return {
            "tool": self.chain.tool,
            "table": self.chain.table,
            "chain": self.chain.name,
            "rule": rule.text if rule else f"policy {self.verdict}",
            "handle": rule.handle if rule else "",
            "verdict": self.verdict,
            "sure": self.sure,
        }


def quote_hit(hit: Mapping[str, Any]) -> str:
    """A `Hit` as plain data, on one line: `nft inet filter input: tcp dport 5000 drop`."""
    return f"{hit['tool']} {hit['table']} {hit['chain']}: {hit['rule']}"


def remove_rule(hit: Mapping[str, Any]) -> str:
    """What to type to be rid of the rule."""
    if hit["handle"]:
        return f"nft delete rule {hit['table']} {hit['chain']} handle {hit['handle']}"
    return f"remove the rule {quote_hit(hit)}"


def let_in(hit: Mapping[str, Any] | None, peers: Sequence[str], managers: Sequence[str]) -> str:
    """What to type to let tcp from (or to) the peers pass, in the language of what stops it.

    Args:
        hit: a `Hit` as plain data, with `incoming` added; None where no rule is known.
        peers: addresses.
        managers: of that host, from `Rules`.

    Returns: the empty string where nothing is known to stop it.
    """
    if not peers:
        return ""
    if "firewalld" in managers:
        sources = " ".join(f"--add-source={peer}" for peer in peers)
        return f"firewall-cmd --permanent --zone=trusted {sources} && firewall-cmd --reload"
    if "ufw" in managers:
        return " && ".join(f"ufw allow proto tcp from {peer}" for peer in peers)
    if hit is None:
        return ""
    if hit["tool"] == "nft":
        field = f"{'ip6' if ':' in peers[0] else 'ip'} {'saddr' if hit['incoming'] else 'daddr'}"
        who = "{ " + ", ".join(peers) + " }" if len(peers) > 1 else peers[0]
        return f"nft insert rule {hit['table']} {hit['chain']} {field} {who} accept"
    side = "-s" if hit["incoming"] else "-d"
    return f"{hit['tool']} -I {hit['chain']} {side} {','.join(peers)} -p tcp -j ACCEPT"


@dataclass(frozen=True)
class Rules:
    """Everything that could be read. `readable` is False where no tool would tell."""

    readable: bool
    reason: str = ""
    managers: tuple[str, ...] = ()
    chains: tuple[Chain, ...] = ()

    def dropping(self) -> list[str]:
        """Lines that drop, reject or divert, with their place; at most `MAX_LINES`."""
        lines = []
        for chain in self.chains:
            if chain.hook and chain.policy in DROPPING:
                lines.append(f"{chain.place}: policy {chain.policy}")
            wanted = (*DROPPING, *DIVERTING)
            lines += [f"{chain.place}: {r.text}" for r in chain.rules if r.verdict in wanted]
        return lines[:MAX_LINES]

    def hits(self, packet: Packet) -> list[Hit]:
        """What may drop, reject or divert this packet, in the order in which it meets them."""
        hooks = _IN if packet.incoming else _OUT
        version = 6 if ":" in packet.source else 4
        found: list[Hit] = []
        for hook in hooks:
            for chain in self.chains:
                if chain.hook == hook and version in chain.versions:
                    walk = _Walk(self.chains, packet, found)
                    walk.through(chain)
        return found


class _Walk:
    """One packet through one base chain and those that it jumps to."""

    def __init__(self, chains: Sequence[Chain], packet: Packet, found: list[Hit]) -> None:
        self.chains = {(c.tool, c.table, c.name): c for c in chains}
        self.packet = packet
        self.found = found
        self.sure = True

    def through(self, chain: Chain, depth: int = 0) -> bool:
        """Whether the packet's way surely ended in this chain or in one below."""
        for rule in chain.rules:
            matches = rule_matches(rule, self.packet)
            if matches is False or rule.verdict == "none":
                continue
            if rule.verdict in DROPPING or rule.verdict in DIVERTING:
                self.found.append(Hit(chain, rule, rule.verdict, self.sure and bool(matches)))
                if matches:
                    return True
                continue
            if rule.verdict in ("jump", "goto"):
                below = self.chains.get((chain.tool, chain.table, rule.target))
                before = self.sure
                self.sure = before and bool(matches)
                if below is None or depth > 16:
                    self.sure = False  # an extension that is not known here
                    continue
                if self.through(below, depth + 1) and matches:
                    return True
                # What may have been accepted down there leaves the rest of this chain unsure.
                self.sure = self.sure if matches else before and not _may_accept(below)
                if rule.verdict == "goto" and matches:
                    break
                continue
            if matches:
                if rule.verdict == "accept":
                    return True
                break  # return: back to where it came from, or to the policy
            self.sure = False
        if chain.hook and chain.policy in DROPPING:
            self.found.append(Hit(chain, None, chain.policy, self.sure))
            return True
        return False


def _may_accept(chain: Chain) -> bool:
    return any(r.verdict in ("accept", "jump", "goto") for r in chain.rules)


def rule_matches(rule: Rule, packet: Packet) -> bool | None:
    """True, False, or None where it may match."""
    answers = [_holds(condition, packet) for condition in rule.conditions]
    if False in answers:
        return False
    return None if None in answers else True


def _holds(condition: Condition, packet: Packet) -> bool | None:
    if not condition.values:
        return None
    answer: bool | None = False
    for value in condition.values:
        one = _FIELDS[condition.field](packet, value)
        if one:
            answer = True
            break
        answer = None if one is None else answer
    return answer if answer is None or not condition.negated else not answer


def _interface(name: str, value: str) -> bool:
    value = value.strip('"')
    if value.endswith(("*", "+")):
        return name.startswith(value[:-1])
    return name == value


def _address(address: str, value: str) -> bool | None:
    own = ipaddress.ip_address(address)
    low, dash, high = value.partition("-")
    try:
        if dash:
            first, last = ipaddress.ip_address(low), ipaddress.ip_address(high)
            return first.version == own.version and int(first) <= int(own) <= int(last)
        return own in ipaddress.ip_network(value, strict=False)
    except ValueError:  # a name, or a set that is defined elsewhere
        return None


def _port(ports: tuple[int, int], value: str) -> bool | None:
    low, _, high = value.replace(":", "-").partition("-")
    if not low.isdigit() or (high and not high.isdigit()):
        return None  # a service by name
    first, last = int(low), int(high or low)
    if ports[1] < first or last < ports[0]:
        return False
    return True if first <= ports[0] and ports[1] <= last else None


def _length(length: int, value: str) -> bool | None:
    match = re.fullmatch(r"(<=|>=|<|>|)(\d+)(?:-(\d+))?", value.replace(":", "-"))
    if not match:
        return None
    sign, number, high = match[1], int(match[2]), match[3]
    if high:
        return number <= length <= int(high)
    return {
        "": length == number,
        "<": length < number,
        ">": length > number,
        "<=": length <= number,
        ">=": length >= number,
    }[sign]


_FIELDS: dict[str, Callable[[Packet, str], bool | None]] = {
    "iif": lambda p, v: p.incoming and _interface(p.interface, v),
    "oif": lambda p, v: not p.incoming and _interface(p.interface, v),
    "source": lambda p, v: _address(p.source, v),
    "target": lambda p, v: _address(p.target, v),
    "protocol": lambda p, v: v in ("tcp", "6", "all", "0"),
    "version": lambda p, v: v == ("ipv6" if ":" in p.source else "ipv4"),
    "sport": lambda p, v: _port(p.source_ports, v),
    "dport": lambda p, v: _port(p.target_ports, v),
    "state": lambda p, v: v.lower() == p.state,
    "length": lambda p, v: _length(p.length, v),
}


# nft list ruleset ---------------------------------------------------------------------------------

_TOKEN = re.compile(r'"[^"]*"|\{[^}]*\}|\S+')
_PROTOCOLS = ("tcp", "udp", "th", "sctp", "dccp", "udplite", "icmp", "icmpv6", "esp", "ah")
_VERDICTS = {"accept", "drop", "reject", "return"}
_DIVERTS = {"redirect": "redirect", "dnat": "redirect", "tproxy": "redirect"}
_SIMPLE = {
    "iif": "iif",
    "iifname": "iif",
    "oif": "oif",
    "oifname": "oif",
    "saddr": "source",
    "daddr": "target",
    "dport": "dport",
    "sport": "sport",
    "nfproto": "version",
    "l4proto": "protocol",
    "protocol": "protocol",
    "nexthdr": "protocol",
    "length": "length",
    "state": "state",
}
_FILLERS = {"meta", "ip", "ip6", "ct", "th"}
_SKIP_ARGUMENT = {"comment", "prefix", "level", "group", "snaplen", "queue-threshold", "flags"}


_BLOCK = re.compile(
    r"(table|chain|set|map|flowtable|counter|quota|secmark|synproxy|limit"
    r"|ct (helper|timeout|expectation)) \S+( \S+)? \{( # handle \d+)?$"
)


def parse_nft(text: str) -> tuple[Chain, ...]:
    """Chains of `nft list ruleset` (with or without -a), in the order in which they stand."""
    chains: list[Chain] = []
    table, chain = "", None
    versions: tuple[int, ...] = (4, 6)
    rules: list[Rule] = []
    for line in _joined(text.splitlines()):
        if match := re.match(r"table (\S+) (\S+) \{", line):
            table, versions = f"{match[1]} {match[2]}", _FAMILIES.get(match[1], ())
        elif match := re.match(r"chain (\S+) \{", line):
            chain, rules = Chain("nft", table, match[1], versions), []
        elif line.startswith("}"):
            if chain is not None:
                chains.append(replace(chain, rules=tuple(rules)))
            chain = None
        elif chain is not None and (match := re.match(r"type \S+ hook (\S+) ", line)):
            policy = re.search(r"policy (\w+);", line)
            chain = replace(chain, hook=match[1], policy=policy[1] if policy else "accept")
        elif chain is not None and line:
            rules += [parse_nft_rule(each) for each in _without_maps(line)]
    return tuple(chains)


def _joined(lines: Iterable[str]) -> Iterable[str]:
    """Lines without indentation; a set that is broken over several lines is one line."""
    held = ""
    for line in lines:
        held = f"{held} {line.strip()}".strip()
        if held.count("{") > held.count("}") and not _BLOCK.match(held):
            continue
        yield held
        held = ""


def _without_maps(line: str) -> Iterable[str]:
    """One line for each entry of a verdict map: `ct state vmap { invalid : drop }`."""
    match = re.match(r"(.*) vmap \{ (.*) \}(.*)$", line)
    if match is None:
        # What a named map says is not known: it may accept.
        yield re.sub(r" vmap @\S+", " @map accept", line)
        return
    for entry in match[2].split(","):
        value, _, verdict = entry.partition(" : ")
        yield f"{match[1]} {value.strip()} {verdict.strip()}{match[3]}"


def parse_nft_rule(line: str) -> Rule:
    """One rule as nft prints it."""
    text, _, handle = line.partition(" # handle ")
    text = re.sub(r"counter packets \d+ bytes \d+ ?", "", text).strip()
    conditions: list[Condition] = []
    # The first packet of a connection: SYN without ACK.
    rest = re.sub(r"tcp flags (& \([a-z |]+\) == syn|syn( / [a-z,]+)?)(?= |$)", "", text)
    if rest != text:
        conditions += [Condition("state", ("new",)), Condition("protocol", ("tcp",))]
    tokens = _TOKEN.findall(rest)
    verdict, target, index = "none", "", 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if token in _VERDICTS:
            verdict = token
            break
        if token in ("jump", "goto") and index < len(tokens):
            verdict, target = token, tokens[index]
            break
        if token in _DIVERTS:
            verdict = _DIVERTS[token]
            break
        if token == "flags" and tokens[index - 2 : index - 1] == ["tcp"]:
            conditions.append(Condition("protocol"))  # other flags than those of a first packet
            index += 1
        elif token in _SKIP_ARGUMENT:
            index += 1
        elif token in _SIMPLE and index < len(tokens):
            negated = tokens[index] == "!="
            sign = tokens[index] if tokens[index] in ("<", ">", "<=", ">=") else ""
            index += bool(negated or sign or tokens[index] == "==")
            values = _values(tokens[index]) if index < len(tokens) else ()
            index += 1
            conditions.append(Condition(_SIMPLE[token], tuple(sign + v for v in values), negated))
        elif token in _PROTOCOLS:
            if token != "th":
                conditions.append(Condition("protocol", (token,)))
        elif token not in _FILLERS and token not in ("counter", "log"):
            conditions.append(Condition("protocol"))  # not understood: it may match
    return Rule(text, verdict, target, tuple(conditions), handle)


def _values(token: str) -> tuple[str, ...]:
    """Values of one token or anonymous set; none for a named set, which is not looked up."""
    if token.startswith("@"):
        return ()
    parts = token.strip("{} ").split(",")
    return tuple(part.strip() for part in parts if part.strip())


# iptables-save ------------------------------------------------------------------------------------

_IPT_HOOKS = {
    "INPUT": "input",
    "OUTPUT": "output",
    "PREROUTING": "prerouting",
    "POSTROUTING": "postrouting",
}
_IPT_FIELDS = {
    "-i": "iif",
    "-o": "oif",
    "-s": "source",
    "-d": "target",
    "-p": "protocol",
    "--dport": "dport",
    "--dports": "dport",
    "--sport": "sport",
    "--sports": "sport",
    "--state": "state",
    "--ctstate": "state",
    "--length": "length",
}
_IPT_SKIP = {"-m", "--comment", "--reject-with", "--to-ports", "--to-destination", "--on-port"}
_IPT_VERDICTS = {
    "ACCEPT": "accept",
    "DROP": "drop",
    "REJECT": "reject",
    "RETURN": "return",
    "REDIRECT": "redirect",
    "DNAT": "redirect",
    "TPROXY": "redirect",
}
_IPT_NOTHING = {"LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS", "MASQUERADE", "SNAT", "CT", "SET"}


def parse_iptables(text: str, tool: str = "iptables", version: int = 4) -> tuple[Chain, ...]:
    """Chains of `iptables-save`."""
    chains: dict[tuple[str, str], Chain] = {}
    rules: dict[tuple[str, str], list[Rule]] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith(":"):
            name, policy = line[1:].split()[:2]
            hook = _IPT_HOOKS.get(name, "")
            verdict = "drop" if policy == "DROP" else "accept"
            chains[table, name] = Chain(tool, table, name, (version,), hook, verdict)
        elif line.startswith("-A "):
            name, rule = _parse_iptables_rule(line)
            rules.setdefault((table, name), []).append(rule)
    return tuple(replace(chain, rules=tuple(rules.get(key, ()))) for key, chain in chains.items())


def _parse_iptables_rule(line: str) -> tuple[str, Rule]:
    try:
        tokens = shlex.split(line)
    except ValueError:
        tokens = line.split()
    verdict, target, negated = "none", "", False
    conditions: list[Condition] = []
    index = 2
    while index < len(tokens):
        token = tokens[index]
        value = tokens[index + 1] if index + 1 < len(tokens) else ""
        index += 2
        if token == "!":
            negated, index = True, index - 1
            continue
        if token in ("-j", "-g"):
            target = value
            verdict = _IPT_VERDICTS.get(value, "jump" if token == "-j" else "goto")
            verdict = "none" if value in _IPT_NOTHING else verdict
        elif token in _IPT_FIELDS:
            conditions.append(Condition(_IPT_FIELDS[token], tuple(value.split(",")), negated))
        elif token == "--tcp-flags":
            syn = tokens[index : index + 1] == ["SYN"]
            conditions.append(Condition("state", ("new",) if syn else (), negated))
            index += 1
        elif token == "--syn":
            conditions.append(Condition("state", ("new",), negated))
            index -= 1
        elif token not in _IPT_SKIP:
            conditions.append(Condition("protocol"))  # not understood: it may match
            index -= 1
        negated = False
    return tokens[1], Rule(line, verdict, target, tuple(conditions))


# Reading ------------------------------------------------------------------------------------------


@dataclass
class _Reader:
    """Runs the tools; collects why one of them told nothing."""

    timeout_s: float
    problems: list[str] = field(default_factory=list)

    def run(self, *command: str) -> str | None:
        """Standard output, or None."""
        import shutil
        import subprocess

        tool = shutil.which(command[0], path=_PATH)
        if tool is None:
            self.problems.append(f"{command[0]}: not installed")
            return None
        try:
            done = subprocess.run(
                [tool, *command[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.timeout_s,
                env={"LC_ALL": "C", "PATH": _PATH},
                check=False,
            )
        except subprocess.TimeoutExpired:
            self.problems.append(f"{command[0]}: no answer within {self.timeout_s:g} s")
            return None
        except OSError as error:
            self.problems.append(f"{command[0]}: {error.strerror}")
            return None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            self.problems.append(f"{command[0]}: {said[0] if said else 'failed'}")
            return None
        return done.stdout.decode(errors="replace")


def read_rules(timeout_s: float = 3.0) -> Rules:
    """Read this host's rules with the tools that are there; changes nothing.

    Args:
        timeout_s: for each of at most four commands.
    """
    reader = _Reader(timeout_s)
    chains: list[Chain] = []
    nft = reader.run("nft", "-a", "list", "ruleset")
    if nft is not None:
        chains += parse_nft(nft)
    # nft shows what iptables-nft wrote; only rules of the older kernel interface are missing.
    saved = reader.run("iptables-save")
    if saved is not None and not (nft is not None and "nf_tables" in saved):
        chains += parse_iptables(saved)
    saved6 = reader.run("ip6tables-save")
    if saved6 is not None and not (nft is not None and "nf_tables" in saved6):
        chains += parse_iptables(saved6, "ip6tables", 6)
    readable = nft is not None or saved is not None
    problems = "; ".join(reader.problems)
    managers = []
    if (reader.run("firewall-cmd", "--state") or "").strip() == "running":
        managers.append("firewalld")
    if _ufw_is_on():
        managers.append("ufw")
    return Rules(readable, "" if readable else problems, tuple(managers), tuple(chains))


def _ufw_is_on() -> bool:
    """From its configuration: `ufw status` would load kernel modules."""
    try:
        return "ENABLED=yes" in Path("/etc/ufw/ufw.conf").read_text()
    except OSError:
        return False
