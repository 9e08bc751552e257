"""Who is to blame: majorities, and hosts against links."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import combinations, permutations
from operator import or_

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nccl_doctor.model.findings import Confidence
from nccl_doctor.toolkit.blame import LinkBlame, blame_links, odd_ones_out
from tests.support.findings import calls

Pair = tuple[str, str]


def names(count: int) -> list[str]:
    return [f"nd{i}" for i in range(count)]


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_all_well_blames_nobody(count: int) -> None:
    blame = blame_links(permutations(names(count), 2), [])
    assert (blame.hosts, blame.links, blame.certain) == ((), (), True)


def test_two_hosts_cannot_tell_a_host_from_a_link() -> None:
    blame = blame_links([("a", "b"), ("b", "a")], [("a", "b")])
    assert (blame.hosts, blame.links, blame.certain) == ((), (("a", "b"),), False)


def test_a_host_that_nobody_reaches_is_blamed() -> None:
    blame = blame_links(permutations("abc", 2), [("a", "c"), ("b", "c")])
    assert (blame.hosts, blame.links) == (("c",), ())


def test_a_host_that_reaches_nobody_is_blamed() -> None:
    blame = blame_links(permutations("abc", 2), [("c", "a"), ("c", "b")])
    assert (blame.hosts, blame.links) == (("c",), ())


def test_one_broken_pair_among_three_hosts_is_a_link() -> None:
    blame = blame_links(permutations("abc", 2), [("a", "b"), ("b", "a")])
    assert (blame.hosts, blame.links, blame.certain) == ((), (("a", "b"), ("b", "a")), True)


def test_two_bad_hosts_of_four_are_both_blamed() -> None:
    tested = list(permutations("abcd", 2))
    blame = blame_links(tested, [pair for pair in tested if "a" in pair or "b" in pair])
    assert (blame.hosts, blame.links) == (("a", "b"), ())


def test_where_everything_fails_nobody_is_blamed() -> None:
    tested = list(permutations("abc", 2))
    blame = blame_links(tested, tested)
    assert (blame.hosts, blame.certain) == ((), False)
    assert set(blame.links) == set(tested)


def test_a_bad_link_beside_a_bad_host_does_not_make_a_victim_the_culprit() -> None:
    tested = list(permutations("hyb", 2))
    failed = {("h", "y")} | {pair for pair in tested if "b" in pair}
    assert not {"h", "y"} & set(blame_links(tested, failed).hosts)


def test_the_direction_that_fails_is_named() -> None:
    tested = list(permutations("abcd", 2))
    (cause,) = blame_links(tested, [pair for pair in tested if pair[1] == "c"]).causes
    assert (cause.ends, cause.way, cause.confidence) == (("c",), "in", Confidence.CERTAIN)
    (cause,) = blame_links(tested, [pair for pair in tested if pair[0] == "c"]).causes
    assert (cause.ends, cause.way, cause.confidence) == (("c",), "out", Confidence.CERTAIN)
    (cause,) = blame_links(tested, [pair for pair in tested if "c" in pair]).causes
    assert (cause.ends, cause.way, cause.confidence) == (("c",), "both", Confidence.CERTAIN)


def test_a_deaf_host_and_a_mute_one_are_both_named() -> None:
    tested = list(permutations("abcd", 2))
    blame = blame_links(tested, [(a, b) for a, b in tested if a == "a" or b == "b"])
    assert [(each.ends, each.way) for each in blame.causes] == [(("a",), "out"), (("b",), "in")]


def test_a_link_beside_a_deaf_host_is_a_cause_of_its_own() -> None:
    tested = list(permutations("abcd", 2))
    blame = blame_links(tested, [*((x, "d") for x in "abc"), ("d", "a")])
    assert [(each.ends, each.way) for each in blame.causes] == [(("d",), "in"), (("d", "a"), "one")]
    assert blame.certain


def test_a_split_network_is_its_links() -> None:
    tested = list(permutations("abcd", 2))
    blame = blame_links(tested, [pair for pair in tested if ("a" in pair) == ("b" not in pair)])
    assert (blame.hosts, blame.certain) == ((), True)
    assert [each.ends for each in blame.causes] == [
        tuple(link) for link in ("ac", "ad", "bc", "bd")
    ]


def test_where_a_host_and_a_link_explain_as_well_as_another_host_nobody_is_named() -> None:
    blame = blame_links(permutations("abc", 2), [("a", "b"), ("a", "c"), ("b", "c")])
    assert blame.hosts == ()
    assert {cause.confidence for cause in blame.causes} == {Confidence.POSSIBLE}


def test_one_host_that_calls_in_vain_where_nobody_else_called_is_not_named() -> None:
    failed = [("a", other) for other in "bcd"]
    blame = blame_links(failed, failed)
    assert (blame.hosts, blame.certain) == ((), False)


def test_a_host_that_may_fail_besides_lowers_the_confidence() -> None:
    # "c" was tried with the deaf "b" alone: whether it gets out to anybody is not known.
    tested = [pair for pair in permutations("abcd", 2) if pair not in (("c", "a"), ("c", "d"))]
    (cause,) = blame_links(tested, [pair for pair in tested if pair[1] == "b"]).causes
    assert (cause.ends, cause.way, cause.confidence) == (("b",), "in", Confidence.LIKELY)


def test_a_host_is_blamed_for_no_more_directions_than_needed() -> None:
    # "c" was not seen to get out, but called only "d", where nobody gets in.
    tested = [pair for pair in permutations("abcd", 2) if pair not in (("c", "a"), ("c", "b"))]
    blame = blame_links(tested, [(a, b) for a, b in tested if b in "cd"])
    assert [(each.ends, each.way, each.confidence) for each in blame.causes] == [
        (("c",), "in", Confidence.LIKELY),
        (("d",), "in", Confidence.CERTAIN),
    ]


def test_a_link_with_one_end_that_nobody_else_tried_is_likely() -> None:
    (cause,) = blame_links([*permutations("abc", 2), ("d", "a")], [("d", "a")]).causes
    assert (cause.ends, cause.way, cause.confidence) == (("d", "a"), "one", Confidence.LIKELY)


def test_three_mute_hosts_of_four_are_found_together() -> None:
    # Each of them alone saves nothing over links: only all covers, compared, show them.
    tested = list(permutations("abcd", 2))
    blame = blame_links(tested, [pair for pair in tested if pair[0] != "d"])
    assert [(each.ends, each.way) for each in blame.causes] == [((x,), "out") for x in "abc"]
    assert not blame.certain


def test_an_end_may_be_an_interface_of_a_host() -> None:
    tested = [((a, nic), (b, nic)) for a, b in permutations("abc", 2) for nic in ("eth0", "eth1")]
    blame = blame_links(tested, [pair for pair in tested if pair[1] == ("c", "eth1")])
    assert blame.hosts == (("c", "eth1"),)


# Made-up matrices. The pairs that each fault would break are kept apart, so that what was blamed
# can be compared with what was broken.

Fault = frozenset[Pair]
HOST_KINDS = ("both", "in", "out")


@dataclass(frozen=True)
class Case:
    hosts: list[str]
    tested: set[Pair]
    faults: dict[tuple[str, str, str], Fault]
    """Kind and ends of each fault (of a host, the second is empty), and the pairs it breaks."""

    @cached_property
    def failed(self) -> set[Pair]:
        return set().union(*self.faults.values())

    @cached_property
    def working(self) -> set[tuple[str, str]]:
        """Each host with each direction in which it is seen to work."""
        works = self.tested - self.failed
        return {(a, "out") for a, _ in works} | {(b, "in") for _, b in works}

    def works(self, host: str, way: str) -> bool:
        return (host, way) in self.working


def broken_by(kind: str, a: str, b: str, tested: set[Pair]) -> Fault:
    if kind in ("link", "one-way"):
        return frozenset(({(a, b), (b, a)} if kind == "link" else {(a, b)}) & tested)
    ends = {"out": [0], "in": [1], "both": [0, 1]}[kind]
    return frozenset(pair for pair in tested if a in pair and a in [pair[end] for end in ends])


def cases(least: int, most: int, missing: float) -> st.SearchStrategy[Case]:
    """Clusters of so many hosts with 0 to 3 faults; of half of them, a share was not tested."""
    return st.integers(0, 2**32).map(
        lambda seed: make_case(random.Random(seed), least, most, missing)
    )


def make_case(rng: random.Random, least: int, most: int, missing: float) -> Case:
    hosts = names(rng.randint(least, most))
    share = rng.choice([0.0, missing])
    tested = {pair for pair in permutations(hosts, 2) if rng.random() >= share}
    faults = {}
    for _ in range(rng.randint(0, 3)):
        kind = rng.choice([*HOST_KINDS, "link", "one-way"])
        a, b = rng.sample(hosts, 2)
        fault = broken_by(kind, a, b, tested)
        if fault:
            faults[kind, a, "" if kind in HOST_KINDS else b] = fault
    return Case(hosts, tested, faults)


def every_smallest_cover(case: Case) -> list[tuple[tuple[str, str, str], ...]]:
    """All covers of the failed pairs with the fewest causes, by trying every set of causes."""
    bit = {pair: 1 << i for i, pair in enumerate(sorted(case.failed))}
    causes = {}
    for kind in (*HOST_KINDS, "link", "one-way"):
        for a, b in permutations(case.hosts, 2):
            pairs = broken_by(kind, a, b, case.tested)
            if pairs and pairs <= case.failed:
                causes[kind, a, "" if kind in HOST_KINDS else b] = sum(bit[pair] for pair in pairs)
    everything = sum(bit.values())
    for size in range(4):
        covers = [
            chosen
            for chosen in combinations(causes, size)
            if reduce(or_, (causes[cause] for cause in chosen), 0) == everything
        ]
        if covers:
            return covers
    raise AssertionError("what three faults broke is covered by three causes")


def hosts_of(cover: Iterable[tuple[str, str, str]]) -> set[str]:
    return {a for kind, a, _ in cover if kind in HOST_KINDS}


def witnesses(case: Case, host: str, way: str) -> set[str]:
    """With whom a host fails in a direction in which it never works, though they do."""
    if case.works(host, way):
        return set()
    if way == "in":
        return {a for a, b in case.failed if b == host and case.works(a, "out")}
    return {b for a, b in case.failed if a == host and case.works(b, "in")}


@given(cases(2, 6, missing=0.3))
def test_few_hosts_are_blamed_as_by_trying_everything(case: Case) -> None:
    covers = every_smallest_cover(case)
    shared = set.intersection(*(hosts_of(cover) for cover in covers))
    blame = blame_links(case.tested, case.failed)
    assert set(blame.hosts) == {
        host
        for host in shared
        if len(witnesses(case, host, "in") | witnesses(case, host, "out")) > 1
    }
    for cause in blame.causes:
        if cause.is_host:
            assert cause.way in {
                kind for cover in covers for kind, a, _ in cover if a in cause.ends
            }
    if len(set(case.faults.values())) == len(covers[0]):
        assert set(blame.hosts) <= hosts_of(case.faults)
    if len(blame.hosts) == len(hosts_of(covers[0])) and len(covers) == 1:
        assert len(blame.causes) == len(covers[0])


@given(cases(2, 6, missing=0.3))
def test_what_is_certain_is_what_was_broken(case: Case) -> None:
    blame = blame_links(case.tested, case.failed)
    faults = set(case.faults.values())
    if not blame.certain or len(faults) > len(every_smallest_cover(case)[0]):
        return  # else fewer faults would look the same, and they are what is found
    assert set(blame.hosts) == hosts_of(case.faults)
    by_hosts = set().union(*(cause.pairs for cause in blame.causes if cause.is_host))
    links = [pairs for (kind, *_), pairs in case.faults.items() if kind not in HOST_KINDS]
    assert set(blame.links) == set().union(*links) - by_hosts


@given(cases(2, 6, missing=0.5))
def test_the_confidence_of_a_link_says_which_of_its_ends_work(case: Case) -> None:
    for cause in blame_links(case.tested, case.failed).causes:
        idle = {a for a, _ in cause.pairs if not case.works(a, "out")}
        idle |= {b for _, b in cause.pairs if not case.works(b, "in")}
        if not cause.is_host:
            assert (cause.confidence is Confidence.CERTAIN) == (not idle)
            assert len(idle) < 2 or cause.confidence is Confidence.POSSIBLE
        elif idle <= {*cause.ends}:
            assert cause.confidence is not Confidence.POSSIBLE


@given(cases(2, 2, missing=0.3))
def test_of_two_hosts_neither_is_named(case: Case) -> None:
    blame = blame_links(case.tested, case.failed)
    assert (blame.hosts, set(blame.links)) == ((), case.failed)
    assert {cause.confidence for cause in blame.causes} <= {Confidence.POSSIBLE}


@given(cases(2, 30, missing=0.3))
def test_the_causes_explain_what_failed_and_break_nothing_that_works(case: Case) -> None:
    blame = blame_links(case.tested, case.failed)
    assert set().union(*(cause.pairs for cause in blame.causes)) == case.failed
    for cause in blame.causes:
        kind = {"one": "one-way"}.get(cause.way, cause.way if cause.is_host else "link")
        assert cause.pairs <= broken_by(kind, cause.ends[0], cause.ends[-1], case.tested)
        assert broken_by(kind, cause.ends[0], cause.ends[-1], case.tested) <= case.failed


@given(cases(8, 200, missing=0.2))
def test_many_hosts_are_blamed_exactly(case: Case) -> None:
    broken: dict[str, set[Pair]] = {}
    guilty = set()
    for (kind, host, _), pairs in case.faults.items():
        if kind in HOST_KINDS:
            broken.setdefault(host, set()).update(pairs)
            guilty |= {(host, way) for way in ("in", "out") if kind in (way, "both")}
    # Enough works to tell: everybody else with somebody, and in each direction that is broken
    # there are two such with whom nothing else is broken.
    tried = {(pair[way == "in"], way) for pair in case.tested for way in ("in", "out")}
    assume(guilty <= tried)
    assume(all(case.works(*role) for role in tried - guilty))
    assume(all(len(witnesses(case, *role)) >= 2 + len(case.faults) for role in guilty))
    blame = blame_links(case.tested, case.failed)
    assert {each.ends[0]: each.pairs for each in blame.causes if each.is_host} == broken
    assert set(blame.links) == case.failed.difference(*broken.values())
    edges = {frozenset(link) for link in blame.links}
    assert len(blame.causes) == len(broken) + len(edges)
    assert blame.certain


@given(cases(2, 30, missing=0.3), st.integers())
def test_the_order_of_the_pairs_does_not_matter(case: Case, seed: int) -> None:
    rng = random.Random(seed)
    tested, failed = sorted(case.tested), sorted(case.failed)
    again = blame_links(rng.sample(tested, len(tested)), rng.sample(failed, len(failed)))
    assert again == blame_links(tested, failed)


@pytest.mark.parametrize("count", [3, 200])
def test_the_work_for_two_hundred_hosts_grows_with_their_links(count: int) -> None:
    tested = list(permutations(range(200), 2))
    failed = [(a, b) for a, b in tested if a < count or b < count - 1]
    blamed: list[LinkBlame[str]] = []
    assert calls(lambda: blamed.append(blame_links(tested, failed))) < 60 * len(tested)
    (blame,) = blamed
    assert len(blame.hosts) == (0 if count == 200 else count)


def test_agreement_has_no_odd_one() -> None:
    assert odd_ones_out({"a": 1, "b": 1}) is None


def test_the_minority_is_odd() -> None:
    odd = odd_ones_out({"a": 1, "b": 1, "c": 2})
    assert odd is not None
    assert (odd.places, odd.usual, odd.tie) == (("c",), 1, False)


def test_a_tie_is_said_to_be_a_tie() -> None:
    odd = odd_ones_out({"a": 1, "b": 2})
    assert odd is not None
    assert (odd.places, odd.usual, odd.tie) == (("a", "b"), None, True)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 3), min_size=1))
def test_the_odd_ones_never_hold_the_usual_value(values: dict[str, int]) -> None:
    odd = odd_ones_out(values)
    if odd is None:
        assert len(set(values.values())) == 1
    elif odd.tie:
        assert set(odd.places) == set(values)
    else:
        assert all(values[place] != odd.usual for place in odd.places)
        assert len(values) - len(odd.places) > 0
