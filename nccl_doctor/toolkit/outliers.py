"""What speeds of groups say: bus bandwidth, and who stands out. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

Edge = tuple[int, int]
"""Two neighbours of a ring."""

DEVIATIONS = 5.0
"""So many scaled median absolute deviations from the median stand out (of normal noise, 1 value in
a million does)."""
TIMES = 2.0
"""And it must be so many times slower than the median: less is not worth a word."""
LEAST = 3
"""Of fewer values nobody can say which one is odd."""
_NORMAL = 1.4826
"""Median absolute deviation → standard deviation, for normal noise."""


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Bytes per second of one collective, as nccl-tests defines `algbw`."""
    return size / seconds if seconds > 0 else 0.0


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second that every link of the group carries in an all-reduce: `busbw`.

    2 (n - 1) / n times `algbw`, as nccl-tests' PERFORMANCE.md defines it, so that groups of
    different sizes can be compared.
    """
    factor = 2 * (ranks - 1) / ranks if ranks > 1 else 0.0
    return factor * algorithm_bandwidth(size, seconds)


def slow_ones(seconds: Mapping[K, float], times: float = TIMES) -> dict[K, float]:
    """Whose time stands out among equals, and how many times the median it is.

    By the median absolute deviation; nobody, where there are fewer than three to be compared, or
    who is not `times` slower than the median.
    """
    if len(seconds) < LEAST:
        return {}
    limit = _limit(list(seconds.values()), times)
    median = statistics.median(seconds.values())
    return {key: each / median for key, each in seconds.items() if median and each > limit}


def _limit(values: Sequence[float], times: float = TIMES) -> float:
    median = statistics.median(values)
    spread = _NORMAL * statistics.median(abs(each - median) for each in values)
    return max(times * median, median + DEVIATIONS * spread)


def ring(members: Sequence[int]) -> list[list[Edge]]:
    """Every member with both of its neighbours, nobody in two pairs of one round.

    Returns: two rounds for an even number of members, three for an odd one; of fewer than three
    members none: a pair has nobody to be compared with.
    """
    n = len(members)
    if n < LEAST:
        return []
    edges = [(members[at], members[(at + 1) % n]) for at in range(n)]
    even = n - n % 2
    rounds = [edges[0:even:2], edges[1:even:2]]
    return rounds if n == even else [*rounds, edges[even:]]


def slow_edges(seconds: Mapping[Edge, float]) -> set[Edge]:
    """Pairs that stand out beside the pairs that share no member with one of their ends.

    A slow member makes both of its pairs slow; so it must not be among what they are held against.
    """
    found = set()
    for edge, value in seconds.items():
        for end in edge:
            others = [each for pair, each in seconds.items() if end not in pair]
            if others and value > _limit(others):
                found.add(edge)
    return found


@dataclass(frozen=True)
class Slow:
    """Who makes pairs slow: members by themselves, and pairs whose members are good with others."""

    members: tuple[int, ...]
    edges: tuple[Edge, ...]


def blame_edges(first: Mapping[Edge, float], again: Mapping[Edge, float]) -> Slow:
    """Blame after a second try, in which suspects met partners that had been good.

    Where there are too few members for such a partner, a member all of whose pairs are slow is it.

    Args:
        first: seconds of the pairs of a ring.
        again: seconds of the pairs of the second try: slow pairs of the first, and their ends with
            good partners.
    """
    slow = slow_edges(first)
    fast = [value for edge, value in first.items() if edge not in slow]
    if not (slow and fast):
        return Slow((), ())
    limit = _limit(fast)
    still = {edge for edge in slow if again.get(edge, 0.0) > limit}
    members = set()
    for member in {end for edge in still for end in edge}:
        partners = [value for edge, value in again.items() if member in edge and edge not in slow]
        own = {edge for edge in first if member in edge}
        if min(partners) > limit if partners else len(own) > 1 and own <= still:
            members.add(member)
    edges = sorted(edge for edge in still if not members & set(edge))
    return Slow(tuple(sorted(members)), tuple(edges))


def second_try(first: Mapping[Edge, float]) -> list[list[Edge]]:
    """Rounds that confirm or clear: every slow pair once more, and each end with a good partner."""
    slow = slow_edges(first)
    ends = sorted({end for edge in slow for end in edge})
    good = [end for edge in first for end in edge if end not in ends]
    good = list(dict.fromkeys(good))
    pairs = [sorted(slow)]
    for end in ends:
        # Of few members a good one may have to meet several suspects, one after the other.
        partner = good[ends.index(end) % len(good)] if good else None
        if partner is not None:
            pairs.append([(min(end, partner), max(end, partner))])
    return _in_rounds([edge for found in pairs for edge in found])


def _in_rounds(edges: Sequence[Edge]) -> list[list[Edge]]:
    """Pairs in as few rounds as come easily, nobody in two pairs of one round."""
    rounds: list[list[Edge]] = []
    for edge in edges:
        for one in rounds:
            if not any(set(edge) & set(other) for other in one):
                one.append(edge)
                break
        else:
            rounds.append([edge])
    return rounds
