"""The packet filter rules of this host, as `nft list ruleset` and `iptables-save` print them.

A part that is not understood becomes a condition without values: the rule may match.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nccl_doctor.toolkit.firewall.netfilter import Chain, Condition, Rule, Rules

_PATH = "/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/sbin:/usr/local/bin"

# nft list ruleset ---------------------------------------------------------------------------------

_TOKEN = re.compile(r'"[^"]*"|\{[^}]*\}|\S+')
_PROTOCOLS = ("tcp", "udp", "th", "sctp", "dccp", "udplite", "icmp", "icmpv6", "esp", "ah")
_VERDICTS = {name: name for name in ("accept", "drop", "reject", "return", "redirect")}
_VERDICTS |= dict.fromkeys(("dnat", "tproxy"), "redirect") | {"notrack": "notrack"}
_FAMILIES = {"ip": (4,), "ip6": (6,), "inet": (4, 6), "netdev": (4, 6)}
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
_FIB = re.compile(
    r"\bfib (?P<of>\w+(?: \. \w+)*) (?:oif|oifname|check|type)"
    r"(?: (?P<found>missing|exists|(?<=oif )(?:!= )?0)(?= |$)| (?:!= )?(?:\{[^}]*\}|\S+))"
)
"""A look-up in the routing table; `check` is how nft prints `oif` since 1.1.4, and interface 0 how
it prints `-m rpfilter` of iptables-nft.
"""
_FLAGS = re.compile(
    r"tcp flags (?:syn / (?P<slash>[a-z,]+)|& \(?(?P<and>[a-z |]+?)\)? == syn|(?P<exact>== syn)"
    r"|syn)(?= |$)"
)
"""SYN in every form that nft prints; with a mask, after a slash in newer versions."""
_FILLERS = {"meta", "ip", "ip6", "ct", "th", "counter", "log"}
_SKIP_ARGUMENT = {"comment", "prefix", "level"}

_BLOCK = re.compile(r".*\{( # handle \d+)?$")
"""The line that opens a table, chain or named set: nft breaks value sets only after a comma."""


def parse_nft(text: str) -> tuple[Chain, ...]:
    """Chains of `nft list ruleset` (with or without -a), in their order."""
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
    held: list[str] = []  # a set may have a hundred thousand elements
    depth = 0
    for line in lines:
        bare = line.strip()
        depth += bare.count("{") - bare.count("}")
        if depth > 0 and not _BLOCK.match(bare):
            held.append(bare)
            continue
        yield " ".join([*held, bare])
        held, depth = [], 0


def _without_maps(line: str) -> Iterable[str]:
    """One line for each entry of a verdict map: `ct state vmap { invalid : drop }`."""
    start, opens, rest = line.rpartition(" vmap { ")
    entries, closes, end = rest.rpartition(" }")
    if not opens or not closes:
        # The content of a named map is not known: it may accept.
        yield re.sub(r" vmap @\S+", " @map accept", line)
        return
    for entry in entries.split(","):
        value, _, verdict = entry.partition(" : ")
        yield f"{start} {value.strip()} {verdict.strip()}{end}"


def parse_nft_rule(line: str) -> Rule:
    """A rule, parsed as nft prints it."""
    text, _, handle = line.partition(" # handle ")
    text = re.sub(r"counter packets \d+ bytes \d+ ?", "", text).strip()
    conditions: list[Condition] = []
    rest = _FLAGS.sub("", text)
    for flags in _FLAGS.finditer(text):
        first = flags["exact"] or "ack" in (flags["slash"] or flags["and"] or "")
        conditions += [_syn("ack" if first else ""), Condition("protocol", ("tcp",))]
    conditions += map(_way_back, _FIB.finditer(rest))
    tokens = _TOKEN.findall(_FIB.sub("", rest))
    verdict, target, index = "none", "", 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if token in _VERDICTS:
            verdict = _VERDICTS[token]
            break
        if token in ("jump", "goto") and index < len(tokens):
            verdict, target = token, tokens[index]
            break
        if token in _SKIP_ARGUMENT:
            index += 1
        elif token in _SIMPLE and index < len(tokens):
            negated = tokens[index] == "!="
            sign = tokens[index] if tokens[index] in ("<", ">", "<=", ">=") else ""
            index += bool(negated or sign)
            values = _values(tokens[index]) if index < len(tokens) else ()
            index += 1
            conditions.append(Condition(_SIMPLE[token], tuple(sign + v for v in values), negated))
        elif token in _PROTOCOLS:
            if token != "th":
                conditions.append(Condition("protocol", (token,)))
        elif token not in _FILLERS:
            conditions.append(Condition("protocol"))  # not understood: it may match
    return Rule(text, verdict, target, tuple(conditions), handle)


def _syn(mask: str) -> Condition:
    """SYN among the flags of a mask: without ACK in it, the answer to a call matches too."""
    return Condition("syn", ("yes" if "ack" in mask.lower() else "any",))


def _way_back(fib: re.Match[str]) -> Condition:
    """True if answers leave by the interface on which a packet came: the reverse path filter that
    firewalld has for IPv6. Other look-ups are not understood.
    """
    strict = {"saddr", "iif"} <= set(fib["of"].split(" . ")) <= {"saddr", "iif", "mark"}
    found = {"0": "missing", "!= 0": "exists"}.get(fib["found"], fib["found"])
    return Condition("way_back", (found,) if strict and found else ())


def _rpfilter(options: Sequence[str]) -> Condition:
    """The same of `-m rpfilter`, which matches what passes; --loose is not understood."""
    back = "missing" if "--invert" in options else "exists"
    return Condition("way_back", () if "--loose" in options else (back,))


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
_RPFILTER = {"--invert", "--loose", "--validmark", "--accept-local"}
_IPT_FLAGS = {"--notrack"}
_IPT_SKIP = {"-m", "--comment", "--reject-with", "--to-ports", "--to-destination", "--on-port"}
_IPT_VERDICTS = {
    "ACCEPT": "accept",
    "DROP": "drop",
    "REJECT": "reject",
    "RETURN": "return",
    "REDIRECT": "redirect",
    "DNAT": "redirect",
    "TPROXY": "redirect",
    "NOTRACK": "notrack",
}
_IPT_NOTHING = {"LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS", "MASQUERADE", "SNAT", "CT", "SET"}


_WORD = re.compile(r'"([^"]*)"(?=\s|$)|(\S+)')


def parse_iptables(text: str, tool: str = "iptables", version: int = 4) -> tuple[Chain, ...]:
    """Chains of `iptables-save`."""
    chains: dict[tuple[str, str], Chain] = {}
    rules: dict[tuple[str, str], list[Rule]] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith(":"):
            name, policy = [*line[1:].split(), "", ""][:2]
            hook = _IPT_HOOKS.get(name, "")
            verdict = "drop" if policy == "DROP" else "accept"
            chains[table, name] = Chain(tool, table, name, (version,), hook, verdict)
        elif line.startswith("-A ") and line[3:].strip():  # else the text was cut off there
            name, rule = _parse_iptables_rule(line)
            rules.setdefault((table, name), []).append(rule)
    return tuple(replace(chain, rules=tuple(rules.get(key, ()))) for key, chain in chains.items())


def _parse_iptables_rule(line: str) -> tuple[str, Rule]:
    tokens = _words(line)
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
            verdict = "notrack" if value == "CT" and "--notrack" in tokens[index:] else verdict
        elif token in _IPT_FIELDS:
            conditions.append(Condition(_IPT_FIELDS[token], tuple(value.split(",")), negated))
        elif token == "--tcp-flags":
            syn = tokens[index : index + 1] == ["SYN"]
            conditions.append(replace(_syn(value) if syn else Condition("syn"), negated=negated))
            index += 1
        elif token == "--syn":
            conditions.append(Condition("syn", ("yes",), negated))
            index -= 1
        elif token in _IPT_FLAGS or ("rpfilter" in tokens and token in _RPFILTER):
            index -= 1
        elif (token, value) == ("-m", "rpfilter"):
            conditions.append(_rpfilter(tokens))
        elif token not in _IPT_SKIP:
            conditions.append(Condition("protocol"))  # not understood: it may match
            index -= 1
        negated = False
    return tokens[1], Rule(line, verdict, target, tuple(conditions))


def _words(line: str) -> list[str]:
    """Words of a rule; `shlex` takes a millisecond for each, and there may be fifty thousand."""
    if "'" not in line and "\\" not in line:
        return [quoted or word for quoted, word in _WORD.findall(line)]
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


# Reading ------------------------------------------------------------------------------------------


@dataclass
class _ToolRunner:
    """Runs the tools; collects why one of them gave no output."""

    timeout_s: float
    problems: list[str] = field(default_factory=list)

    def run(self, *command: str) -> str | None:
        """Standard output of a command, or None."""
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


def read_rules(timeout_s: float = 3.0, root: Path = Path("/")) -> Rules:
    """Rules of this host, read with the tools that are there; nothing is changed.

    Args:
        timeout_s: for each of at most four commands.
        root: the folder below which /etc is read.
    """
    reader = _ToolRunner(timeout_s)
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
    managers = tuple(_managers(reader, root))
    return Rules(readable, "" if readable else problems, managers, tuple(chains))


def tool_here(timeout_s: float, root: Path = Path("/")) -> str:
    """Tool by which the firewall of this host is set: `firewalld` or `ufw` where they are on, else
    `nft` or `iptables`; empty where none is installed.
    """
    found = [*_managers(_ToolRunner(timeout_s), root), *filter(shutil.which, ("nft", "iptables"))]
    return next(iter(found), "")


def _managers(reader: _ToolRunner, root: Path) -> Iterator[str]:
    if (reader.run("firewall-cmd", "--state") or "").strip() == "running":
        yield "firewalld"
    if _ufw_is_on(root):
        yield "ufw"


def _ufw_is_on(root: Path) -> bool:
    """True if ufw is on, by its configuration: `ufw status` would load kernel modules."""
    try:
        return "ENABLED=yes" in (root / "etc/ufw/ufw.conf").read_text()
    except OSError:
        return False
