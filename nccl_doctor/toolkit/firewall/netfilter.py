"""Packet filters as data, and the rules that may drop a packet. Pure: `rulesets` reads the rules.

A rule matches, does not match, or may match (a condition that is not
understood here, such as a rate limit or a named set). Only a rule that surely matches, with no
earlier rule that may accept, is a sure hit.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nccl_doctor.toolkit.hosts import some_of

TAKING = ("drop", "reject", "redirect")
"""Verdicts after which a packet does not arrive at its target."""
MAX_LINES = 20
_MOST_RULES = 50_000
"""Rules that one packet is held against; chains that jump to each other can multiply them."""
_NUMBER = re.compile("[0-9]{1,9}")
_IN = ("ingress", "prerouting", "input")
_OUT = ("output", "postrouting", "egress")


@dataclass(frozen=True)
class Packet:
    """A tcp packet as a host sees it.

    Unknown values are ranges: ports are (lowest, highest), an address may be a network
    (`0.0.0.0/0` is any host).
    `state` is conntrack's: `new` for the first packet, `established` for the reply. `midway`: the
    packet belongs to a connection that conntrack has forgotten, so it is `new` (or `invalid`, see
    net.netfilter.nf_conntrack_tcp_loose) and no SYN.
    `way_back`: whether answers to its source leave by the interface on which it came; None where
    that is not known. `syn_ack`: the packet is the answer to a call, which has SYN and ACK.
    """

    incoming: bool
    interface: str
    source: str
    target: str
    source_ports: tuple[int, int]
    target_ports: tuple[int, int]
    state: str = "new"
    length: int = 60
    midway: bool = False
    way_back: bool | None = None
    syn_ack: bool = False


@dataclass(frozen=True)
class Condition:
    """A condition of a rule: `field` is in `values` (or is not). No values: not understood."""

    field: str
    values: tuple[str, ...] = ()
    negated: bool = False


@dataclass(frozen=True)
class Rule:
    """A rule; `verdict` is accept, drop, reject, redirect, jump, goto, return, notrack or `none`.

    After `notrack` the packet goes on, and conntrack does not know it.
    """

    text: str
    verdict: str
    target: str = ""
    conditions: tuple[Condition, ...] = ()
    handle: str = ""


@dataclass(frozen=True)
class Chain:
    """A chain; `hook` is empty where it is only a jump target."""

    tool: str
    table: str
    name: str
    versions: tuple[int, ...] = (4, 6)
    hook: str = ""
    policy: str = "accept"
    rules: tuple[Rule, ...] = ()

    @property
    def place(self) -> str:
        """The chain in words: `nft inet filter input`."""
        return f"{self.tool} {self.table} {self.name}"


@dataclass(frozen=True)
class Hit:
    """A rule (or the policy of a chain) that stops a packet. `sure`: it surely does."""

    chain: Chain
    rule: Rule | None
    verdict: str
    sure: bool

    def to_json(self) -> dict[str, Any]:
        """The hit as plain data; `rule` is quoted as its tool prints it. `way_back` only if it
        depends on the way of the answers.
        """
        rule = self.rule
        asks = rule is not None and any(each.field == "way_back" for each in rule.conditions)
        return {
            "tool": self.chain.tool,
            "table": self.chain.table,
            "chain": self.chain.name,
            "rule": rule.text if rule else f"policy {self.verdict}",
            "handle": rule.handle if rule else "",
            "verdict": self.verdict,
            "sure": self.sure,
            **({"way_back": True} if asks else {}),
        }


def quote_hit(hit: Mapping[str, Any]) -> str:
    """A `Hit` as plain data, on one line: `nft inet filter input: tcp dport 5000 drop`."""
    known = hit.get("way_back") and hit["sure"]
    why = " (answers would leave by another interface)" if known else ""
    return f"{hit['tool']} {hit['table']} {hit['chain']}: {hit['rule']}{why}"


_DONE = {"drop": "dropped", "reject": "rejected", "redirect": "redirected"}


def by_rule(hit: Mapping[str, Any]) -> str:
    """A `Hit` as the reason of a failed call: `dropped by this rule: nft inet filter input: …`."""
    return f"{_DONE.get(hit['verdict'], 'stopped')} by this rule: {quote_hit(hit)}"


def who_stops(
    hosts: Sequence[str], hit: Mapping[str, Any], *, others: str = "", at: str = ""
) -> str:
    """A fault by its cause: `nd1's firewall drops connections from nd0 (nft inet filter input)`.

    Args:
        hosts: that have the rule.
        hit: a `Hit` as plain data, with `incoming` and `packet` added.
        others: the hosts at the other end, in words; or else
        at: what is called, in words.
    """
    replies = str(hit["packet"]).startswith("reply")
    way = "from" if (replies if at else hit["incoming"]) else "to"
    what = f"{'answers' if replies else 'connections'} {way} {at or others}"
    verb = hit["verdict"] if hit["verdict"] in TAKING else "stop"
    who = f"{hosts[0]}'s firewall {verb}s"
    if len(hosts) > 1:
        who = f"The firewalls of {some_of(hosts)} {verb}"
    return f"{who} {what} ({hit['tool']} {hit['table']} {hit['chain']})"


@dataclass(frozen=True)
class Rules:
    """All rules that could be read. `readable` is False where no tool shows them."""

    readable: bool
    reason: str = ""
    managers: tuple[str, ...] = ()
    chains: tuple[Chain, ...] = ()

    def dropping(self) -> list[str]:
        """Rules that drop, reject or divert, with their place; at most `MAX_LINES`."""
        lines = []
        for chain in self.chains:
            if chain.hook and chain.policy in TAKING:
                lines.append(f"{chain.place}: policy {chain.policy}")
            lines += [f"{chain.place}: {r.text}" for r in chain.rules if r.verdict in TAKING]
        return lines[:MAX_LINES]

    def hits(self, packet: Packet) -> list[Hit]:
        """Rules that may drop, reject or divert this packet, in the order that it passes them."""
        hooks = _IN if packet.incoming else _OUT
        version = 6 if ":" in packet.source else 4
        tracked = self._is_tracked(packet, version)
        if tracked is False:
            packet = replace(packet, state="untracked")
        walk = _Walk(self.chains, packet)
        for hook in hooks:
            for chain in self.chains:
                if chain.hook == hook and version in chain.versions:
                    walk.sure = walk.left > 0 and tracked is not None
                    walk.through(chain)
        return walk.found

    def _is_tracked(self, packet: Packet, version: int) -> bool | None:
        """True if conntrack follows a packet; None if a rule may exempt it.

        `notrack` works only before conntrack: in the first hook that a packet passes.
        """
        if not any(rule.verdict == "notrack" for chain in self.chains for rule in chain.rules):
            return True
        walk = _Walk(self.chains, packet)
        for chain in self.chains:
            first = "prerouting" if packet.incoming else "output"
            if chain.hook == first and version in chain.versions:
                walk.sure = True
                walk.through(chain)
        return walk.tracked


class _Walk:
    """The walk of a packet through base chains and the chains that they jump to."""

    def __init__(self, chains: Sequence[Chain], packet: Packet) -> None:
        self.chains = {(c.tool, c.table, c.name): c for c in chains}
        self.packet = packet
        self.found: list[Hit] = []
        self.left = _MOST_RULES
        self.sure = True
        self.tracked: bool | None = True
        """True if conntrack follows the packet; None if a rule may exempt it."""

    def through(self, chain: Chain, depth: int = 0) -> bool:
        """True if the packet's walk surely ended in this chain or in one below."""
        for rule in chain.rules:
            if self.left <= 0:
                self.sure = False
                break
            self.left -= 1
            matches = rule_matches(rule, self.packet)
            if matches is False or rule.verdict == "none":
                continue
            if rule.verdict == "redirect" and self.packet.state != "new":
                continue  # the first packet decides: those after it follow what conntrack keeps
            if rule.verdict == "notrack":
                if self.tracked:
                    self.tracked = False if self.sure and matches else None
                continue
            if rule.verdict in TAKING:
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
                # If the chain below may have accepted the packet, the rest of this chain is unsure.
                self.sure = self.sure if matches else before and not _may_accept(below)
                if rule.verdict == "goto" and matches:
                    break
                continue
            if matches:
                if rule.verdict == "accept":
                    return True
                break  # return: back to where it came from, or to the policy
            self.sure = False
        if chain.hook and chain.policy in TAKING:
            self.found.append(Hit(chain, None, chain.policy, self.sure))
            return True
        return False


def _may_accept(chain: Chain) -> bool:
    return any(r.verdict in ("accept", "jump", "goto") for r in chain.rules)


def rule_matches(rule: Rule, packet: Packet) -> bool | None:
    """True if a rule matches a packet: True, False, or None where it may match."""
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
    own = ipaddress.ip_network(address, strict=False)
    low, dash, high = value.partition("-")
    try:
        if dash:
            first, last = ipaddress.ip_address(low), ipaddress.ip_address(high)
        else:
            network = ipaddress.ip_network(value, strict=False)
            first, last = network[0], network[-1]
    except ValueError:  # a name, or a set that is defined elsewhere
        return None
    if first.version != own.version or int(own[-1]) < int(first) or int(last) < int(own[0]):
        return False
    return True if int(first) <= int(own[0]) and int(own[-1]) <= int(last) else None


def _port(ports: tuple[int, int], value: str) -> bool | None:
    low, _, high = value.replace(":", "-").partition("-")
    if not _NUMBER.fullmatch(low) or (high and not _NUMBER.fullmatch(high)):
        return None  # a service by name
    first, last = int(low), int(high or low)
    if ports[1] < first or last < ports[0]:
        return False
    return True if first <= ports[0] and ports[1] <= last else None


def _length(length: int, value: str) -> bool | None:
    match = re.fullmatch(r"(<=|>=|<|>|)([0-9]{1,9})(?:-([0-9]{1,9}))?", value.replace(":", "-"))
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
    "syn": lambda p, v: (p.state == "new" and not p.midway) or (v == "any" and p.syn_ack),
    "way_back": lambda p, v: None if p.way_back is None else p.way_back == (v == "exists"),
    "length": lambda p, v: _length(p.length, v),
}
