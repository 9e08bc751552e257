"""Figures of a run, the usual value of each, and words that changed between runs. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nccl_doctor.judge.checks import error_words, view_for
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster, OutcomeStatus
from nccl_doctor.model.findings import Confidence, Figure, Where
from nccl_doctor.toolkit.units import amount_text

Key = tuple[str, str, Where]
"""Check, name of the figure, and place."""


@dataclass(frozen=True)
class Sheet:
    """The figures of one run.

    `numbers` are measured, `words` are not; words of a host on which all ranks agree stand for the
    host. `seen` are the hosts on which a check observed, so that what it did not name was not
    there. `broken` maps checks to what their `figures` raised.
    """

    numbers: Mapping[Key, Figure] = field(default_factory=dict)
    words: Mapping[Key, Figure] = field(default_factory=dict)
    seen: Mapping[str, frozenset[str]] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)


def sheet_of(cluster: Cluster, checks: Iterable[Check]) -> Sheet:
    """Ask every check; one that breaks keeps what it said before."""
    numbers: dict[Key, Figure] = {}
    words: dict[Key, list[Figure]] = {}
    seen: dict[str, frozenset[str]] = {}
    broken: dict[str, str] = {}
    for check in checks:
        if type(check).figures is Check.figures:
            continue  # it has none
        view = view_for(check, cluster)
        try:
            for figure in check.figures(view):
                key = (check.name, figure.name, _place(figure))
                if not figure.better:
                    words.setdefault(key, []).append(figure)
                elif isinstance(figure.value, (int, float)) and math.isfinite(figure.value):
                    numbers[key] = _worse(figure, numbers.get(key))
        except Exception as error:  # of a plug-in, or on the facts of another version
            broken[check.name] = error_words(error)
        seen[check.name] = frozenset(
            item.host.label
            for item in view.evidence(check.name)
            if item.outcome.status is OutcomeStatus.OK
        )
    return Sheet(numbers, {key: _united(found) for key, found in words.items()}, seen, broken)


def hosts_of(where: Where) -> set[str]:
    """Every host that a place touches."""
    return {*where.hosts, *(end for link in where.links for end in link)}


def _place(figure: Figure) -> Where:
    where = figure.where
    if not figure.better and where.hosts:
        return Where(hosts=where.hosts)
    named = where.hosts or where.links or where.devices
    return replace(where, ranks=()) if named else where


def _worse(one: Figure, other: Figure | None) -> Figure:
    """The worse of two figures at one place: it stands for both, in every run alike."""
    if other is None:
        return one
    worst = min if one.better == "higher" else max
    return worst(one, other, key=lambda figure: float(figure.value or 0.0))


def _united(found: list[Figure]) -> Figure:
    """One figure of all ranks of a host: their value, or all values if they differ."""
    values = sorted({str(each.value) for each in found if each.value is not None})
    where = found[0].where
    for each in found[1:]:
        where = where | each.where
    return replace(found[0], value=" / ".join(values) or None, where=where)


# Expected value of a number after earlier runs, and the distance of a new one from it. Pure.


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
    return amount_text(value, figure.unit)


# Words that changed: versions, variables, interfaces, GPUs; and in a few words, where. Pure.


@dataclass(frozen=True)
class ChangedWord:
    """A word that is not what it was, at all the places where it changed alike; None: not there.

    `runs` is how many earlier runs of how many had what was there before.
    """

    check: str
    name: str
    before: str | None
    now: str | None
    where: Where
    runs: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        return f"{self.name} {self.before or 'absent'} → {self.now or 'absent'}"


def changed_words(now: Sheet, past: Sequence[Sheet]) -> list[ChangedWord]:
    """Every word that differs from what most earlier runs had (of a tie the newest), `past` being
    newest first. What a check did not observe on a host is not compared there.
    """
    found: dict[tuple[str, str, str | None, str | None], ChangedWord] = {}
    keys = dict.fromkeys([*now.words, *(key for sheet in past for key in sheet.words)])
    for key in keys:
        if not _was_seen(now, key):
            continue
        earlier = [_value(sheet, key) for sheet in past if _was_seen(sheet, key)]
        if not earlier:
            continue
        # most_common keeps the order in which it met them: the newest first.
        usual, times = Counter(earlier).most_common(1)[0]
        value = _value(now, key)
        if value == usual:
            continue
        where = now.words[key].where if key in now.words else key[2]
        same = (key[0], key[1], usual, value)
        if same in found:
            where = found[same].where | where
        found[same] = ChangedWord(*same, where, (times, len(earlier)))
    return sorted(found.values(), key=lambda word: (word.check, word.name, str(word.before)))


def together(words: Sequence[ChangedWord]) -> list[tuple[Where, list[ChangedWord]]]:
    """Words that changed at the same hosts: they have one new image, or one new setting."""
    groups: dict[frozenset[str], list[ChangedWord]] = {}
    for word in words:
        groups.setdefault(frozenset(hosts_of(word.where)), []).append(word)
    return [(_all(group), group) for group in groups.values()]


def _all(group: Sequence[ChangedWord]) -> Where:
    where = group[0].where
    for word in group[1:]:
        where = where | word.where
    return replace(where, ranks=()) if where.hosts else where


def _value(sheet: Sheet, key: Key) -> str | None:
    figure = sheet.words.get(key)
    return None if figure is None or figure.value is None else str(figure.value)


def _was_seen(sheet: Sheet, key: Key) -> bool:
    """True if the check observed this place, so that a missing word means absence."""
    if key in sheet.words:
        return True
    if key[0] in sheet.broken:
        return False
    there = hosts_of(key[2])
    return bool(there) and there <= sheet.seen.get(key[0], frozenset())
