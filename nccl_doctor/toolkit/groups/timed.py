"""Rates of all-reduces, as `Stopwatch.all_reduce` times them, and which pairs are slow. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from nccl_doctor.toolkit.cpu_wait import was_starved
from nccl_doctor.toolkit.groups.attempts import Attempt
from nccl_doctor.toolkit.outliers import (
    Edge,
    algorithm_bandwidth,
    blame_edges,
    bus_bandwidth,
)
from nccl_doctor.toolkit.units import rate_text

TIMED = "all_reduce"
"""The fact that holds what was timed."""


def with_rates(timed: Iterable[Mapping[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """The same, each size with `algbw` and `busbw` in bytes per second, as nccl-tests has them."""
    return [
        {
            **each,
            "algbw": algorithm_bandwidth(each["bytes"], each["seconds"]),
            "busbw": bus_bandwidth(each["bytes"], each["seconds"], ranks),
        }
        for each in timed
    ]


def largest(attempt: Attempt) -> int:
    """Bytes of the largest all-reduce that every member had time for; the attempt is good."""
    return min(int(m.outcome.facts[TIMED][-1]["bytes"]) for m in attempt.members)


def seconds_of(attempt: Attempt, size: int) -> float:
    """Seconds of one size, or of the largest below it, by the slowest member."""
    return max(
        float(each["seconds"])
        for member in attempt.members
        for each in [e for e in member.outcome.facts[TIMED] if e["bytes"] <= size][-1:]
    )


def was_busy(attempt: Attempt) -> bool:
    """True if a member waited for its CPU at the largest size: then the times mean little."""
    parts = [each for m in attempt.members for each in m.outcome.facts[TIMED][-1:]]
    return any(was_starved(each["cpu"]) for each in parts)


class SlowPairs(NamedTuple):
    """Pairs that are slow twice, by one member or by the path between two.

    `ends`: the one, or the two; `pairs`: the pairs that show it; `words`: how slow, and the others;
    `times`: how many times as long as others the fastest of them took in the second try; 0 if
    there are no others.
    """

    ends: tuple[int, ...]
    pairs: tuple[Edge, ...]
    words: str
    times: float


def slow_pairs(
    first: Mapping[Edge, float], again: Mapping[Edge, float], rate: Callable[[float], float]
) -> Iterator[SlowPairs]:
    """The slow members, then the slow pairs of others, as `blame_edges` finds them.

    Args:
        first: seconds of the pairs of a ring.
        again: seconds of the second try.
        rate: bytes per second of a pair that takes so many seconds.
    """
    found = blame_edges(first, again)
    named = {*found.edges, *(edge for edge in first if set(edge) & set(found.members))}
    fast = [value for edge, value in first.items() if edge not in named]
    usual = statistics.median(fast) if fast else 0.0

    def one(ends: tuple[int, ...], pairs: tuple[Edge, ...], where: str) -> SlowPairs:
        best = min(again.get(pair, first[pair]) for pair in pairs)
        others = rate_text(rate(usual)) if usual else ""
        words = f"{where} {rate_text(rate(best))} bus bandwidth, measured twice"
        return SlowPairs(
            ends, pairs, f"{words}; other pairs: {others}", best / usual if usual else 0.0
        )

    for member in found.members:
        pairs = tuple(edge for edge in first if member in edge)
        yield one((member,), pairs, "with its neighbours")
    for edge in found.edges:
        yield one(edge, (edge,), "between the two hosts")
