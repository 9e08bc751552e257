"""Expected value of a number after earlier runs, and the distance of a new one from it. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nccl_doctor.judge.history.sheet import Key, Sheet
from nccl_doctor.model.findings import Confidence, Figure

LEAST = 5
"""Least number of earlier values to judge; with fewer their spread is not known."""
SURE = 8
"""Least number of earlier values for the confidence `likely`."""
SHARE = 0.1
"""Least change that is reported, however steady the earlier runs were."""
DEVIATIONS = 4.0
"""Least distance in standard deviations; of normal noise, one value in thirty thousand has it."""
_NORMAL = 1.4826
"""Median absolute deviation → standard deviation, for normal noise."""
_ONE_IN = 10
"""One in so many earlier runs may have been as bad; with more, the change is not reported."""
_ALIKE = 3
"""Least number of places with figures of one name that share a spread."""
_CLEAR = 1.5
"""Factor of the least distance from which a change is `likely`."""


@dataclass(frozen=True)
class Change:
    """Number of this run, compared with the values of earlier runs.

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
        """True if earlier runs could tell a change from noise."""
        return self.runs >= LEAST and not self.busy

    @property
    def is_worse(self) -> bool:
        """True if it is worse than earlier runs explain."""
        return self.confidence is not None

    @property
    def loss(self) -> float:
        """Share by which it is worse, in whichever direction that is; negative if it is better."""
        return -self.share if self.now.better == "higher" else self.share


def changes(now: Sheet, past: Sequence[Sheet]) -> list[Change]:
    """Changes of all numbers of this run that earlier runs have too, in the same unit.

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
