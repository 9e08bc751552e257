"""Links whose speed is not measured: they lose packets, or calls on them fail. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nccl_doctor.api import Cluster, Rank
from nccl_doctor.toolkit.peers.loss import read_losses
from nccl_doctor.toolkit.peers.matrix import read_calls
from nccl_doctor.toolkit.peers.schedule import Meeting, Slots

_CALLED = ("matrix", "again")
"""Rounds of check `firewall`, the one that counts last."""


def lossy_links(cluster: Cluster) -> set[frozenset[int]]:
    """Both seats of each link that loses packets, in one direction or both."""
    return {frozenset(pair) for pair in read_losses(cluster).pairs}


def shut_links(cluster: Cluster, slots: Slots) -> set[frozenset[int]]:
    """Those of these meetings for which the calls of check `firewall` failed, one way or both."""
    latest: dict[int, tuple[Rank, dict[str, Any]]] = {}
    for name in _CALLED:
        for rank, facts in cluster.facts("firewall", name):
            _, before = latest.get(rank.seat, (rank, {"peers": {}}))
            latest[rank.seat] = rank, {**facts, "peers": {**before["peers"], **facts["peers"]}}
    meetings = [each for slot in slots for each in slot]
    return {frozenset(each) for each in meetings if _fails(each, latest, cluster.backend)}


def _fails(
    meeting: Meeting, reports: Mapping[int, tuple[Rank, Mapping[str, Any]]], backend: str
) -> bool:
    """Whether no call of the one to the other, or the other way, has got through."""
    between = []
    for caller, listener in (meeting, meeting[::-1]):
        if caller not in reports:
            return False  # not known
        rank, facts = reports[caller]
        peers = {str(listener): facts["peers"].get(str(listener), [])}
        between.append((rank, {**facts, "peers": peers}))
    worked: dict[tuple[int, int], bool] = {}
    for call in read_calls(between, backend):
        if call.job:
            worked[call.pair] = worked.get(call.pair, False) or call.outcome == "ok"
    return not all(worked.values())
