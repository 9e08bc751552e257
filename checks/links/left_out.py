"""Links whose speed is not measured, or from one side: they lose packets, or calls fail. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nccl_doctor.api import Cluster, Rank
from nccl_doctor.toolkit.peers.loss import read_losses
from nccl_doctor.toolkit.peers.matrix import PeerCall, first_calls, read_calls
from nccl_doctor.toolkit.peers.schedule import Slots

_FIRST, _AGAIN = "matrix", "again"
"""Rounds of check `firewall`."""


def lossy_links(cluster: Cluster) -> set[frozenset[int]]:
    """Both seats of each link that loses packets, in one direction or both."""
    return {frozenset(pair) for pair in read_losses(cluster).pairs}


def shut_links(cluster: Cluster, slots: Slots) -> set[frozenset[int]]:
    """Those of these meetings for which the calls of check `firewall` failed, one way or both; not
    those that failed only in a direction in which the job does not connect.
    """
    calls = [call for call in _latest_calls(cluster) if call.job and call.used]
    if all(call.outcome == "ok" for call in calls):
        return set()
    worked: dict[tuple[int, int], bool] = {}
    for call in calls:
        worked[call.pair] = worked.get(call.pair, False) or call.outcome == "ok"
    meetings = [each for slot in slots for each in slot]
    return {
        frozenset(each)
        for each in meetings
        if not (worked.get(each, True) and worked.get(each[::-1], True))
    }


def from_open_side(cluster: Cluster, slots: Slots) -> Slots:
    """The same meetings; the one whose call would fail, in a direction that the job does not take,
    is called instead.
    """
    calls = (call for call in _latest_calls(cluster) if call.job and not call.used)
    failed = {call.pair for call in calls if call.outcome != "ok"}
    turned = [[each[::-1] if each in failed else each for each in slot] for slot in slots]
    return turned if failed else slots


def _latest_calls(cluster: Cluster) -> Sequence[PeerCall]:
    """The calls between any two hosts in the last round in which the one called the other."""
    if not any(cluster.facts("firewall", _AGAIN)):
        return first_calls(cluster)[0]
    latest: dict[int, tuple[Rank, dict[str, Any]]] = {}
    for name in (_FIRST, _AGAIN):
        for rank, facts in cluster.facts("firewall", name):
            _, before = latest.get(rank.seat, (rank, {"peers": {}}))
            latest[rank.seat] = rank, {**facts, "peers": {**before["peers"], **facts["peers"]}}
    return read_calls(latest.values(), cluster.backend)
