"""Rounds of the second try, in which fewer pairs are measured at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import Cluster, Rank
from nccl_doctor.toolkit.peers.schedule import Meeting, in_turns

from .slowness import Measure, Pair, measures_of

AGAIN = "confirm"
"""How the names of these rounds begin."""


def turns(
    cluster: Cluster, check: str, meetings: Sequence[Meeting], hosts: int
) -> Iterator[tuple[str, list[Meeting]]]:
    """Name and meetings of each round: with at most half as many at once as so many hosts have
    held in the first try.
    """
    planned = in_turns(meetings, max(1, hosts // 4))
    were_there = {each.rank.seat for each in cluster.evidence(check, AGAIN)}
    if planned and not were_there.issubset(seat for met in planned[0] for seat in met):
        planned = [list(meetings)]  # the report of an older version, which had one round for all
    for number, held in enumerate(planned, 1):
        yield f"{AGAIN}-{number}" if number > 1 else AGAIN, held


def rounds_held(cluster: Cluster, check: str) -> list[str]:
    """Names of these rounds, in a cluster in which they were held."""
    return sorted(name for name in cluster.held(check) if name.startswith(AGAIN))


def reports_again(cluster: Cluster, check: str) -> Iterator[tuple[Rank, Mapping[str, Any]]]:
    """(observer, facts) of all these rounds."""
    for name in rounds_held(cluster, check):
        yield from cluster.facts(check, name)


def measured_again(cluster: Cluster, check: str) -> dict[Pair, Measure]:
    """The measurements of all these rounds; a pair meets in one of them."""
    found: dict[Pair, Measure] = {}
    for name in rounds_held(cluster, check):
        found |= measures_of(cluster, check, name)
    return found
