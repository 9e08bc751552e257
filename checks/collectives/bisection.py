"""Bisection by tests: units that are good alone but do not work together. Pure.

A unit is a host or a rank. A test is a set of units that form one group; it is bad if it contains
a unit that works with no other, or both ends of a broken link. The steps are generators: each
yields the tests of one round, disjoint sets that run at the same time, and is sent their results.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from enum import Enum

from nccl_doctor.api import Confidence

Units = frozenset[int]
"""Indices of units. At the top level they are seats."""


class Result(str, Enum):
    """Result of a test; `untested` where a unit could not take part."""

    GOOD = "good"
    BAD = "bad"
    UNTESTED = "untested"


Tests = Generator[list[Units], Mapping[Units, Result], None]
"""A step of the search: yields the tests of a round, is sent their results."""

_Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Two sets, each good inside, with a suspected bad pair between them; or one bad set alone."""

_WITNESSES = 2
"""A unit is to blame if it fails with this many units that are seen to work with others."""
_TRIES = 3
"""While no unit is known to work, a unit is tried with at most this many partners."""
_ENDS = 8
"""For this many broken links the ends are tried with all other units."""


class Level:
    """The search among some units, and its results.

    Attributes:
        works: units that were in a good test with others.
        pairs: unit → units with which it fails, just the two of them.
        size: most units that are good together and fewest that are not, where only their number
            makes the difference.
        flaky: everything was good when it was tried again.
        untold: units among which something fails that no pair of them shows.
        is_rest_good: the others were seen to work together without the culprits.
        suspects: during the search, the units that may still be involved in the fault.
    """

    def __init__(self, count: int, outsiders: int = 0) -> None:
        """`count` units to search; `outsiders` more, with the next indices, that surely work."""
        self.count = count
        self.works: set[int] = set(range(count, count + outsiders))
        self.pairs: dict[int, set[int]] = {}
        self.size: tuple[Units, Units] | None = None
        self.flaky = False
        self.untold: set[int] = set()
        self.is_rest_good = False
        self.suspects: set[int] = set()
        self._tried: dict[int, set[int]] = {}
        self._known: dict[Units, Result] = {}
        self._left_out = False
        self._good: Units = frozenset()
        self._bad: Units = frozenset()

    # -- the steps ------------------------------------------------------------------------------

    def find(self, members: Sequence[int]) -> Tests:
        """Search members that are bad as a whole though each is good alone."""
        members = tuple(members)
        while True:
            self._left_out, self._good, self._bad = False, frozenset(), frozenset(members)
            yield from self._descend([(members, ())])
            inside = frozenset(members)
            if all(inside.isdisjoint(self.pairs.get(unit, ())) for unit in members):
                yield from self._by_size(members)
                return
            yield from self._confirm()
            if not self.works:
                return
            without = self._without()
            rest = tuple(unit for unit in members if unit not in without)
            if len(rest) == len(members):
                return  # no unit differs from the others
            if not self._left_out:
                self.is_rest_good = True
                return
            result = Result.GOOD
            if len(rest) > 1:
                (result,) = yield from self.ask([frozenset(rest)])
            if result is not Result.BAD:
                self.is_rest_good = result is Result.GOOD
                yield from self._other_links(rest)
                return
            members = rest

    def ask(
        self, tests: Sequence[Units], again: bool = False
    ) -> Generator[list[Units], Mapping[Units, Result], list[Result]]:
        """Run one round with the tests that were not run before; `again`: with all of them.

        Returns: the result of each.
        """
        if wanted := [test for test in tests if again or test not in self._known]:
            got = yield wanted
            self._known.update({test: got[test] for test in wanted})
        for test in tests:
            self._note(test, self._known[test])
        return [self._known[test] for test in tests]

    def _note(self, test: Units, result: Result) -> None:
        if len(test) == 2:
            a, b = test
            self._tried.setdefault(a, set()).add(b)
            self._tried.setdefault(b, set()).add(a)
            if result is Result.BAD:
                self.pairs.setdefault(a, set()).add(b)
                self.pairs.setdefault(b, set()).add(a)
        if result is Result.GOOD and len(test) > 1:
            self.works |= test
            self._good = max(self._good, test, key=len)
        elif result is Result.BAD and len(test) > 1:
            self._bad = min(self._bad or test, test, key=len)

    def _descend(self, open_: list[_Rectangle]) -> Tests:
        """Search down to the bad pairs: all sets and rectangles are split in the same round.

        For a bad set both halves are tried; if both are good, a pair across them is bad. For a
        rectangle A x B the tests are A0 + B0 and A1 + B1; if both are good it is A0 x B1 or
        A1 x B0, which have no unit in common and so are tried at the same time.
        """
        if len(open_[0][0]) == 2 and not open_[0][1]:
            self._note(frozenset(open_[0][0]), Result.BAD)
            return
        while open_:
            self.suspects = {unit for a, b in open_ for unit in (*a, *b)}
            split = [(rectangle, _diagonal(rectangle)) for rectangle in open_]
            tests = [frozenset(a + b) for _, parts in split for a, b in parts if len(a + b) > 1]
            yield from self.ask(tests)
            open_ = []
            for rectangle, parts in split:
                results = [self._known.get(frozenset(a + b), Result.GOOD) for a, b in parts]
                bad = [part for part, r in zip(parts, results, strict=True) if r is Result.BAD]
                if Result.UNTESTED in results:
                    self.untold |= {unit for side in rectangle for unit in side}
                elif not bad:
                    open_ += _across(rectangle)
                self._left_out |= bool(bad) and len(rectangle[0] + rectangle[1]) > 2
                open_ += [part for part in bad if len(part[0] + part[1]) > 2]
        self.suspects = set()

    def _confirm(self) -> Tests:
        """Try units that fail and were never seen to work, with units that do work."""
        while tests := list(self._confirmations()):
            yield from self.ask(tests)

    def _confirmations(self) -> Iterator[Units]:
        doubtful = [u for u in sorted(self.pairs) if u not in self.works and not self.is_bad(u)]
        pool = sorted(self.works) or list(range(self.count))
        # From the middle on, so that neighbours do not all choose the same partner.
        free = dict.fromkeys(pool[len(pool) // 2 :] + pool[: len(pool) // 2])
        for unit in doubtful:
            tried = self._tried[unit]
            if not self.works and (unit not in free or len(tried) >= _TRIES):
                continue
            free.pop(unit, None)
            partner = next((other for other in free if other not in tried), None)
            if partner is not None:
                free.pop(partner)
                yield frozenset({unit, partner})

    def _other_links(self, rest: Sequence[int]) -> Tests:
        """Search further broken links at the ends of those that were left out of the good rest."""
        ends = sorted(self._without() - {unit for unit in self.pairs if self.is_bad(unit)})
        for end in ends[:_ENDS]:
            while others := tuple(u for u in rest if u not in self.pairs[end]):
                (result,) = yield from self.ask([frozenset({end, *others})])
                if result is not Result.BAD:
                    break
                failed = len(self.pairs[end])
                yield from self._descend([((end,), others)])
                if len(self.pairs[end]) == failed:
                    break

    def _by_size(self, members: tuple[int, ...]) -> Tests:
        """Try the whole again if all parts are good, then search the number of units that fails."""
        if self.untold:
            return
        (result,) = yield from self.ask([frozenset(members)], again=True)
        if result is Result.GOOD:
            self.flaky = True
            return
        low, high = len(self._good), len(self._bad)
        while result is Result.BAD and high - low > 1:
            middle = (low + high) // 2
            (found,) = yield from self.ask([frozenset(members[:middle])])
            if found is Result.UNTESTED:
                break
            low, high = (middle, high) if found is Result.GOOD else (low, middle)
        if result is Result.BAD and len(self._good) < len(self._bad):
            self.size = (self._good, self._bad)
        else:
            self.untold |= set(members)

    # -- what it comes to -----------------------------------------------------------------------

    def is_bad(self, unit: int) -> bool:
        """True if a unit fails with several that work with others, and was never seen to work."""
        return unit not in self.works and len(self.pairs[unit] & self.works) >= _WITNESSES

    def blame(self) -> Iterator[tuple[tuple[int, ...], Confidence]]:
        """The units to blame: one unit, or both ends of a link, with the confidence."""
        for unit in sorted(self.pairs):
            if self.is_bad(unit):
                yield (unit,), Confidence.CERTAIN
        lonely = len(self._bad_pairs()) == 1
        for a, b in sorted(self._bad_pairs()):
            well = len({a, b} & self.works)
            if not (self.is_bad(a) or self.is_bad(b)) and (well or lonely):
                sure = (Confidence.POSSIBLE, Confidence.LIKELY, Confidence.CERTAIN)[well]
                yield (a, b), sure

    def unsolved(self) -> set[int]:
        """Units that fail with another unit, and for which no working partner was found."""
        blamed = {unit for places, _ in self.blame() for unit in places}
        return {
            unit
            for unit in self.pairs
            if unit not in self.works and unit not in blamed and not self.pairs[unit] & blamed
        }

    def _bad_pairs(self) -> set[tuple[int, int]]:
        return {(a, b) for a, others in self.pairs.items() for b in others if a < b}

    def _without(self) -> set[int]:
        """Units to leave out so that no known bad pair is left: few, not the fewest."""
        out = {unit for unit in self.pairs if self.is_bad(unit)}
        left = [pair for pair in sorted(self._bad_pairs()) if not out & set(pair)]
        while left:
            ends = [unit for pair in left for unit in pair]
            most = max(ends, key=lambda unit: (len(self.pairs[unit]), unit not in self.works))
            out.add(most)
            left = [pair for pair in left if most not in pair]
        return out


def halves(units: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first half, which is the longer one, and the second: neighbours stay together."""
    middle = (len(units) + 1) // 2
    return tuple(units[:middle]), tuple(units[middle:])


def _diagonal(rectangle: _Rectangle) -> list[_Rectangle]:
    a, b = rectangle
    if len(a) == len(b) == 1:
        return [rectangle]
    (a0, a1), (b0, b1) = halves(a), halves(b)
    if not b:
        return [(a0, ()), (a1, ())]
    return [part for part in ((a0, b0), (a1, b1)) if part[0] and part[1]]


def _across(rectangle: _Rectangle) -> list[_Rectangle]:
    a, b = rectangle
    if not b:
        return [halves(a)]
    if len(a) == len(b) == 1:
        return []
    (a0, a1), (b0, b1) = halves(a), halves(b)
    return [part for part in ((a0, b1), (a1, b0)) if part[0] and part[1]]


def union(groups: Iterable[Collection[int]]) -> Units:
    """The union of the groups."""
    none: Units = frozenset()
    return none.union(*groups)
