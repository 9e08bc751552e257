"""Calls that a proxy on the called host takes and passes on: a service mesh. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import Cluster, Confidence, Finding, Fix, Severity, Where, host_labels
from nccl_doctor.toolkit.firewall.netfilter import by_rule, quote_hit
from nccl_doctor.toolkit.peers.matrix import PeerCall

from .culprits import Suspects, how_to_open
from .kinds import PEER_INTERCEPTED
from .translated import is_inside

_FORWARDED = PEER_INTERCEPTED.variant(
    title="A proxy takes the connections between hosts and passes them on",
    why="Each connection of the job ends at the proxy (a service mesh), which opens another one: "
    "slower, ended when it is idle for too long (after an hour, as Envoy is set by default), and "
    "cut when the proxy restarts.",
)
_MOST_SHOWN = 5


def forwarded_calls(cluster: Cluster, calls: Iterable[PeerCall]) -> tuple[PeerCall, ...]:
    """Calls of the job that work, and that the listener saw come from its own host: from loopback
    or from an own address. What a router translates comes from another address.
    """
    own = {rank.seat: rank.host.addresses for rank in cluster.ranks}

    def is_forwarded(call: PeerCall) -> bool:
        far = call.seen
        if not (call.job and call.outcome == "ok" and far) or far in own.get(call.caller, ()):
            return False
        return is_inside(far) or far in own.get(call.listener, ())

    return tuple(filter(is_forwarded, calls))


def judge_forwarded(
    cluster: Cluster, calls: Sequence[PeerCall], rules: Mapping[int, Mapping[str, Any]]
) -> Iterator[Finding]:
    """One finding for all hosts with a proxy; none without such calls.

    Args:
        cluster: of all hosts.
        calls: as `forwarded_calls` returns them.
        rules: seat → facts of the host about its rules, with `hits` from `follow_pairs`.
    """
    if not calls:
        return
    labels, call = host_labels(cluster), min(calls, key=lambda each: each.pair)
    hits = _redirects({each.pair for each in calls}, rules)
    seats = frozenset({each.listener for each in calls} | hits.keys())
    sources = {rank.seat: rank.host.addresses for rank in cluster.ranks}
    told = call.source or next(iter(sources[call.caller]), "an address of its own")
    message = f"{labels[call.caller]} calls {labels[call.listener]} from {told}, and is seen there "
    message += f"to call from {call.seen}"
    message += f" ({len(calls)} such calls)" if len(calls) > 1 else ""
    found_by = [(labels[seat], hit) for seat, own in hits.items() for hit in own]
    message += f"; {by_rule(found_by[0][1])}" if found_by else ""
    evidence: dict[str, Any] = {"calls": [each.shown(labels) for each in calls[:_MOST_SHOWN]]}
    if found_by:
        evidence["rules"] = [f"{host}: {quote_hit(hit)}" for host, hit in found_by]
    found = Suspects(tuple(calls), seats, Confidence.CERTAIN, rules=hits)
    steps = how_to_open(found, labels, rules, remove=True) if hits else []
    yield Finding(
        _FORWARDED,
        message,
        Where(hosts=tuple(sorted(labels[seat] for seat in seats))),
        evidence,
        fix=Fix(text=_FORWARDED.fix, alternatives=[Fix(*steps)] if steps else []),
        severity=Severity.WARN,
        confidence=Confidence.CERTAIN,
    )


def _redirects(
    pairs: set[tuple[int, int]], rules: Mapping[int, Mapping[str, Any]]
) -> dict[int, list[Mapping[str, Any]]]:
    """Seat of a host → its rules that surely divert such calls, each once."""
    found: dict[int, dict[str, Mapping[str, Any]]] = {}
    for seat, facts in sorted(rules.items()):
        for hit in facts["hits"]:
            ends, diverts = (hit["caller"], hit["listener"]), hit["verdict"] == "redirect"
            if hit["sure"] and diverts and ends in pairs:
                found.setdefault(seat, {}).setdefault(quote_hit(hit), hit)
    return {seat: list(own.values()) for seat, own in found.items()}
