"""Round `again` of check firewall: what was open as the run began may be shut now.

A firewall that is reloaded during the run stops connections that come later, and what is seen is a
group that hangs. So where something between hosts failed after their calls had worked, they call
each other once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import ALONE, Cluster, Outcome, OutcomeStatus, Rank
from nccl_doctor.toolkit.peers.matrix import (
    PeerCall,
    Sorted,
    first_calls,
    read_calls,
    sort_calls,
)

AGAIN = "again"
RULES_AGAIN = "rules-again"
MOST_HOSTS = 32
_NEW_CALL = "did not call"
"""Words of a participant that waited for a connection in vain."""

Reports = Sequence[tuple[Rank, Mapping[str, Any]]]


def seats_again(cluster: Cluster, seats: Sequence[int], check: str) -> tuple[int, ...]:
    """Seats of hosts that call again, none where nothing has failed between hosts but in `check`;
    of many hosts, those that something failed on come first.
    """
    troubled = set(_troubled(cluster, check))
    if not troubled:
        return ()
    host_of = {rank.seat: rank.host.id for rank in cluster.ranks}
    in_order = sorted(seats, key=lambda seat: (host_of[seat] not in troubled, seat))
    return tuple(sorted(in_order[:MOST_HOSTS]))


def _troubled(cluster: Cluster, check: str) -> Iterator[int]:
    """Ids of hosts on which something that ranks did together has failed, in another check."""
    for rank, name, round_, outcome in cluster.unfinished():
        if round_ != ALONE and name != check and _is_trouble(outcome):
            yield rank.host.id


def _is_trouble(outcome: Outcome) -> bool:
    if outcome.status is OutcomeStatus.UNTESTED:
        return _NEW_CALL in outcome.reason
    return outcome.status in (OutcomeStatus.HUNG, OutcomeStatus.RAISED)


def latest_calls(cluster: Cluster, again: Reports) -> tuple[Sequence[PeerCall], Sorted]:
    """All calls, those of round `again` in place of the same hosts' first ones; and sorted."""
    calls, by_fault = first_calls(cluster)
    if not again:
        return calls, by_fault
    anew = {rank.seat for rank, _ in again}
    latest = [call for call in calls if not anew.issuperset(call.pair)]
    latest += read_calls(again, cluster.backend)
    return latest, sort_calls(latest)


def was_open(pairs: Iterable[tuple[int, int]], again: Reports) -> bool:
    """True if these ordered pairs of hosts had reached each other as the run began."""
    anew = {rank.seat for rank, _ in again}
    return all(anew.issuperset(pair) for pair in pairs)
