"""The group_speed check on made-up clusters: who is slow twice is named, noise is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Job, Level, Severity
from nccl_doctor.checks.group_speed import GroupSpeed
from nccl_doctor.model.findings import Finding, Round
from tests.support.clusters import make_cluster, with_round
from tests.support.peers import DROPPED, World
from tests.support.timed_rounds import BUSY, IDLE, all_reduce, hold

CHECK = GroupSpeed()
Seconds = Callable[[Round, tuple[int, ...], int], float]


def held(cluster: Cluster, seconds: Seconds, cpu: Mapping[str, Any] = IDLE) -> Cluster:
    """The cluster after all rounds that the check plans; `seconds` of (round, group, seat)."""

    def facts(round_: Round, group: tuple[int, ...], seat: int) -> dict[str, Any]:
        return measured(round_, group, seat, seconds, cpu)

    return hold(CHECK, cluster, facts)[0]


def measured(
    round_: Round, group: tuple[int, ...], seat: int, seconds: Seconds, cpu: Mapping[str, Any]
) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if round_.name in ("world", "again-ranks"):
        took = seconds(round_, (seat,), seat)
        facts["compute"] = {"what": "a product", "seconds": took, "cpu": dict(cpu)}
    if len(group) > 1:
        took = seconds(round_, group, seat)
        facts |= all_reduce(4 << 20, took, cpu)
    return facts


def hosts(count: int) -> Cluster:
    return make_cluster([f"nd{i}" for i in range(count)], 2)


def judged(cluster: Cluster) -> list[Finding]:
    return list(CHECK.judge(cluster))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_equals_give_nothing(count: int) -> None:
    assert judged(held(hosts(count), lambda *_: 0.01)) == []


def test_a_slow_rank_is_named_by_its_computing_alone() -> None:
    def seconds(round_: Round, group: tuple[int, ...], seat: int) -> float:
        return 0.09 if group == (3,) else 0.01

    cluster = held(hosts(3), seconds)
    (found,) = judged(cluster)
    assert (found.code, found.where.ranks, found.where.hosts) == ("rank-slow", (3,), ("nd1",))
    assert found.level is Severity.WARN
    assert "90 ms to compute what takes the others 10 ms" in found.message
    assert "nvidia-smi" not in found.fix  # the ranks compute on CPUs


def test_a_host_that_is_slow_inside() -> None:
    def seconds(round_: Round, group: tuple[int, ...], seat: int) -> float:
        return 0.08 if group == (4, 5) else 0.01

    (found,) = judged(held(hosts(4), seconds))
    assert (found.code, found.where.hosts) == ("bandwidth-low", ("nd2",))
    assert "inside the host" in found.message


@pytest.mark.parametrize(
    ("count", "fields", "is_timed"),
    [
        (2, {}, False),
        (3, {}, True),
        (2, {"backend": "nccl"}, True),
        (2, {"level": Level.FULL}, True),
        (1, {"backend": "nccl"}, False),
    ],
)
def test_over_gloo_two_hosts_are_not_timed_inside_as_nothing_compares_them(
    count: int, fields: Mapping[str, Any], is_timed: bool
) -> None:
    cluster = make_cluster([f"nd{i}" for i in range(count)], 2, **fields)
    assert ("each-host" in {round_.name for round_ in CHECK.plan(cluster)}) is is_timed


def linked(rates: Mapping[tuple[str, str], float | None], **more: Any) -> Cluster:
    """Three hosts of which check `links` has timed links: (host, partner) → bytes per second."""
    seats = {"nd0": "0", "nd1": "2", "nd2": "4"}
    facts = {
        name: {"sent": {seats[b]: {"rate": rate} for (a, b), rate in rates.items() if a == name}}
        for name in seats
    }
    made = {"check": "links", "by_host": facts, "round_name": "exchange"}
    return make_cluster(tuple(seats), 2, **made, **more)


def test_pairs_are_left_to_the_links_where_gloo_would_do_the_same() -> None:
    every = {(a, b): 1e9 for a in ("nd0", "nd1", "nd2") for b in ("nd0", "nd1", "nd2") if a != b}

    def pairs(cluster: Cluster) -> int:
        return sum(round_.name.startswith("pairs") for round_ in CHECK.plan(cluster))

    assert pairs(linked(every)) == 0
    assert pairs(linked({**every, ("nd0", "nd1"): None})) == 3, "one was not timed"
    assert pairs(linked({key: 1e9 for key in every if "nd2" not in key})) == 3
    assert pairs(linked({})) == pairs(hosts(3)) == 3
    assert pairs(linked(every, backend="nccl")) == 3, "NCCL may take another way"
    assert pairs(linked(every, level=Level.FULL)) == 3


def test_no_pair_is_missed_that_could_not_meet() -> None:
    """Two hosts that cannot call each other have one partner less each to be timed with."""
    three, broken = ("nd0", "nd1", "nd2"), {("nd1", "nd2"), ("nd2", "nd1")}
    every = {(a, b) for a in three for b in three if a != b}
    seats = {name: str(2 * at) for at, name in enumerate(three)}

    def pairs(timed: set[tuple[str, str]]) -> int:
        facts = {
            name: {"sent": {seats[b]: {"rate": 1e9} for a, b in timed if a == name}}
            for name in three
        }
        cluster = World(3, "gloo").fail(broken, DROPPED).cluster()
        cluster = with_round(cluster, "links", "exchange", facts)
        return sum(round_.name.startswith("pairs") for round_ in CHECK.plan(cluster))

    assert pairs(every - broken) == 0
    assert pairs(every - broken - {("nd0", "nd1"), ("nd1", "nd0")}) == 3, "one was not timed"


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_a_host_that_is_slow_with_its_neighbours(count: int) -> None:
    def seconds(round_: Round, group: tuple[int, ...], seat: int) -> float:
        return 0.08 if "pairs" in round_.name and 2 in group else 0.01

    (found,) = judged(held(hosts(count), seconds))
    assert (found.code, found.where.hosts) == ("bandwidth-low", ("nd1",))
    assert found.where.links == ()


def test_a_link_that_is_slow_while_its_ends_are_good_with_others() -> None:
    def seconds(round_: Round, group: tuple[int, ...], seat: int) -> float:
        return 0.08 if set(group) == {2, 4} else 0.01

    (found,) = judged(held(hosts(5), seconds))
    assert (found.code, found.where.hosts) == ("bandwidth-low", ())
    assert found.where.links == (("nd1", "nd2"), ("nd2", "nd1"))


def test_what_was_slow_once_is_noise() -> None:
    def seconds(round_: Round, group: tuple[int, ...], seat: int) -> float:
        return 0.08 if 2 in group and not round_.name.startswith("again") else 0.01

    assert judged(held(hosts(4), seconds)) == []


def test_a_busy_machine_is_told_and_not_blamed() -> None:
    def seconds(round_: Round, group: tuple[int, ...], seat: int) -> float:
        return 0.08 if "pairs" in round_.name and 2 in group else 0.01

    (found,) = judged(held(hosts(4), seconds, BUSY))
    assert found.level is Severity.INFO
    assert "busy" in found.message


@pytest.mark.parametrize("place", ["rank", "inside", "pairs"])
@pytest.mark.parametrize(("slower", "blamed"), [(7, False), (20, True)])
def test_who_is_slower_than_a_busy_machine_makes_it_is_blamed(
    place: str, slower: int, blamed: bool
) -> None:
    def seconds(round_: Round, group: tuple[int, ...], seat: int) -> float:
        slow = {"rank": group == (4,), "inside": group == (4, 5), "pairs": "pairs" in round_.name}
        return 0.01 * slower if slow[place] and 4 in group else 0.01

    half = {**IDLE, "waited_s": 0.5}
    (found,) = judged(held(hosts(4), seconds, half))
    assert found.level is (Severity.WARN if blamed else Severity.INFO)
    assert ("CPU was busy" in found.message) is not blamed


def test_every_dimension_of_the_mesh_is_timed() -> None:
    cluster = replace(hosts(2), job=Job(mesh=(("dp", 2), ("tp", 2))))
    rounds = {r.name: r.groups for r in CHECK.plan(cluster)}
    assert rounds["mesh-dp"] == ((0, 2), (1, 3))
    assert rounds["mesh-tp"] == ((0, 1), (2, 3))
    odd = replace(cluster, job=Job(mesh=(("dp", 3),)))
    assert not [r.name for r in CHECK.plan(odd) if r.name.startswith("mesh")]


def test_an_own_view_blames_nobody() -> None:
    cluster = held(hosts(4), lambda r, g, s: 0.08 if 2 in g else 0.01)
    assert judged(replace(cluster, complete=False)) == []
