"""Findings on roads that take one new connection, and not as many as the job makes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Confidence,
    Finding,
    Fix,
    Kind,
    Severity,
    Where,
    blame_links,
    look,
    shell,
)
from nccl_doctor.toolkit.firewall.netfilter import by_rule
from nccl_doctor.toolkit.hosts import link_names
from nccl_doctor.toolkit.peers.burst import LIMIT_S
from nccl_doctor.toolkit.peers.matrix import Pair, PeerCall

from .culprits import Suspects, how_to_open

_MOST_SHOWN = 5
_GROUPS = 2
"""Groups that a job has at least: its world, and one more."""
_FIX = Fix(
    look(
        shell("nft list ruleset | grep -E 'limit|ct count|meter'"),
        "rules that limit new connections",
    ),
    look(shell("iptables-save | grep -E 'limit|recent'")),
    alternatives=["accept the hosts of the job before such a rule, here or between the hosts"],
)


def calls_cut_short(calls: Iterable[PeerCall]) -> dict[Pair, PeerCall]:
    """Pair → call that the other end took, while it did not take as many as the job makes.

    Where what comes back gets lost, the answers to new connections get lost as well: then it is no
    matter of their number.
    """
    made = _made(calls)
    return {
        pair: call
        for pair, call in made.items()
        if call.shortfall and not ((back := made.get(pair[::-1])) and back.lost)
    }


def few_at_once(
    kind: Kind,
    calls: Iterable[PeerCall],
    labels: Mapping[int, str],
    rules: Mapping[int, Mapping[str, Any]],
    ranks: Mapping[int, int] | None = None,
) -> Iterator[Finding]:
    """One finding for each host or link that explains too few connections.

    A host that is called and may stop such calls by a rule of its own is the cause: one that always
    does would have stopped the single call, too. Comparison finds the others.

    Args:
        kind: of the findings.
        calls: of all hosts.
        labels: seat → name of its host.
        rules: seat → facts of the host about its rules, with `hits` from `follow_pairs`.
        ranks: seat → ranks on its host, where a job of gloo has no more connections than these
            make; None where it may have any number.
    """
    calls = list(calls)
    made, short = _made(calls), calls_cut_short(calls)
    limited = kind.variant(
        title="Only some of several connections between hosts are accepted",
        why="One connection is accepted, and of many that begin at once some get no answer: each "
        "rank opens several to each other rank, and the job waits for the rest until a time-out.",
    )

    def finding(pairs: Iterable[Pair], where: Where, **more: Any) -> Finding:
        found = [short[pair] for pair in sorted(pairs)]
        used = [call for call in found if call.used]
        stood, wanted = min(call.shortfall or (0, 0) for call in used or found)
        by = more.pop("by", "")
        enough = all(_is_enough(call, ranks) for call in used)
        if enough:
            by += "; enough for gloo with these ranks"
        return Finding(
            limited,
            f"{stood} of {wanted} connections in {LIMIT_S:g} s, begun at once, twice; one alone is "
            f"accepted ({len(found)} of {len(made)} ordered pairs){by}",
            where,
            {"calls": [call.shown(labels) for call in found[:_MOST_SHOWN]]},
            severity=Severity.WARN if enough else None,
            **more,
        )

    limits = _limits(short, rules)
    for seat, hits in limits.items():
        own = tuple(call for pair, call in short.items() if pair[1] == seat)
        suspects = Suspects(own, frozenset([seat]), Confidence.LIKELY, rules={seat: hits})
        steps = how_to_open(suspects, labels, rules, remove=False)
        yield finding(
            (call.pair for call in own),
            Where(hosts=(labels[seat],)),
            by=f"; {by_rule(hits[0])}",
            fix=Fix(*steps) if steps else _FIX,
            confidence=Confidence.LIKELY,
        )
    left = {pair for pair in short if pair[1] not in limits}
    for cause in blame_links(made.keys() - short.keys(), left).causes:
        yield finding(
            cause.pairs,
            Where(
                hosts=tuple(labels[end] for end in cause.ends) if cause.is_host else (),
                links=() if cause.is_host else link_names(labels, cause.pairs),
            ),
            fix=_FIX,
            confidence=Confidence.POSSIBLE
            if cause.confidence is Confidence.POSSIBLE
            else Confidence.LIKELY,
        )


def _is_enough(call: PeerCall, ranks: Mapping[int, int] | None) -> bool:
    """True if a job of gloo gets by: each pair of ranks has one connection in each group."""
    stood, _ = call.shortfall or (0, 0)
    return ranks is not None and stood >= _GROUPS * ranks[call.caller] * ranks[call.listener]


def _made(calls: Iterable[PeerCall]) -> dict[Pair, PeerCall]:
    return {call.pair: call for call in calls if call.job and call.outcome == "ok"}


def _limits(
    short: Mapping[Pair, PeerCall], rules: Mapping[int, Mapping[str, Any]]
) -> dict[int, Sequence[Mapping[str, Any]]]:
    """Seat of a host that is called → its rules that may stop the first packet of such a call."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for seat, facts in sorted(rules.items()):
        for hit in facts["hits"]:
            pair = (int(hit["caller"]), int(hit["listener"]))
            if pair in short and pair[1] == seat and hit["packet"] == "first":
                same = (by_rule(each) for each in found.get(seat, ()))
                if by_rule(hit) not in same:
                    found.setdefault(seat, []).append(hit)
    return dict(found)
