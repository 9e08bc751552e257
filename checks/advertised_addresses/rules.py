"""Addresses that hosts tell each other: none of their own, the same, or out of reach. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Rank,
    Severity,
    Step,
    Where,
    shell,
)
from nccl_doctor.toolkit.peers.matrix import PeerCall, outcome_of, sure_attempts

_NOTE = "its own on every host, on the network of the job"
_OF_OTHERS = Fix(
    Step(shell("# export SGLANG_HOST_IP=ADDRESS"), note="SGLang"),
    Step(shell("# ray start --node-ip-address=ADDRESS"), note="Ray"),
)
_OWN = Fix(
    Step(shell("# export VLLM_HOST_IP=ADDRESS"), On.EVERY, note=_NOTE),
    alternatives=[_OF_OTHERS],
)

NOT_OWN = Kind(
    code="advertised-not-own",
    layer=Layer.NAME,
    title="A variable tells the other hosts an address that this host does not have",
    why="vLLM, SGLang or Ray listens on that address and tells it to the others: it cannot be "
    "bound, or they wait for a host that does not answer.",
    fix=_OWN,
    effects=(Effect.JOB_ONLY,),
)
SAME = Kind(
    code="advertised-same",
    layer=Layer.NAME,
    title="A variable tells the same address on several hosts",
    why="vLLM, SGLang and Ray know a host by its address: with the same one on several, they wait "
    'for hosts that never come ("Every node should have a unique IP address").',
    fix=_OWN,
    effects=(Effect.JOB_ONLY,),
)
UNREACHABLE = Kind(
    code="advertised-unreachable",
    layer=Layer.ROUTE,
    title="The other hosts cannot reach an address that programs would tell them",
    why="NCCL and gloo choose by interface, and work; vLLM, SGLang and Ray tell this address to "
    "the others, which then wait for it without an end.",
    fix=_OWN,
    severity=Severity.INFO,
    effects=(Effect.JOB_ONLY,),
)
VARIABLES: Mapping[str, Severity] = {
    "VLLM_HOST_IP": Severity.FAIL,
    "SGLANG_HOST_IP": Severity.FAIL,
    "RAY_NODE_IP_ADDRESS": Severity.WARN,  # scripts hand it to `ray start`
    "HOST_IP": Severity.INFO,  # in a pod it is mostly the address of its node, for other programs
}
"""Variables that tell an address of the host, and what a wrong one is."""
ROUTE, FQDN, DATA = "default route", "socket.getfqdn()", "MASTER_ADDR"
"""Names of what else gives an address; the last one is that of the job itself."""
_PIN = ("VLLM_HOST_IP", "SGLANG_HOST_IP")
_SHOWN = 3
_ARRIVES = ("ok", "mtu")


class _Told(NamedTuple):
    """One thing that gives an address on one host."""

    rank: Rank
    facts: Mapping[str, Any]
    by: str
    value: str
    address: str

    @property
    def is_own(self) -> bool:
        return self.address in self.facts["own"]

    @property
    def stays_inside(self) -> bool:
        """True if it is an address that leads every host to itself."""
        if not self.address:
            return False
        ip = ipaddress.ip_address(self.address)
        return ip.is_loopback or ip.is_unspecified


def reached_by_others(cluster: Cluster) -> dict[str, list[str]] | None:
    """Seat, as text → its addresses that another host has called with success in check `firewall`;
    None if nobody has called there.
    """
    reports = list(cluster.facts("firewall", "matrix"))
    reached: dict[str, set[str]] = {}
    for _, facts in reports:
        for seat, entries in facts["peers"].items():
            good = {e["address"] for e in entries if e["attempts"] and _arrives(e["attempts"][-1])}
            reached.setdefault(seat, set()).update(each.partition("%")[0] for each in good)
    return {seat: sorted(found) for seat, found in reached.items()} if reports else None


def _arrives(attempt: Mapping[str, Any]) -> bool:
    return attempt["outcome"] in _ARRIVES


def judge_addresses(reports: Sequence[tuple[Rank, Mapping[str, Any]]]) -> Iterator[Finding]:
    """Findings on what hosts tell, one for each variable and fault; the facts are of `observe`."""
    told = [
        _Told(rank, facts, each["by"], each["value"], each["address"])
        for rank, facts in reports
        for each in facts["advertised"]
    ]
    for name, severity in VARIABLES.items():
        mine = [each for each in told if each.by == name]
        inside = [each for each in mine if each.stays_inside]
        if inside:
            said = "leads every host to itself: right only where each engine stays on one host"
            yield _finding(UNREACHABLE, inside, said, Severity.INFO)
        yield from _strange(name, severity, [each for each in mine if not each.stays_inside])
    yield from _unreachable(reports, told)


def _strange(name: str, severity: Severity, mine: Sequence[_Told]) -> Iterator[Finding]:
    """Findings on values of a variable that are no addresses of their hosts."""
    alike: dict[str, list[_Told]] = {}
    for each in mine:
        alike.setdefault(each.address or each.value, []).append(each)
    alone = []
    for group in alike.values():
        strangers = [each for each in group if not each.is_own]
        if len(group) == 1:
            alone += strangers
        elif strangers:
            owners = [each.rank.host.label for each in group if each.is_own]
            whose = f"which is an address of {owners[0]}" if owners else "which none of them has"
            # The owner shows that the address of one host was copied to the others.
            copied = owners and severity is Severity.INFO
            level = Severity.WARN if copied else severity
            yield _finding(SAME, strangers, f"on {len(group)} hosts, {whose}", level)
    if alone:
        yield _finding(NOT_OWN, alone, "is no address of the host", severity)


def _unreachable(
    reports: Sequence[tuple[Rank, Mapping[str, Any]]], told: Iterable[_Told]
) -> Iterator[Finding]:
    """Findings on addresses that are out of reach, though their hosts are not."""
    of_seat = {rank.seat: facts for rank, facts in reports}
    reached: set[int] = set()
    calls: dict[tuple[int, str], list[PeerCall]] = {}
    for rank, facts in reports:
        if facts["data"] in facts.get("reached", ()):
            reached.add(rank.seat)
        for text, entries in (facts.get("peers") or {}).items():
            listener = int(text)
            for entry in entries:
                attempts = sure_attempts(entry, of_seat.get(listener, {}))
                outcome = outcome_of(attempts)
                if outcome == "untested":
                    continue
                call = PeerCall(
                    rank.seat,
                    listener,
                    entry["address"].partition("%")[0],
                    entry["interface"],
                    entry["port"],
                    entry.get("source"),
                    True,
                    attempts,
                    outcome,
                )
                calls.setdefault((listener, call.address), []).append(call)
                if DATA in entry["roles"] and outcome in _ARRIVES:
                    reached.add(listener)
    pinned = {each.rank.seat for each in told if each.by in _PIN and each.is_own}
    lost: dict[str, list[tuple[_Told, PeerCall]]] = {}
    for each in told:
        tried = calls.get((each.rank.seat, each.address), [])
        away = bool(tried) and not any(call.outcome in _ARRIVES for call in tried)
        # With one of these variables, nobody asks for the default route or the name.
        counts = each.by in VARIABLES or each.rank.seat not in pinned
        if away and counts and each.rank.seat in reached:
            lost.setdefault(each.by, []).append((each, tried[0]))
    for by, group in lost.items():
        words = ", ".join(sorted({call.words for _, call in group}))
        level = VARIABLES.get(by, Severity.INFO)
        yield _finding(UNREACHABLE, [each for each, _ in group], words, level)


def _finding(kind: Kind, group: Sequence[_Told], said: str, severity: Severity) -> Finding:
    first = group[0]
    values = sorted({each.value for each in group})
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    by = first.by if first.by in VARIABLES else f"own address by {first.by}"
    variable = first.by if first.by in VARIABLES else _PIN[0]
    steps = [
        Step(
            shell("export {:variable}={}", variable, each.facts["data"]),
            (each.rank.host.label,),
            undo=shell("export {:variable}={}", variable, each.value)
            if first.by in VARIABLES
            else shell("unset {:variable}", variable),
        )
        for each in group
        if each.facts["data"] and each.facts["data"] != each.address
    ]
    others = [] if variable == first.by else [_OF_OTHERS]
    fix = Fix(*steps, alternatives=others) if steps else ""
    return Finding(
        kind,
        f"{by} {', '.join(values[:_SHOWN])}{more}: {said}",
        Where(hosts=tuple(sorted({each.rank.host.label for each in group}))),
        {"told": {each.rank.host.label: each.value for each in group[:16]}},
        fix=fix,
        severity=severity,
        confidence=Confidence.CERTAIN if severity is Severity.FAIL else Confidence.LIKELY,
    )
