"""Findings on roads that take one new connection, and not as many as the job makes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from nccl_doctor.api import Confidence, Finding, Kind, Where, blame_links
from nccl_doctor.toolkit.hosts import link_names
from nccl_doctor.toolkit.peers.burst import LIMIT_S
from nccl_doctor.toolkit.peers.matrix import PeerCall

_MOST_SHOWN = 5
_FIX = (
    "look for rules that limit new connections (nft list ruleset | grep -E 'limit|ct count|meter'; "
    "iptables-save | grep -E 'limit|recent') on these hosts and on what is between them; accept "
    "the hosts of the job before them"
)


def few_at_once(
    kind: Kind, calls: Iterable[PeerCall], labels: Mapping[int, str]
) -> Iterator[Finding]:
    """One finding for each host or link that explains too few connections.

    Where what comes back gets lost, the answers to new connections get lost as well: then it is no
    matter of their number.

    Args:
        kind: of the findings.
        calls: of all hosts.
        labels: seat → name of its host.
    """
    made = {call.pair: call for call in calls if call.job and call.outcome == "ok"}
    short = {
        pair: call
        for pair, call in made.items()
        if call.shortfall and not ((back := made.get(pair[::-1])) and back.lost)
    }
    limited = kind.variant(
        title="Only some of several connections between hosts are accepted",
        why="One connection is accepted, and of many that begin at once some get no answer: each "
        "rank opens several to each other rank, and the job waits for the rest until a time-out.",
    )
    for cause in blame_links(made.keys() - short.keys(), short).causes:
        found = [short[pair] for pair in sorted(cause.pairs)]
        stood, wanted = min(call.shortfall or (0, 0) for call in found)
        yield Finding(
            limited,
            f"{stood} of {wanted} connections in {LIMIT_S:g} s, begun at once, twice; one alone is "
            f"accepted ({len(found)} of {len(made)} ordered pairs)",
            Where(
                hosts=tuple(labels[end] for end in cause.ends) if cause.is_host else (),
                links=() if cause.is_host else link_names(labels, cause.pairs),
            ),
            {"calls": [call.shown(labels) for call in found[:_MOST_SHOWN]]},
            fix=_FIX,
            confidence=Confidence.POSSIBLE
            if cause.confidence is Confidence.POSSIBLE
            else Confidence.LIKELY,
        )
