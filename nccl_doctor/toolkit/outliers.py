"""Bus bandwidth of groups, and outliers among their times. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

Edge = tuple[int, int]
"""Two neighbours of a ring."""

DEVIATIONS = 5.0
"""Scaled median absolute deviations from the median that make an outlier (with normal noise, 1
value in a million)."""
TIMES = 2.0
"""An outlier must also be so many times slower than the median: less is not worth reporting."""
LEAST = 3
"""With fewer values it is not known which one is odd."""
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
    """Keys whose time is an outlier among equals, and how many times the median it is.

    By the median absolute deviation; empty if there are fewer than three to compare, or none is
    `times` slower than the median.
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
    """Pairs of every member with both of its neighbours, no member in two pairs of one round.

    Returns: two rounds for an even number of members, three for an odd one; none for fewer than
    three members, as one pair has no other to compare with.
    """
    n = len(members)
    if n < LEAST:
        return []
    edges = [(members[at], members[(at + 1) % n]) for at in range(n)]
    even = n - n % 2
    rounds = [edges[0:even:2], edges[1:even:2]]
    return rounds if n == even else [*rounds, edges[even:]]


def slow_edges(seconds: Mapping[Edge, float]) -> set[Edge]:
    """Pairs that are outliers among the pairs that share no member with one of their ends.

    A slow member makes both of its pairs slow, so its other pair must not be compared with.
    """
    found = set()
    at_each = Counter(end for edge in seconds for end in edge)
    ordered = sorted(seconds.values())
    # No median is lower when only those of one end are left out: most pairs need no closer look.
    lowest = max(0, len(ordered) - max(at_each.values(), default=0) - 1) // 2
    for edge, value in seconds.items():
        if value <= TIMES * ordered[lowest]:
            continue
        for end in edge:
            others = [each for pair, each in seconds.items() if end not in pair]
            if others and value > _limit(others):
                found.add(edge)
    return found


@dataclass(frozen=True)
class Slow:
    """Causes of slow pairs: slow members, and pairs whose members are good with others."""

    members: tuple[int, ...]
    edges: tuple[Edge, ...]


def blame_edges(first: Mapping[Edge, float], again: Mapping[Edge, float]) -> Slow:
    """Slow members and pairs after a second try, in which suspects had good partners.

    If there are too few members for such a partner, a member whose pairs are all slow is blamed.

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
    """Rounds that confirm or clear: every slow pair again, and each end with a good partner.

    No more than half as many pairs as in a ring are in one round: a pair that was slow only because
    all the others were busy is not slow again.
    """
    slow = slow_edges(first)
    ends = sorted({end for edge in slow for end in edge})
    good = [end for edge in first for end in edge if end not in ends]
    good = list(dict.fromkeys(good))
    pairs = [sorted(slow)]
    for end in ends:
        # With few members a good one may be paired with several suspects, one after the other.
        partner = good[ends.index(end) % len(good)] if good else None
        if partner is not None:
            pairs.append([(min(end, partner), max(end, partner))])
    members = {end for edge in first for end in edge}
    return in_rounds([edge for found in pairs for edge in found], max(1, len(members) // 4))


def in_rounds(edges: Iterable[Edge], most: int) -> list[list[Edge]]:
    """Pairs in few rounds, no member in two pairs of one round, and no more than `most` in one."""
    rounds: list[list[Edge]] = []
    for edge in edges:
        for one in rounds:
            if len(one) < most and not any(set(edge) & set(other) for other in one):
                one.append(edge)
                break
        else:
            rounds.append([edge])
    return rounds
