"""Precision, recall and place over many runs, each with the interval that chance leaves. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tests.lab.corpus import Case, Cause
from tests.lab.corpus.score import Score, places

_Z = 1.959964
"""Quantile of the normal distribution for 95 %."""

Row = tuple[Case, Score]


@dataclass(frozen=True)
class Share:
    """How many of how many."""

    hits: int
    of: int

    @property
    def value(self) -> float:
        """The share, from 0 to 1; 1 where nothing was counted."""
        return self.hits / self.of if self.of else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """The Wilson score interval of 95 %: Wilson 1927, Journal of the ASA 22, p. 209."""
        if not self.of:
            return 0.0, 1.0
        n, p, z = self.of, self.value, _Z
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} ({self.hits} of {self.of}; {low:.1%} to {high:.1%})"


@dataclass(frozen=True)
class Figures:
    """What many runs add up to.

    Attributes:
        precision: root causes above info that name an injected one, of all that were reported.
        recall: injected causes that are named, by a right code at a place of theirs, of all.
        place: of those that are named, the ones whose place is right: all of it, and no more.
    """

    precision: Share
    recall: Share
    place: Share


def figures(rows: Iterable[Row]) -> Figures:
    """Add up runs, those of healthy clusters too: what is reported there is false."""
    true = reported = found = injected = exact = 0
    for case, score in rows:
        reported += len(score.reported)
        true += sum(_shared(each, case.expect) for each in score.reported)
        injected += len(case.expect)
        for cause in case.expect:
            if not _shared(cause, score.reported):
                continue
            found += 1
            too_much = any(_shared(cause, [each]) for each in score.wrong)
            exact += cause not in score.missed and not too_much
    return Figures(Share(true, reported), Share(found, injected), Share(exact, found))


def _shared(cause: Cause, others: Iterable[Cause]) -> bool:
    """Whether another cause has one of its codes at one of its places."""
    mine = {*places(cause), *cause.or_links}
    return any(
        cause.codes & other.codes and mine & {*places(other), *other.or_links} for other in others
    )
