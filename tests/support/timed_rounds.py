"""Rounds in which groups are timed, held on made-up clusters as a check plans them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Check, Cluster, Outcome, OutcomeStatus
from nccl_doctor.model.findings import Round

IDLE = {"wall_s": 1.0, "cpu_s": 0.5, "waited_s": 0.0, "preempted": 0}
BUSY = {**IDLE, "waited_s": 0.9}
Facts = Callable[[Round, tuple[int, ...], int], Mapping[str, Any] | Outcome]
"""What a seat observes in a group of a round."""


def all_reduce(size: int, seconds: float, cpu: Mapping[str, Any] = IDLE) -> dict[str, Any]:
    """Facts of a member whose largest all-reduce had this size."""
    return {"all_reduce": [{"bytes": size, "seconds": seconds, "times": 5, "cpu": dict(cpu)}]}


def hold(check: Check, cluster: Cluster, facts: Facts) -> tuple[Cluster, list[Round]]:
    """The cluster after all rounds that the check plans, and these rounds in order."""
    held: list[Round] = []
    while new := [r for r in check.plan(cluster) if r.name not in {old.name for old in held}]:
        for round_ in new:
            held.append(round_)
            seats = [seat for group in round_.groups for seat in group]
            assert len(seats) == len(set(seats)), "a seat stands in at most one group of a round"
            for group in round_.groups:
                for seat in group:
                    seen = facts(round_, group, seat)
                    cluster = told(cluster, check.name, round_.name, seat, (min(group), seen))
    return cluster, held


def told(
    cluster: Cluster,
    check: str,
    name: str,
    seat: int,
    seen: tuple[int, Mapping[str, Any] | Outcome],
) -> Cluster:
    """A copy in which this rank has observed this, in the group of this lowest seat, in a round."""
    group, facts = seen
    made = facts if isinstance(facts, Outcome) else Outcome(OutcomeStatus.OK, facts=dict(facts))
    ranks = []
    for rank in cluster.ranks:
        if rank.seat == seat:
            rounds = {**rank.facts.get(check, {}), name: replace(made, group=group)}
            rank = replace(rank, facts={**rank.facts, check: rounds})
        ranks.append(rank)
    return replace(cluster, ranks=tuple(ranks))
