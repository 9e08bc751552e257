"""Differences of the hosts' wall clocks, with bounds, over a channel that may be slow.

Each participant notes the time, posts it, waits for the posts of the others, and notes the time
again. A post that was received had been sent before: that bounds the difference of two clocks, from
both sides. A slow channel makes the bounds wide; it cannot make two equal clocks look different.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TIMEX_BYTES = 256
"""`struct timex` has 208."""
_TIME_ERROR = 5
"""Returned by adjtimex(2): the clock is not synchronized."""


@dataclass(frozen=True)
class Offset:
    """Seconds by which a clock is ahead of another one: certainly between `low` and `high`."""

    low: float
    high: float

    def __add__(self, other: Offset) -> Offset:
        return Offset(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Offset) -> Offset:
        return Offset(self.low - other.high, self.high - other.low)

    @property
    def middle(self) -> float:
        """The best estimate."""
        return (self.low + self.high) / 2

    @property
    def error(self) -> float:
        """The maximum error of the estimate."""
        return (self.high - self.low) / 2

    @property
    def at_least(self) -> float:
        """Seconds by which the clocks certainly differ, whichever is ahead; 0 if maybe equal."""
        return max(0.0, self.low, -self.high)


Exchange = Sequence[Any]
"""(time before posting, time after receiving, seats that were not received)."""
Reports = Mapping[int, Mapping[str, Any]]
"""Seat → {`group`: first seat of its group, `exchanges`: those that it took part in, in order,
`met`: seats that it exchanged with, where these are not all of its group}.
"""


def clock_offset(
    of: int, of_exchanges: Iterable[Exchange], to: int, to_exchanges: Iterable[Exchange]
) -> Offset | None:
    """The clock of seat `of` compared with that of seat `to`; None without posts of each other."""
    low, high = float("-inf"), float("inf")
    for (sent, received, missed), (other_sent, other_received, other_missed) in zip(
        of_exchanges, to_exchanges, strict=False
    ):
        if of not in other_missed:
            low = max(low, sent - other_received)
        if to not in missed:
            high = min(high, received - other_sent)
    if float("inf") in (high, -low):
        return None
    return Offset(min(low, high), max(low, high))  # crossed if a clock was set meanwhile


def clock_offsets(*rounds: Reports) -> dict[int, Offset]:
    """Every clock compared with that of one seat, over the chain of exchanges that is most exact.

    Args:
        rounds: reports of rounds; the first seat of the first one is the one.

    Returns: seat → `Offset`; without those whose chain to the one seat is broken.
    """
    if not rounds[0]:
        return {}
    partners = [_partners(reports) for reports in rounds]
    top = min(rounds[0], key=lambda seat: rounds[0][seat]["group"] != seat)
    result: dict[int, Offset] = {}
    nearest = [(0.0, top, 0.0, 0.0)]
    while nearest:
        _, seat, low, high = heapq.heappop(nearest)
        if seat in result:
            continue
        result[seat] = Offset(low, high)
        for reports, met in zip(rounds, partners, strict=True):
            for other in met.get(seat, ()):
                step = None if other in result else _between(other, seat, reports)
                if step is not None:
                    found = step + result[seat]
                    heapq.heappush(nearest, (found.error, other, found.low, found.high))
    return {seat: result[seat] for seat in rounds[0] if seat in result}


def _partners(reports: Reports) -> dict[int, list[int]]:
    """Seat → those that exchanged with it, and reported."""
    groups: dict[int, list[int]] = {}
    for seat, facts in reports.items():
        groups.setdefault(facts["group"], []).append(seat)
    met = {seat: facts.get("met") or groups[facts["group"]] for seat, facts in reports.items()}
    return {seat: [each for each in met[seat] if seat in met.get(each, ())] for seat in met}


def _between(of: int, to: int, reports: Reports) -> Offset | None:
    return clock_offset(of, reports[of]["exchanges"], to, reports[to]["exchanges"])


def clock_is_synchronized() -> bool | None:
    """True if the kernel's clock is synchronized; None if not known."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    state = adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # no mode set: it only reads
    return None if state < 0 else bool(state != _TIME_ERROR)
