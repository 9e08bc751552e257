"""Who is to blame: majorities, and hosts against links."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.tools.blame import blame_links, odd_ones_out

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


@st.composite
def broken(draw: st.DrawFn) -> tuple[list[str], list[Pair], set[Pair], set[str], set[Pair]]:
    """(hosts, tested, failed, guilty hosts, guilty links) with 0 to 3 faults."""
    hosts = names(draw(st.integers(2, 40)))
    tested = list(permutations(hosts, 2))
    failed: set[Pair] = set()
    guilty: set[str] = set()
    links: set[Pair] = set()
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["both", "in", "out", "link", "one-way link"]))
        a, b = draw(st.sampled_from(tested))
        if "link" in kind:
            links |= {(a, b), (b, a)} if kind == "link" else {(a, b)}
            continue
        guilty.add(a)
        failed |= {p for p in tested if kind in ("both", "out") and p[0] == a}
        failed |= {p for p in tested if kind in ("both", "in") and p[1] == a}
    return hosts, tested, failed | links, guilty, links


@given(broken())
def test_every_failed_pair_is_covered_and_none_besides(
    case: tuple[list[str], list[Pair], set[Pair], set[str], set[Pair]],
) -> None:
    _, tested, failed, _, _ = case
    blame = blame_links(tested, failed)
    assert set(blame.links) <= failed
    for pair in failed:
        assert (pair in blame.links) != bool(set(pair) & set(blame.hosts))


@given(broken())
def test_no_innocent_host_is_blamed(
    case: tuple[list[str], list[Pair], set[Pair], set[str], set[Pair]],
) -> None:
    hosts, tested, failed, guilty, links = case
    blamed = set(blame_links(tested, failed).hosts)
    # A host whose every pair of one direction fails on bad links of its own is, by the shortest
    # explanation, a bad host: that needs as many bad links as it has partners, so few hosts.
    for host in blamed - guilty:
        out = {(host, other) for other in hosts if other != host}
        assert len(hosts) <= 4
        assert any(
            side <= failed and len(side & links) >= 2 for side in (out, {(b, a) for a, b in out})
        )


@given(broken())
def test_a_guilty_host_among_many_is_found(
    case: tuple[list[str], list[Pair], set[Pair], set[str], set[Pair]],
) -> None:
    hosts, tested, failed, guilty, _ = case
    if len(hosts) > 6:
        assert set(blame_links(tested, failed).hosts) == guilty


@given(broken(), st.randoms(use_true_random=False))
def test_the_order_of_the_pairs_does_not_matter(
    case: tuple[list[str], list[Pair], set[Pair], set[str], set[Pair]], rng: random.Random
) -> None:
    _, tested, failed, _, _ = case
    other = rng.sample(tested, len(tested))
    assert blame_links(other, rng.sample(sorted(failed), len(failed))) == blame_links(
        tested, failed
    )


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
