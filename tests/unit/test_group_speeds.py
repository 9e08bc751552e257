"""Arithmetic of speeds: bus bandwidth, outliers, rings, and who makes pairs slow."""

from __future__ import annotations

import random

import pytest

from nccl_doctor.toolkit.outliers import (
    algorithm_bandwidth,
    blame_edges,
    bus_bandwidth,
    ring,
    second_try,
    slow_edges,
    slow_ones,
)
from tests.support.rows import each_row

FAST, SLOW = 0.010, 0.080


def test_bandwidth_as_nccl_tests_defines_it() -> None:
    assert algorithm_bandwidth(8_000_000, 0.002) == 4e9
    assert bus_bandwidth(8_000_000, 0.002, 4) == pytest.approx(6e9)
    assert bus_bandwidth(8_000_000, 0.002, 2) == pytest.approx(4e9)
    assert bus_bandwidth(8, 0.0, 2) == bus_bandwidth(8, 1.0, 1) == 0.0


def test_who_stands_out_is_far_from_the_median_and_from_the_spread() -> None:
    assert slow_ones({0: 1.0, 1: 1.1, 2: 0.9, 3: 5.0}) == {3: pytest.approx(4.76, abs=0.01)}
    assert slow_ones({0: 1.0, 1: 1.0, 2: 1.9}) == {}  # less than twice is not worth a word
    assert slow_ones({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 4: 7.0}) == {}  # the spread is as wide
    assert slow_ones({0: 1.0, 1: 9.0}) == {}  # two cannot be compared


def test_noise_alone_stands_out_hardly_ever() -> None:
    rng = random.Random(7)
    loud = sum(
        bool(slow_ones({rank: rng.lognormvariate(0, 0.25) for rank in range(16)}))
        for _ in range(500)
    )
    assert loud <= 15  # 3 %, and what does is measured again


@each_row("size", range(2, 12))
def test_everybody_meets_both_neighbours_and_nobody_two_at_once(size: int) -> None:
    rounds = ring(list(range(10, 10 + size)))
    if size < 3:
        assert rounds == []
        return
    edges = [edge for one in rounds for edge in one]
    assert len(edges) == len({frozenset(edge) for edge in edges}) == size
    for one in rounds:
        ends = [end for edge in one for end in edge]
        assert len(ends) == len(set(ends))
    assert len(rounds) == 2 + size % 2


def world(size: int, members: set[int], links: set[frozenset[int]]):
    """Seconds of a pair, in a cluster with these slow members and links."""

    def seconds(edge: tuple[int, int]) -> float:
        bad = members & set(edge) or frozenset(edge) in links
        return SLOW if bad else FAST

    return {edge: seconds(edge) for one in ring(range(size)) for edge in one}, seconds


@each_row("size", range(3, 20))
def test_one_slow_member_is_named(size: int) -> None:
    for bad in range(size):
        first, seconds = world(size, {bad}, set())
        again = {edge: seconds(edge) for one in second_try(first) for edge in one}
        found = blame_edges(first, again)
        assert (found.members, found.edges) == ((bad,), ()), (size, bad)


@each_row("size", range(4, 20))
def test_one_slow_link_is_named_and_neither_of_its_ends(size: int) -> None:
    for edge in [edge for one in ring(range(size)) for edge in one]:
        first, seconds = world(size, set(), {frozenset(edge)})
        again = {pair: seconds(pair) for one in second_try(first) for pair in one}
        found = blame_edges(first, again)
        assert (found.members, found.edges) == ((), (edge,)), (size, edge)


@each_row("size", range(3, 20))
def test_half_as_many_pairs_are_tried_again_at_once(size: int) -> None:
    links = {frozenset(edge) for edge in ring(range(size))[0][::2]}
    first, _ = world(size, set(), links)
    again = second_try(first)
    assert {edge for one in again for edge in one} >= slow_edges(first)
    for one in again:
        assert len(one) <= max(1, len(ring(range(size))[0]) // 2)
        assert len({end for edge in one for end in edge}) == 2 * len(one)


def test_what_was_slow_once_only_is_nobodys_fault() -> None:
    first, _ = world(6, {2}, set())
    again = {edge: FAST for one in second_try(first) for edge in one}
    assert blame_edges(first, again) == blame_edges({}, {})


def test_a_uniform_ring_has_nothing_to_try_again() -> None:
    first, _ = world(8, set(), set())
    assert slow_edges(first) == set()
    assert second_try(first) == []
