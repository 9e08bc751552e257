"""The next tests for a group that hangs or fails, and the result of the tests so far. Pure.

The whole group failed. First every host is tested alone (screen); hosts that fail there are tested
rank by rank. Hosts that are good alone are split (see `bisection`): a host that works with no
other, or a pair that does not work together, is found after O(log N) rounds. Where all parts are
good, the whole is tried again. The tests of a round have no rank in common: they run side by side.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nccl_doctor.api import Confidence

from .bisection import Level, Result, Tests, Units, union

_MOST_HOSTS = 4
"""For this many bad hosts the bad rank is searched; with more, naming the hosts is enough."""


@dataclass(frozen=True)
class Seen:
    """Result of one test. `passed_bytes` is the largest message that all members finished before it
    failed; 0 where none, or where unknown.
    """

    result: Result
    passed_bytes: int = 0


Held = Mapping[Units, Seen]
"""One round: its groups, as seats, and the result of each."""


@dataclass(frozen=True)
class Plan:
    """The next round: groups of seats that have no seat in common."""

    groups: tuple[Units, ...]


@dataclass(frozen=True)
class Culprit:
    """A host, a rank, or the link between two of them, and how it was found.

    Attributes:
        places: the seats of one host or rank, or of both ends of a link.
        is_rank: whether places are single ranks.
        confidence: certain where the units that it fails with were seen to work with others.
        alone: it fails by itself, with no other in the group.
        group: the smallest group that failed with it.
        above_bytes: it finishes messages of up to this size, every time; 0 where it does not.
    """

    places: tuple[Units, ...]
    is_rank: bool
    confidence: Confidence
    alone: bool = False
    group: Units = frozenset()
    above_bytes: int = 0

    @property
    def is_link(self) -> bool:
        """True if it is a link between two places."""
        return len(self.places) == 2


@dataclass(frozen=True)
class Verdict:
    """Result of all tests.

    Attributes:
        culprits: the places that are to blame.
        flaky: all parts and then the whole were good when tried again.
        size: the largest group that is good and the smallest that is not, where only their size
            makes the difference.
        untold: seats among which something fails, though it is unknown where.
        rest_is_good: the others were seen to work together without the culprits.
        rounds: number of rounds of the history that the search used.
    """

    culprits: tuple[Culprit, ...] = ()
    flaky: bool = False
    size: tuple[Units, Units] | None = None
    untold: Units = frozenset()
    rest_is_good: bool = False
    rounds: int = 0


def next_round(hosts: Sequence[Sequence[int]], history: Sequence[Held]) -> Plan | Verdict:
    """The next round to run, or the verdict of all rounds.

    Args:
        hosts: seats of each host, in order of rank. With one host the units are its ranks.
        history: every round so far, oldest first, including the first one of the whole. A group in
            several rounds was tried again each time.

    Returns: a plan whose groups are not in the history as often as they are needed. The same
    history always gives the same answer, and the number of rounds is bounded.
    """
    search, wanted = _replay(hosts, history)
    if wanted and len(history) < most_rounds(len(hosts) if len(hosts) > 1 else len(hosts[0])):
        return Plan(tuple(sorted(wanted, key=min)))
    return search.verdict(history)


def verdict_so_far(hosts: Sequence[Sequence[int]], history: Sequence[Held]) -> Verdict:
    """The verdict of the rounds so far, although more rounds might show more."""
    return _replay(hosts, history)[0].verdict(history)


def most_rounds(count: int) -> int:
    """Rounds after which a search among `count` units ends."""
    return 6 * count.bit_length() + 12


def _replay(hosts: Sequence[Sequence[int]], history: Sequence[Held]) -> tuple[_Search, list[Units]]:
    """Run the search on the known results. Returns: the search, and the tests that it waits for."""
    answers: dict[Units, list[Seen]] = defaultdict(list)
    for held in history:
        for group, seen in held.items():
            answers[group].append(seen)
    search = _Search(hosts)
    steps = search.run()
    asked: Counter[Units] = Counter()
    try:
        wanted = next(steps)
        while True:
            missing = [test for test in wanted if len(answers[test]) <= asked[test]]
            if missing:
                return search, missing
            got = {test: answers[test][asked[test]].result for test in wanted}
            asked.update(wanted)
            wanted = steps.send(got)
    except StopIteration:
        search.is_done = True
        return search, []


class _Search:
    """The search over hosts and ranks, as one generator of tests of seats."""

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        self._hosts = [frozenset(host) for host in hosts]
        self._by_rank = len(self._hosts) == 1
        if self._by_rank:
            self._hosts = [frozenset({seat}) for seat in hosts[0]]
        self._units: list[Units] = []
        self._level = Level(0)
        self._found: list[Culprit] = []
        self._ranks_of: dict[Units, tuple[Units, ...]] = {}
        self._flaky = False
        self._untold: set[int] = set()
        self._is_rest_good = False
        self._seen: dict[Units, Result] = {}
        self.is_done = False

    def run(self) -> Tests:
        """Search from the whole to the culprits."""
        whole = union(self._hosts)
        (result,) = yield from self._ask([whole])
        if result is not Result.BAD:
            return
        screen = dict(zip(self._hosts, (yield from self._ask(self._hosts)), strict=True))
        alone = [host for host in self._hosts if screen[host] is Result.BAD]
        fine = [host for host in self._hosts if screen[host] is Result.GOOD]
        self._untold |= union(h for h in self._hosts if screen[h] is Result.UNTESTED)
        self._found += [self._alone(host) for host in alone]
        if not fine:
            return
        if len(fine) < len(self._hosts):
            result = yield from self._without(fine, alone)
        elif len(fine) == 2:  # no smaller group will show whether it fails again
            (result,) = yield from self._ask([whole], again=True)
            self._flaky = result is Result.GOOD
        if result is Result.BAD:
            self._units, self._level = fine, Level(len(fine))
            yield from _as_seats(self._level.find(range(len(fine))), fine, self._seen)
            self._is_rest_good = self._level.is_rest_good
            self._untold |= self._seats_of(self._level.untold)
        if not self._by_rank:
            for host in [host for host in alone if len(host) > 1][:_MOST_HOSTS]:
                yield from self._inside(host)
            for places, _ in list(self._level.blame())[:_MOST_HOSTS]:
                if len(places) == 1 and len(fine[places[0]]) > 1:
                    yield from self._rank_of(fine[places[0]])

    def _without(
        self, fine: Sequence[Units], alone: Sequence[Units]
    ) -> Generator[list[Units], Mapping[Units, Result], Result]:
        """Test the good hosts together, and at the same time each rank of the others alone.

        Returns: the result of the good hosts.
        """
        inside = [] if self._by_rank else [host for host in alone if len(host) > 1][:_MOST_HOSTS]
        tests = [frozenset({seat}) for host in inside for seat in sorted(host)]
        if len(fine) > 1:
            tests.append(union(fine))
        yield from self._ask(tests)
        for host in inside:
            stuck = [t for t in tests if t <= host and self._seen[t] is Result.BAD]
            self._narrow(host, [self._alone(seat, is_rank=True) for seat in stuck])
        result = self._seen.get(union(fine), Result.UNTESTED)
        self._is_rest_good = result is Result.GOOD
        return result

    def _inside(self, host: Units) -> Tests:
        """Search the bad ranks of a host that fails alone."""
        seats = sorted(host)
        each = yield from self._ask([frozenset({seat}) for seat in seats])
        bad = [seat for seat, r in zip(seats, each, strict=True) if r is Result.BAD]
        fine = [seat for seat, r in zip(seats, each, strict=True) if r is Result.GOOD]
        result = Result.GOOD if bad else Result.BAD
        if bad and len(fine) > 1:
            (result,) = yield from self._ask([frozenset(fine)])
        found = [self._alone(frozenset({seat}), is_rank=True) for seat in bad]
        if result is Result.BAD and len(fine) > 1:
            partners = self._partners(len(fine) + 1)
            units = [frozenset({seat}) for seat in (*fine, *partners)]
            level = Level(len(fine), outsiders=len(partners))
            yield from _as_seats(level.find(range(len(fine))), units, self._seen)
            found += [self._culprit(units, *blame, is_rank=True) for blame in level.blame()]
        self._narrow(host, found)

    def _narrow(self, host: Units, found: list[Culprit]) -> None:
        """Blame ranks of a host instead of the host, if any were found."""
        if found:
            self._found = [c for c in self._found if not c.places[0] <= host] + found

    def _rank_of(self, host: Units) -> Tests:
        """Search the bad ranks of a host that works with no other: each with one working rank."""
        partners = self._partners(len(host))
        pairs = [frozenset(pair) for pair in zip(sorted(host), partners, strict=False)]
        results = yield from self._ask(pairs)
        bad = [pair & host for pair, r in zip(pairs, results, strict=True) if r is Result.BAD]
        if len(pairs) == len(host) and 0 < len(bad) < len(host):
            self._ranks_of[host] = tuple(bad)

    def _partners(self, count: int) -> list[int]:
        """Seats of working hosts: first one of each host, then further ones."""
        hosts = [sorted(self._units[u]) for u in sorted(self._level.works)]
        if not hosts and self._is_rest_good:
            bad = union(place for culprit in self._found for place in culprit.places)
            hosts = [sorted(host) for host in self._hosts if not host & bad]
        turns = max(map(len, hosts), default=0)
        return [host[turn] for turn in range(turns) for host in hosts if turn < len(host)][:count]

    def _ask(
        self, tests: Iterable[Units], again: bool = False
    ) -> Generator[list[Units], Mapping[Units, Result], list[Result]]:
        tests = list(tests)
        if wanted := [test for test in tests if again or test not in self._seen]:
            self._seen.update((yield wanted))
        return [self._seen[test] for test in tests]

    def _seats_of(self, units: Iterable[int]) -> Units:
        return union(self._units[unit] for unit in units)

    # -- what it comes to -----------------------------------------------------------------------

    def _alone(self, place: Units, is_rank: bool = False) -> Culprit:
        return Culprit(
            (place,), is_rank or self._by_rank, Confidence.CERTAIN, alone=True, group=place
        )

    def _culprit(
        self, units: Sequence[Units], places: tuple[int, ...], sure: Confidence, is_rank: bool
    ) -> Culprit:
        return Culprit(tuple(units[place] for place in places), is_rank, sure)

    def verdict(self, history: Sequence[Held]) -> Verdict:
        """The verdict from what is known so far."""
        level = self._level
        found = list(self._found)
        for places, sure in level.blame():
            ranks = self._ranks_of.get(self._units[places[0]]) if len(places) == 1 else None
            if ranks:
                found += [Culprit((rank,), True, Confidence.LIKELY) for rank in ranks]
            else:
                found.append(self._culprit(self._units, places, sure, is_rank=self._by_rank))
        untold = self._untold | self._seats_of(level.unsolved() | level.untold)
        if not self.is_done:
            untold |= self._seats_of(level.suspects)
        return Verdict(
            culprits=tuple(_with_tests(culprit, history) for culprit in found),
            flaky=self._flaky or level.flaky,
            size=None if level.size is None else _both(map(self._seats_of, level.size)),
            untold=frozenset(untold),
            rest_is_good=self._is_rest_good,
            rounds=len(history),
        )


def _as_seats(steps: Tests, units: Sequence[Units], known: dict[Units, Result]) -> Tests:
    """The same tests, with seats in place of units."""
    try:
        wanted = next(steps)
        while True:
            seats = {test: union(units[unit] for unit in test) for test in wanted}
            got = yield list(seats.values())
            known.update(got)
            wanted = steps.send({test: got[group] for test, group in seats.items()})
    except StopIteration:
        return


def _both(pair: Iterable[Units]) -> tuple[Units, Units]:
    small, large = pair
    return small, large


def _with_tests(culprit: Culprit, history: Sequence[Held]) -> Culprit:
    """The culprit with the smallest group that failed because of it, and the size that passed."""
    failed = [
        (group, seen.passed_bytes)
        for held in history
        for group, seen in held.items()
        if seen.result is Result.BAD and all(place & group for place in culprit.places)
    ]
    if not failed:
        return culprit
    smallest = min((group for group, _ in failed), key=lambda g: (len(g), sorted(g)))
    passed = min(passed for _, passed in failed) if len(failed) > 1 else 0
    return replace(culprit, group=smallest, above_bytes=passed)
