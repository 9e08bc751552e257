"""Schedules of calls: few partners for each of many hosts, chosen anew for each run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import Cluster, Level
from nccl_doctor.checks.firewall import Firewall
from nccl_doctor.checks.firewall.sampled import judge_sample
from nccl_doctor.toolkit.leaves import leaf_switches
from nccl_doctor.toolkit.peers.schedule import (
    ALL_PAIRS,
    LARGE,
    Schedule,
    in_turns,
    partners_enough,
    plan_schedule,
    schedule_of,
)
from tests.support.clusters import make_cluster

MANY = 200


def hosts(count: int, below: int = 0, **fields: object) -> Cluster:
    """Hosts of one rank, so many of them below each leaf switch, if Slurm says that."""
    made = make_cluster([f"nd{i}" for i in range(count)], 1, **fields)
    return replace(
        made,
        ranks=tuple(
            replace(
                rank,
                env={
                    "SLURM_TOPOLOGY_ADDR": f"spine.leaf{rank.host.id // below}.nd{rank.host.id}",
                    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
                }
                if below
                else {},
            )
            for rank in made.ranks
        ),
        run_id="a run",
    )


def seats(cluster: Cluster) -> list[int]:
    return [rank.seat for rank in cluster.present]


@given(st.sets(st.integers(0, 5000), min_size=ALL_PAIRS + 1, max_size=300), st.text(max_size=5))
def test_everybody_is_connected_with_few_partners(members: set[int], seed: str) -> None:
    schedule = Schedule(tuple(sorted(members)), seed, all_pairs=False)
    enough = partners_enough(len(members))
    partners = {seat: schedule.partners(seat) for seat in members}
    for seat, theirs in partners.items():
        assert seat not in theirs
        assert enough - 1 <= len(theirs) <= enough
        assert all(seat in partners[other] for other in theirs)
        assert LARGE - 1 <= sum(theirs.values()) <= LARGE
    reached, todo = set(), {min(members)}
    while todo:
        seat = todo.pop()
        reached.add(seat)
        todo |= partners[seat].keys() - reached
    assert reached == members


def test_partners_grow_with_the_logarithm() -> None:
    assert [partners_enough(count) for count in (65, 1024, 2048, 16384)] == [11, 14, 15, 18]
    assert math.ceil(math.log2(1024)) + 4 == 14


def test_each_run_has_other_pairs_and_all_of_a_run_the_same() -> None:
    group = tuple(range(MANY))
    one, same, other = (Schedule(group, seed, all_pairs=False).slots for seed in ("a", "a", "b"))
    assert one == same
    assert one != other


@given(st.integers(66, 150), st.integers(2, 40))
def test_every_two_leaf_switches_are_tried(count: int, below: int) -> None:
    cluster = hosts(count, below)
    schedule = plan_schedule(cluster, seats(cluster))
    leaves = set(schedule.leaves.values())
    met = {
        frozenset((schedule.leaves[a], schedule.leaves[b]))
        for slot in schedule.slots
        for a, b in slot
    }
    assert {pair for pair in met if len(pair) == 2} == {
        frozenset((a, b)) for a in leaves for b in leaves if a != b
    }
    for slot in schedule.slots:
        busy = [seat for meeting in slot for seat in meeting]
        assert len(busy) == len(set(busy))


@given(
    st.integers(65, 140),
    st.integers(3, 40),
    st.sampled_from([(0, 1, 2, 3), (0, 1), (7,)]),
    st.integers(2, 9),
    st.text(max_size=3),
)
def test_every_rail_is_tried_on_each_host_and_between_every_two_leaf_switches(
    count: int, below: int, few: tuple[int, ...], every: int, seed: str
) -> None:
    """Some hosts have other rails than most: down, or without an address."""
    members = tuple(range(count))
    leaves = {seat: seat // below for seat in members}
    rails = {seat: few if seat % every == 0 else (0, 1, 2, 3) for seat in members}
    schedule = Schedule(members, seed, leaves, all_pairs=False, rails=rails)
    met = {
        (rail, frozenset(pair))
        for slot in schedule.slots
        for a, b in slot
        for rail in set(rails[a]) & set(rails[b])
        for pair in ((("seat", a), ("seat", b)), (leaves[a], leaves[b]))
    }
    ends = {(rail, end) for rail, pair in met for end in pair}
    having: dict[int, set[int]] = {}
    for seat, numbers in rails.items():
        for rail in numbers:
            having.setdefault(rail, set()).add(seat)
    for rail, seats_of in having.items():
        if len(seats_of) > 1:
            assert all((rail, ("seat", seat)) in ends for seat in seats_of)
        theirs = {leaves[seat] for seat in seats_of}
        assert all((rail, frozenset((a, b))) in met for a in theirs for b in theirs if a < b)
    for slot in schedule.slots:
        busy = [seat for meeting in slot for seat in meeting]
        assert len(busy) == len(set(busy))
    told = json.loads(json.dumps(schedule.to_params()))
    assert schedule_of(members, told) == schedule


def test_rails_that_all_hosts_have_need_no_more_meetings() -> None:
    cluster = hosts(MANY, 16)
    alike = dict.fromkeys(seats(cluster), (0, 1, 2, 3))
    assert plan_schedule(cluster, seats(cluster), rails=alike) == plan_schedule(
        cluster, seats(cluster)
    )
    other = plan_schedule(cluster, seats(cluster), rails={**alike, 5: (0,)})
    assert other.rails[5] == (0,)


def test_level_full_is_not_for_what_goes_through_the_store() -> None:
    cluster = hosts(MANY, level=Level.FULL)
    assert plan_schedule(cluster, seats(cluster)).all_pairs
    assert not plan_schedule(cluster, seats(cluster), more_at_full=False).all_pairs


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).filter(lambda m: m[0] != m[1])),
    st.integers(1, 20),
)
def test_turns_hold_every_meeting_once_with_few_pairs_at_once(
    meetings: list[tuple[int, int]], most: int
) -> None:
    turns = in_turns(meetings, most)
    assert sorted(each for turn in turns for each in turn) == sorted(meetings)
    for turn in turns:
        assert turn
        assert len({seat for meeting in turn for seat in meeting}) // 2 <= most


def test_participants_make_the_same_schedule_from_the_order_without_who_is_gone() -> None:
    cluster = hosts(MANY, 16)
    planned = plan_schedule(cluster, seats(cluster))
    params = json.loads(json.dumps(planned.to_params()))
    left = [seat for seat in seats(cluster) if seat % 50]
    theirs = schedule_of(left, params)
    assert theirs is not None
    assert schedule_of(seats(cluster), params) == planned
    assert {seat for slot in theirs.slots for each in slot for seat in each} == set(left)
    assert len(json.dumps(params)) < 20 * MANY


def test_a_switch_that_slurm_does_not_tell_of_every_host_is_not_known() -> None:
    cluster = hosts(MANY, 16)
    some = replace(cluster.ranks[3], env={"SLURM_TOPOLOGY_ADDR": "nd3"})
    ranks = (*cluster.ranks[:3], some, *cluster.ranks[4:])
    cluster = replace(cluster, ranks=ranks)
    assert plan_schedule(cluster, seats(cluster)).leaves == {}
    one_switch = hosts(MANY, MANY)
    assert plan_schedule(one_switch, seats(one_switch)).leaves == {}


def test_what_slurm_says_of_other_hosts_is_not_believed() -> None:
    def said(index: int, **env: str) -> str:
        cluster = hosts(MANY, 16)
        ranks = list(cluster.ranks)
        ranks[index] = replace(ranks[index], env={**ranks[index].env, **env})
        made = replace(cluster, ranks=tuple(ranks))
        leaves, words = leaf_switches(made, seats(made))
        assert (leaves == {}) == bool(words)
        tried = {pair for slot in plan_schedule(made, seats(made)).slots for pair in slot}
        (found,) = judge_sample(made, tried)
        assert found.message.endswith(words)
        return words

    end = ": the leaf switches are taken as not known"
    assert said(3) == ""
    copied = said(3, SLURM_TOPOLOGY_ADDR="spine.leaf0.nd4")
    assert copied == f"SLURM_TOPOLOGY_ADDR names nd4 on 2 hosts{end}"
    lacking = said(3, SLURM_TOPOLOGY_ADDR="nd3")
    assert lacking == f"SLURM_TOPOLOGY_ADDR is set on 199 of 200 hosts{end}"
    cluster = hosts(MANY, 16)
    listed = {"SLURM_JOB_NODELIST": "nd[0-198]"}
    ranks = tuple(replace(rank, env={**rank.env, **listed}) for rank in cluster.ranks)
    _, unknown = leaf_switches(replace(cluster, ranks=ranks), seats(cluster))
    assert unknown == (
        f"SLURM_TOPOLOGY_ADDR names nd199, which SLURM_JOB_NODELIST does not have{end}"
    )


def test_few_hosts_and_level_full_try_every_pair() -> None:
    (few,) = Firewall().plan(hosts(ALL_PAIRS))
    assert "schedule" not in few.params
    (many,) = Firewall().plan(hosts(MANY))
    (full,) = Firewall().plan(hosts(MANY, level=Level.FULL))
    assert many.deadline_s < full.deadline_s
    group = many.groups[0]
    some, every = (schedule_of(group, each.params) for each in (many, full))
    assert some is not None
    assert every is not None
    assert len(some.partners(group[0])) == partners_enough(MANY)
    assert set(every.partners(group[0])) == set(group[1:])
    assert all(every.partners(group[0]).values())  # and each of them with 1 MiB


def test_the_report_says_what_a_sample_may_miss() -> None:
    cluster = hosts(MANY, 20)
    slots = plan_schedule(cluster, seats(cluster)).slots
    tried = {pair for slot in slots for a, b in slot for pair in ((a, b), (b, a))}
    (found,) = judge_sample(cluster, tried)
    assert found.code == "pairs-sampled"
    assert f"{len(tried)} of 39800 ordered pairs of 200 hosts" in found.message
    assert "missed with a probability of 94." in found.message
    assert found.message.endswith("one dead uplink, of 16 of a leaf switch: less than 0.1 %")
    (found,) = judge_sample(hosts(MANY), tried)
    assert "uplink" not in found.message
    assert list(judge_sample(hosts(ALL_PAIRS), set())) == []
    every = {(a, b) for a in seats(cluster) for b in seats(cluster) if a != b}
    assert list(judge_sample(cluster, every)) == []
