"""What earlier runs let one expect of a number, and how far out another one is. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nccl_doctor.judge.history.sheet import Key, Sheet
from nccl_doctor.model.findings import Confidence, Figure

LEAST = 5
"""So many earlier values are needed to judge; of fewer nobody can say how they scatter."""
SURE = 8
"""From so many on the cause may be called likely."""
SHARE = 0.1
"""Less of a change than this is not worth a word, however steady the earlier runs were."""
DEVIATIONS = 4.0
"""So many standard deviations away; of normal noise, one value in thirty thousand is."""
_NORMAL = 1.4826
"""Median absolute deviation → standard deviation, for normal noise."""
_ONE_IN = 10
"""Of the earlier runs, one in so many may have been as bad: then it is still news."""
_ALIKE = 3
"""So many places with figures of one name have a spread in common."""
_CLEAR = 1.5
"""So many times as far out as is needed makes it likely."""


@dataclass(frozen=True)
class Change:
    """A number beside what earlier runs gave.

    `before` is their median, or the one earlier value; `runs` how many there were; `spread` their
    standard deviation, estimated robustly. `busy`: a CPU was busy in this run or in the only other
    one. `confidence` is there only where it is worse by more than noise.
    """

    check: str
    now: Figure
    before: float
    runs: int
    spread: float = 0.0
    busy: bool = False
    confidence: Confidence | None = None

    @property
    def value(self) -> float:
        """The number itself."""
        return float(self.now.value or 0.0)

    @property
    def share(self) -> float:
        """Change as a share of what was before: −0.18 is 18 % less."""
        return self.value / self.before - 1 if self.before else 0.0

    @property
    def is_judged(self) -> bool:
        """Whether earlier runs could tell a change from noise."""
        return self.runs >= LEAST and not self.busy

    @property
    def is_worse(self) -> bool:
        """Whether it is worse than earlier runs explain."""
        return self.confidence is not None

    @property
    def loss(self) -> float:
        """Share by which it is worse, in whichever direction that is; negative if it is better."""
        return -self.share if self.now.better == "higher" else self.share


def changes(now: Sheet, past: Sequence[Sheet]) -> list[Change]:
    """Every number of this run of which earlier runs gave one too, in the same unit.

    Values that were measured while the machine was busy do not count.
    """
    values = {key: _values(key, figure, past) for key, figure in now.numbers.items()}
    alike = _spreads_alike(values)
    return [
        _change(key[0], now.numbers[key], found, alike.get(key[:2], 0.0))
        for key, found in values.items()
        if found
    ]


def _values(key: Key, figure: Figure, past: Sequence[Sheet]) -> list[float]:
    earlier = (sheet.numbers.get(key) for sheet in past)
    return [
        float(each.value)
        for each in earlier
        if each is not None
        and isinstance(each.value, (int, float))
        and each.counts
        and (each.unit, each.better) == (figure.unit, figure.better)
    ]


def _spreads_alike(values: Mapping[Key, Sequence[float]]) -> dict[tuple[str, str], float]:
    """(check, name) → the usual share by which such figures scatter, where many places have one.

    A few values may happen to lie together; those of many places seldom all do.
    """
    shares: dict[tuple[str, str], list[float]] = defaultdict(list)
    for key, found in values.items():
        median = statistics.median(found) if len(found) >= LEAST else 0.0
        if median:
            shares[key[:2]].append(_spread(found, median) / median)
    return {name: statistics.median(f) for name, f in shares.items() if len(f) >= _ALIKE}


def _spread(values: Sequence[float], median: float) -> float:
    """Standard deviation, from the median absolute deviation.

    That of few values is too small on the average (by a third for four), and their median is off
    itself; the last factor covers both, and is next to nothing for many. Of fewer than `SURE` it
    may be next to nothing by chance: then half of their range counts, if that is more.
    """
    deviation = statistics.median(abs(each - median) for each in values)
    spread = _NORMAL * deviation * (1 + 2 / len(values))
    return spread if len(values) >= SURE else max(spread, (max(values) - min(values)) / 2)


def _change(check: str, figure: Figure, values: Sequence[float], alike: float) -> Change:
    median = statistics.median(values)
    spread = max(_spread(values, median), alike * median)
    change = Change(check, figure, median, len(values), spread, busy=not figure.counts)
    if not change.is_judged:
        return change
    sign = 1 if figure.better == "higher" else -1
    out = sign * (median - change.value)
    limit = max(SHARE * median, DEVIATIONS * spread, figure.least)
    as_bad = sum(sign * (each - change.value) <= 0 for each in values)
    if out <= limit or as_bad > len(values) // _ONE_IN:
        return change
    clear = out >= _CLEAR * limit and len(values) >= SURE and not as_bad
    confidence = Confidence.LIKELY if clear else Confidence.POSSIBLE
    return Change(check, figure, median, len(values), spread, confidence=confidence)


def percent(share: float) -> str:
    """A signed share for people: `−18 %`."""
    return f"{'−' if share < 0 else '+'}{abs(100 * share):.0f} %"


def amount(figure: Figure, value: float) -> str:
    """A number with its unit, three digits of it."""
    return f"{value:.3g} {figure.unit}".rstrip()
