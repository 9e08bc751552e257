"""The ranks of the job that participants claim. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from nccl_doctor.api import Rank


def stands_for(rank: Rank) -> int:
    """Number of ranks: one, or for a host that did not join, all that it would have started.

    On such a host only the first rank reports.
    """
    size = rank.launch.local_world_size if rank.launch else None
    return 1 if rank.host.joined else size or 1


def claimed_ranks(ranks: Sequence[Rank]) -> frozenset[int | None]:
    """Ranks that a host claims, by those of its ranks that reported."""
    claimed: set[int | None] = set()
    for rank in ranks:
        claimed.add(rank.rank)
        if rank.rank is not None and not rank.host.joined:
            first = rank.rank - (rank.local_rank or 0)
            claimed |= set(range(first, first + stands_for(rank)))
    return frozenset(claimed)
