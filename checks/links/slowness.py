"""Hosts and links that are slow or late, from exchanges that were tried twice. Pure.

A cluster is compared with itself: a link with the links that do not touch its end. So a bad host,
which is at the end of most links of a small cluster, does not count as normal, and if most links
are alike, a few fast ones (two hosts of one rack) do not make the others slow.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from nccl_doctor.api import Cause, Cluster, blame_links
from nccl_doctor.toolkit.cpu_wait import ran_share, was_starved
from nccl_doctor.toolkit.peers.schedule import Meeting

Pair = tuple[int, int]
"""Seats of (sender, receiver)."""

SLOW = 1 / 3
"""Share of the usual bandwidth: noise of +-40 % stays above it on both sides (0.6 / 1.4)."""
LATE = 10.0
LATE_US = 1000.0
"""A round trip is late if it is so many times, and so much, longer than the usual one."""
LINE_SHARE = 0.1
TRUSTED_MBPS = 10_000
"""Two hosts have no other link to compare with: they are slow below a tenth of their line rate. One
connection, fed by one core, does not fill a faster line than this."""

_SPREADS = 2.0
_MANY_HOSTS = 32
_TRIES = 3
"""Number of suspect links of each host that are tried again."""


class Measure(NamedTuple):  # as quick to make as can be: a large cluster has many
    """One direction between two hosts, measured once.

    `rate` is bytes per second, 0 if it stopped; `rate` and `rtt_us` are None if nothing was
    measured. `starved` are the parts (`echo`, `burst`) in which an end waited for its CPU;
    `ran` is the share of the burst, 0 to 1, in which neither end did.
    """

    rate: float | None
    rtt_us: float | None
    stalled: str
    starved: frozenset[str]
    ran: float

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Measure:
        """Read a `timed.Sent` as plain data."""
        stalled = str(record["stalled"])
        rate = 0.0 if stalled in ("echo", "burst") else record["rate"]
        cpu: Mapping[str, Sequence[Mapping[str, Any]]] = record["cpu"]
        return cls(
            rate=rate,
            rtt_us=record["rtt_us"],
            stalled=stalled,
            starved=frozenset(part for part, ends in cpu.items() if any(map(was_starved, ends))),
            ran=math.prod(map(ran_share, cpu.get("burst", ()))),
        )

    @property
    def rate_with_cpu(self) -> float | None:
        """Bytes per second that might have passed if no end had waited for its CPU.

        The share counts twice: after each pause TCP finds its speed anew. Of a burst in which
        nothing passed, nothing is known.
        """
        if self.rate is None or "burst" not in self.starved:
            return self.rate
        return self.rate / self.ran**2 if self.rate and self.ran else math.inf


Measures = Mapping[Pair, Measure]


def measures_of(cluster: Cluster, check: str, round_name: str) -> Measures:
    """Measurements of a round, between hosts that both reported.

    The facts of the check have `sent`: seat as text → `timed.Sent`, or a `problem`.
    """

    def find() -> Measures:
        reports = cluster.facts(check, round_name)
        return _measures({rank.seat: report for rank, report in reports})

    return cluster.once((measures_of, check, round_name), (check,), find)


def _measures(facts: Mapping[int, Mapping[str, Any]]) -> dict[Pair, Measure]:
    return {
        (seat, int(partner)): Measure.read(record)
        for seat, report in facts.items()
        for partner, record in report["sent"].items()
        if "problem" not in record and int(partner) in facts
    }


@dataclass(frozen=True)
class Outliers:
    """Ordered pairs that are slow (bandwidth), or late (latency)."""

    slow: frozenset[Pair] = frozenset()
    late: frozenset[Pair] = frozenset()

    @property
    def all(self) -> frozenset[Pair]:
        """Outliers of any kind."""
        return self.slow | self.late


def suspects(cluster: Cluster, check: str, round_name: str) -> Outliers:
    """Pairs that are doubtful after a first try, by its facts."""

    def find() -> Outliers:
        measures = measures_of(cluster, check, round_name)
        return Outliers(_slow(measures, line_rates(cluster, check, round_name)), _late(measures))

    return cluster.once((suspects, check, round_name), (check,), find)


def line_rates(cluster: Cluster, check: str, round_name: str) -> Mapping[int, int | None]:
    """Seat → line rate in Mbit/s of the interface that was measured, None where not known."""
    return {rank.seat: facts["nic_mbps"] for rank, facts in cluster.facts(check, round_name)}


def try_again(measures: Measures, doubtful: Outliers) -> list[Meeting]:
    """Pairs to measure again: suspects, and both ends of each with a good partner.

    A few links of each host are enough.
    """
    edges = {_edge(pair) for pair in doubtful.all}
    tries: Counter[int] = Counter()
    chosen = []
    for edge in sorted(edges):
        if all(tries[end] < _TRIES for end in edge):
            tries.update(edge)
            chosen.append(edge)
    controls = set()
    for end in sorted({end for edge in chosen for end in edge}):
        good = {_edge(pair) for pair in measures if end in pair} - edges
        if good:  # preferably with a partner that is no suspect itself
            controls.add(min(good, key=lambda edge: (tries[sum(edge) - end], edge)))
    return [*chosen, *sorted(controls)]


@dataclass(frozen=True)
class Confirmed:
    """The causes of what was doubtful twice.

    Attributes:
        slow, late: the causes, hosts first.
        weak: those of `slow` that are the rule rather than the exception at one of their ends, for
            example links between two racks.
        starved: pairs that were slow or late while an end waited for its CPU, and no more than that
            explains: no host is blamed.
        best: the better one of both tries.
    """

    slow: tuple[Cause[int], ...]
    late: tuple[Cause[int], ...]
    weak: frozenset[Cause[int]]
    starved: Outliers
    best: Measures


def confirm(
    first: Measures, second: Measures, doubtful: Outliers, nics: Mapping[int, int | None]
) -> Confirmed:
    """The causes that both tries confirm; what the second one clears was noise.

    Args:
        first: the measurements of the first try.
        second: those of the second one.
        doubtful: the suspects of the first try.
        nics: from `line_rates`.
    """
    best = {**first, **{p: _better(first[p], each) for p, each in second.items() if p in first}}
    if not doubtful.all:
        return Confirmed((), (), frozenset(), Outliers(), best)
    still_slow, still_late = _slow(best, nics), _late(best)
    again = doubtful.late & still_late & second.keys()
    late_starved = _starved(again, "echo", first, second)
    late = again - late_starved
    # Late segments make a link slow, both ways: that is not a second fault.
    known = {_edge(pair) for pair in late}
    again = frozenset(
        pair for pair in doubtful.slow & still_slow & second.keys() if _edge(pair) not in known
    )
    slow_starved = _starved(again, "burst", first, second)
    slow_starved -= _slow(_with_cpu(slow_starved, best, first, second), nics)
    edges = {_edge(pair) for pair in doubtful.all}
    controls = {pair: each.rate or 0.0 for pair, each in second.items() if _edge(pair) not in edges}
    slow = frozenset(
        pair for pair in again - slow_starved if _stands_out(pair, best[pair].rate or 0.0, controls)
    )

    def causes(asked: frozenset[Pair], sure: frozenset[Pair]) -> tuple[Cause[int], ...]:
        cleared = asked & second.keys() - still_slow - still_late
        return blame_links((first.keys() - asked) | cleared, sure).causes

    by_slow = causes(doubtful.slow, slow)
    return Confirmed(
        slow=by_slow,
        late=causes(doubtful.late, late),
        weak=frozenset(
            cause
            for cause in by_slow
            if not cause.is_host and _is_the_rule(cause.pairs, doubtful.slow, first.keys())
        ),
        starved=Outliers(slow=slow_starved, late=late_starved),
        best=best,
    )


def _stands_out(pair: Pair, rate: float, controls: Mapping[Pair, float]) -> bool:
    """True if a link is slow compared with good links of its ends, measured at the same time.

    Otherwise all links around it have become slow, and that is no fault of this link.
    """
    beside = [other for ends, other in controls.items() if not set(pair).isdisjoint(ends)]
    return rate < SLOW * min(beside, default=float("inf"))


def _starved(
    pairs: Iterable[Pair], part: str, first: Measures, second: Measures
) -> frozenset[Pair]:
    return frozenset(
        pair for pair in pairs if part in first[pair].starved or part in second[pair].starved
    )


def _with_cpu(pairs: Set[Pair], best: Measures, first: Measures, second: Measures) -> Measures:
    """The best measurements, and of some pairs what their ends might have reached with a CPU."""
    tries = {pair: (first[pair].rate_with_cpu, second[pair].rate_with_cpu) for pair in pairs}
    return {
        pair: each._replace(rate=max((rate or 0.0 for rate in tries[pair]), default=None))
        if pair in pairs
        else each
        for pair, each in best.items()
    }


def _is_the_rule(pairs: Iterable[Pair], slow: Set[Pair], tested: Set[Pair]) -> bool:
    """True if more links are slow than good at one of its ends; False with only two hosts."""
    good = Counter(role for pair in tested - slow for role in enumerate(pair))
    bad = Counter(role for pair in slow for role in enumerate(pair))
    more_than_two = len({end for pair in tested for end in pair}) > 2
    return more_than_two and any(
        bad[role] > good[role] for pair in pairs for role in enumerate(pair)
    )


def _better(one: Measure, other: Measure) -> Measure:
    rates = [each.rate for each in (one, other) if each.rate is not None]
    rtts = [each.rtt_us for each in (one, other) if each.rtt_us is not None]
    return other._replace(rate=max(rates, default=None), rtt_us=min(rtts, default=None))


# What is unusual ----------------------------------------------------------------------------------


def _slow(measures: Measures, nics: Mapping[int, int | None]) -> frozenset[Pair]:
    rates = {pair: each.rate for pair, each in measures.items() if each.rate is not None}
    hosts = {end for pair in measures for end in pair}
    if len(hosts) == 2:
        return frozenset(p for p, rate in rates.items() if rate < _expected(p, rates, nics))
    return _outliers(rates, lambda rate, usual: rate < usual.slow_below)


def _expected(pair: Pair, rates: Mapping[Pair, float], nics: Mapping[int, int | None]) -> float:
    """Bytes per second that the link of two hosts should reach, by the other direction and by the
    line rate.
    """
    lines = [nics.get(end) for end in pair]
    line = min(TRUSTED_MBPS, *(each or TRUSTED_MBPS for each in lines)) * 125_000
    known = all(lines)
    return max(SLOW * rates.get(pair[::-1], 0.0), LINE_SHARE * line if known else 0.0)


def _late(measures: Measures) -> frozenset[Pair]:
    rtts = {pair: each.rtt_us for pair, each in measures.items() if each.rtt_us is not None}
    return _outliers(rtts, lambda rtt, usual: rtt > usual.late_above)


@dataclass(frozen=True)
class _Usual:
    """The usual value of links: the median, and the median deviation from it.

    An outlier is far from the median, and either beyond the spread, or far from every other value.
    """

    median: float
    spread: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> _Usual:
        median = statistics.median(values)
        spread = statistics.median(abs(each - median) for each in values)
        return cls(median, spread, min(values), max(values))

    @cached_property
    def slow_below(self) -> float:
        """Bytes per second below which a link is slow."""
        beyond = max(self.median - _SPREADS * self.spread, SLOW * self.least)
        return min(SLOW * self.median, beyond)

    @cached_property
    def late_above(self) -> float:
        """Microseconds above which a round trip is late."""
        beyond = min(self.median + _SPREADS * self.spread, LATE * self.greatest)
        return max(LATE * self.median, LATE_US + self.median, LATE_US + beyond)


def _outliers(
    values: Mapping[Pair, float], is_one: Callable[[float, _Usual], bool]
) -> frozenset[Pair]:
    """Pairs whose value is unusual, by the pairs that do not touch one of its ends.

    Among many hosts, one does not change the median, so all pairs are used.
    """
    ends = {end for pair in values for end in pair}
    if len(ends) > _MANY_HOSTS:
        usual = _Usual.of(list(values.values()))
        return frozenset(pair for pair, value in values.items() if is_one(value, usual))
    others = {end: [v for pair, v in values.items() if end not in pair] for end in ends}
    of_end = {end: _Usual.of(found) for end, found in others.items() if len(found) > 1}
    return frozenset(
        pair
        for pair, value in values.items()
        for end in pair
        if end in of_end and is_one(value, of_end[end])
    )


def _edge(pair: Pair) -> Meeting:
    return min(pair), max(pair)
