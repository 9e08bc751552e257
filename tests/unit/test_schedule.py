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
from nccl_doctor.toolkit.peers.schedule import (
    ALL_PAIRS,
    LARGE,
    Schedule,
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
