"""The planner of isolation on made-up clusters: who is named, who never is, and how soon."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.isolation import BAR_ROUNDS, MadeUp, random_cluster, rounds_to_name, tell
from nccl_doctor.checks.collectives.bisection import Result, Units
from nccl_doctor.checks.collectives.planner import (
    Plan,
    Seen,
    most_rounds,
    next_round,
    verdict_so_far,
)
from nccl_doctor.model.findings import Confidence
from tests.support.rows import each_row


def hosts_of(count: int, nproc: int = 1) -> list[tuple[int, ...]]:
    return [tuple(range(nproc * host, nproc * (host + 1))) for host in range(count)]


def cut(*pairs: tuple[int, int]) -> frozenset[frozenset[int]]:
    return frozenset(map(frozenset, pairs))


@each_row("count", [*range(2, 34), 61, 127, 128, 129, 251, 255, 256, 257])
def test_everybody_takes_part_and_nobody_twice_in_a_round(count: int) -> None:
    cluster = MadeUp(hosts_of(count, 2), links=cut((0, count - 1)))
    story = tell(cluster)
    everybody = set(range(2 * count))
    for held in story.history:
        seats = [seat for group in held for seat in group]
        assert len(seats) == len(set(seats))
        assert set(seats) <= everybody
    assert {seat for held in story.history[2:] for group in held for seat in group} >= (
        everybody if count > 2 else set()
    )
    assert set(story.history[0]) == {frozenset(everybody)}
    assert set(story.history[1]) == set(map(frozenset, cluster.hosts))
    assert story.named == cluster.truth


@given(seed=st.integers(0, 10**9), count=st.integers(3, 40))
def test_one_fault_is_named_exactly(seed: int, count: int) -> None:
    for kind in ((1, 0), (0, 1)):
        cluster = random_cluster(random.Random(seed), count, *kind)
        if count == 3 and cluster.links:
            continue  # see below: one end may as well be a bad host where there are but three
        story = tell(cluster)
        assert story.named == cluster.truth
        assert all(c.confidence is Confidence.CERTAIN for c in story.verdict.culprits)
        assert not story.verdict.untold


@given(seed=st.integers(0, 10**9), count=st.integers(8, 40))
def test_two_and_three_faults_are_all_named_and_nobody_else(seed: int, count: int) -> None:
    for kind in ((2, 0), (0, 2), (1, 1), (3, 0)):
        cluster = random_cluster(random.Random(seed), count, *kind)
        assert tell(cluster).named == cluster.truth


@given(data=st.data(), count=st.integers(1, 12), nproc=st.integers(1, 3))
def test_whatever_is_broken_it_ends_and_blames_no_place_that_never_failed(
    data: st.DataObject, count: int, nproc: int
) -> None:
    """Any answers at all, also such as contradict each other."""
    hosts = hosts_of(count, nproc)
    if count * nproc < 2:
        return
    history: list[Mapping[Units, Seen]] = []
    failed: set[int] = set()
    while isinstance(step := next_round(hosts, history), Plan):
        held = {}
        for group in step.groups:
            assert group
            result = Result.BAD if not history else data.draw(st.sampled_from(Result))
            held[group] = Seen(result)
            failed |= group if result is Result.BAD else set()
        assert sum(map(len, held)) == len({seat for group in held for seat in group})
        history.append(held)
        assert len(history) <= most_rounds(max(count, nproc))
    assert next_round(hosts, history) == step == verdict_so_far(hosts, history)
    for culprit in step.culprits:
        assert culprit.group <= failed
        assert any(
            seen.result is Result.BAD and all(place & group for place in culprit.places)
            for held in history
            for group, seen in held.items()
        )


@given(seed=st.integers(0, 10**9), count=st.integers(4, 20), data=st.data())
def test_untested_groups_never_make_it_blame_the_innocent(
    seed: int, count: int, data: st.DataObject
) -> None:
    cluster = random_cluster(
        random.Random(seed), count, *data.draw(st.sampled_from([(1, 0), (0, 1)]))
    )
    history: list[Mapping[Units, Seen]] = []
    while isinstance(step := next_round(cluster.hosts, history), Plan):
        lost = {g for g in step.groups if history and data.draw(st.integers(0, 3)) == 0}
        history.append(
            {g: Seen(Result.UNTESTED) if g in lost else cluster.meet(g) for g in step.groups}
        )
    sure = {frozenset(c.places) for c in step.culprits if c.confidence is Confidence.CERTAIN}
    assert sure <= cluster.truth


@each_row(("seed", "kind"), product(range(12), [(1, 0), (0, 1)]))
def test_one_fault_among_1024_hosts_is_named_within_the_bar(
    kind: tuple[int, int], seed: int
) -> None:
    cluster = random_cluster(random.Random(seed), 1024, *kind)
    story = tell(cluster)
    assert story.named == cluster.truth
    assert rounds_to_name(cluster, story) <= BAR_ROUNDS


def test_a_link_at_the_worst_place_is_named_within_the_bar() -> None:
    for ends in ((0, 1023), (511, 512), (0, 1), (341, 682), (255, 768), (0, 512)):
        cluster = MadeUp(hosts_of(1024), links=cut(ends))
        story = tell(cluster)
        assert story.named == cluster.truth
        assert rounds_to_name(cluster, story) <= BAR_ROUNDS


def test_of_two_hosts_nobody_can_say_which_end_it_is() -> None:
    story = tell(MadeUp(hosts_of(2, 2), cut_off=frozenset({1})))
    (culprit,) = story.verdict.culprits
    assert culprit.is_link
    assert culprit.confidence is Confidence.POSSIBLE
    assert len(story.history) == 3  # the whole, each host, the whole again


def test_of_two_hosts_a_hang_that_does_not_come_again_is_flaky() -> None:
    hosts = hosts_of(2, 2)
    whole = frozenset(range(4))
    screen = {frozenset(host): Seen(Result.GOOD) for host in hosts}
    history = [{whole: Seen(Result.BAD)}, screen]
    assert next_round(hosts, history) == Plan((whole,))
    verdict = next_round(hosts, [*history, {whole: Seen(Result.GOOD)}])
    assert not isinstance(verdict, Plan)
    assert verdict.flaky
    assert not verdict.culprits


def test_a_hang_of_many_that_does_not_come_again_is_flaky() -> None:
    cluster = MadeUp(hosts_of(8))
    whole = frozenset(range(8))
    history: list[Mapping[Units, Seen]] = [{whole: Seen(Result.BAD)}]
    while isinstance(step := next_round(cluster.hosts, history), Plan):
        history.append({group: cluster.meet(group) for group in step.groups})
    assert step.flaky
    assert not step.culprits
    assert not step.untold


@pytest.mark.parametrize(("count", "most"), [(4, 3), (16, 5), (16, 15), (61, 44), (64, 2)])
def test_a_fault_of_size_is_said_to_be_one(count: int, most: int) -> None:
    verdict = tell(MadeUp(hosts_of(count), most=most)).verdict
    assert verdict.culprits == ()
    assert verdict.size is not None
    assert (len(verdict.size[0]), len(verdict.size[1])) == (most, most + 1)


def test_a_fault_of_size_is_counted_in_ranks() -> None:
    verdict = tell(MadeUp(hosts_of(8, 2), most=11)).verdict
    assert verdict.size is not None
    assert (len(verdict.size[0]), len(verdict.size[1])) == (10, 12)


def test_a_stuck_rank_is_named_in_its_host() -> None:
    story = tell(MadeUp(hosts_of(4, 8), stuck=frozenset({13})))
    (culprit,) = story.verdict.culprits
    assert culprit.places == (frozenset({13}),)
    assert (culprit.is_rank, culprit.confidence) == (True, Confidence.CERTAIN)
    assert story.verdict.rest_is_good
    assert len(story.history) == 4  # whole, each host, each rank of one, the rest of that host


def test_a_stuck_rank_of_one_host_is_named() -> None:
    story = tell(MadeUp(hosts_of(1, 8), stuck=frozenset({5})))
    (culprit,) = story.verdict.culprits
    assert (culprit.places, culprit.is_rank) == ((frozenset({5}),), True)


def test_two_ranks_of_a_host_that_do_not_work_together_are_named() -> None:
    class Inside(MadeUp):
        def meet(self, group: Units) -> Seen:
            return Seen(Result.BAD if {9, 14} <= group else Result.GOOD)

    for hosts in (4, 1):
        cluster = Inside(hosts_of(hosts, 16 // min(hosts, 2)))
        (culprit,) = tell(cluster).verdict.culprits
        assert set(culprit.places) == {frozenset({9}), frozenset({14})}
        assert culprit.is_rank
        assert culprit.confidence is Confidence.CERTAIN


def test_a_host_that_fails_with_others_by_one_rank_is_named_by_it() -> None:
    class OneCard(MadeUp):
        def meet(self, group: Units) -> Seen:
            return Seen(Result.BAD if 13 in group and group - set(range(8, 16)) else Result.GOOD)

    story = tell(OneCard(hosts_of(4, 8)))
    (culprit,) = story.verdict.culprits
    assert culprit.places == (frozenset({13}),)
    assert culprit.confidence is Confidence.LIKELY


def test_where_no_two_hosts_work_together_nobody_is_singled_out() -> None:
    for count in (3, 4, 9):
        verdict = tell(MadeUp(hosts_of(count), cut_off=frozenset(range(count)))).verdict
        assert verdict.culprits == ()
        assert verdict.untold == frozenset(range(count))


def test_all_hosts_that_fail_by_themselves_are_named_after_one_round() -> None:
    story = tell(MadeUp(hosts_of(5, 2), dead=frozenset(range(5))))
    assert len(story.history) == 2
    assert story.named == {frozenset({frozenset(host)}) for host in hosts_of(5, 2)}


def test_a_fault_of_large_messages_is_said_to_be_one() -> None:
    story = tell(MadeUp(hosts_of(4), links=cut((0, 1)), passed_bytes=8))
    (culprit,) = story.verdict.culprits
    assert culprit.above_bytes == 8
    (culprit,) = tell(MadeUp(hosts_of(4), links=cut((0, 1)))).verdict.culprits
    assert culprit.above_bytes == 0


def test_two_links_of_one_host_are_not_taken_for_the_host() -> None:
    cluster = MadeUp(hosts_of(8), links=cut((0, 1), (0, 2)))
    assert tell(cluster).named == cluster.truth


def test_what_was_not_broken_needs_no_round() -> None:
    verdict = next_round(hosts_of(4), [{frozenset(range(4)): Seen(Result.GOOD)}])
    assert not isinstance(verdict, Plan)
    assert verdict.culprits == ()
