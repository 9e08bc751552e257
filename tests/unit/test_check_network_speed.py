"""The network_speed check on made-up clusters: the network by itself, and who is slow twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Level, Outcome, OutcomeStatus, Severity, Skip
from nccl_doctor.model.findings import Finding, Round
from tests.support import racks
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster
from tests.support.timed_rounds import BUSY, IDLE, all_reduce, hold

CHECK = CHECKS["network_speed"]
LARGE = 128 << 20
FAST, SLOW = 40.0, 4.0
"""GB/s of a pair of ranks."""
Rate = Callable[[Round, tuple[int, ...]], float]


def hosts(count: int, nproc: int = 2, **fields: Any) -> Cluster:
    names = [f"nd{node}" for node in range(count)]
    return make_cluster(names, nproc, **{"backend": "nccl", "level": Level.FULL, **fields})


def held(cluster: Cluster, rate: Rate, cpu: Mapping[str, Any] = IDLE) -> Cluster:
    def facts(round_: Round, group: tuple[int, ...], seat: int) -> dict[str, Any]:
        return all_reduce(LARGE, LARGE / rate(round_, group) / 1e9, cpu)

    return hold(CHECK, cluster, facts)[0]


def judged(cluster: Cluster) -> list[Finding]:
    return list(CHECK.judge(cluster))


def with_rank_of(node: int, nproc: int = 2) -> Callable[[tuple[int, ...]], bool]:
    return lambda group: any(seat // nproc == node for seat in group)


def test_only_nccl_can_leave_nvlink_out() -> None:
    with pytest.raises(Skip, match="backend is gloo"):
        CHECK.plan(hosts(3, backend="gloo"))


def test_one_host_has_no_network() -> None:
    with pytest.raises(Skip, match="one host"):
        CHECK.plan(hosts(1))


def test_hosts_that_nvlink_joins_use_no_network() -> None:
    with pytest.raises(Skip, match="one NVLink domain"):
        CHECK.plan(racks.rack(racks.tray(0), racks.tray(1), level=Level.FULL))
    apart = racks.rack(racks.tray(0), racks.tray(1), racks.tray(2, racks.OTHER_RACK))
    assert {r.name for r in CHECK.plan(apart)} == {"network-0", "network-1", "network-2"}


def test_it_takes_its_time_at_the_highest_level_only() -> None:
    assert CHECK.level is Level.FULL


def test_ranks_of_equal_number_on_neighbouring_hosts_meet_all_at_once() -> None:
    rounds = {r.name: r.groups for r in CHECK.plan(hosts(2, 4))}
    assert rounds == {"network-0": ((0, 4), (1, 5), (2, 6), (3, 7))}
    rounds = {r.name: r.groups for r in CHECK.plan(hosts(3))}
    assert rounds["network-0"] == ((0, 2), (1, 3))
    assert set(rounds) == {"network-0", "network-1", "network-2"}


@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_equals_give_nothing(count: int) -> None:
    assert judged(held(hosts(count), lambda *_: FAST)) == []


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_a_host_with_a_slow_network_is_named_alone(count: int) -> None:
    slow = with_rank_of(1)
    (found,) = judged(held(hosts(count), lambda _, group: SLOW if slow(group) else FAST))
    assert (found.code, found.where.hosts, found.where.links) == ("bandwidth-low", ("nd1",), ())
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.message == (
        "over the network alone, all ranks at once, with its neighbours 8 GB/s bus bandwidth, "
        "measured twice; other pairs: 80 GB/s"
    )
    assert len(found.evidence["pairs"]) == 2


def test_a_slow_path_between_hosts_that_are_good_with_others() -> None:
    def rate(_: Round, group: tuple[int, ...]) -> float:
        return SLOW if {seat // 2 for seat in group} == {1, 2} else FAST

    (found,) = judged(held(hosts(5), rate))
    assert (found.code, found.where.hosts) == ("bandwidth-low", ())
    assert found.where.links == (("nd1", "nd2"), ("nd2", "nd1"))


def test_what_was_slow_once_is_noise() -> None:
    slow = with_rank_of(1)

    def rate(round_: Round, group: tuple[int, ...]) -> float:
        return SLOW if slow(group) and not round_.name.startswith("again") else FAST

    assert judged(held(hosts(4), rate)) == []


def test_a_busy_machine_is_told_and_not_blamed() -> None:
    slow = with_rank_of(1)
    (found,) = judged(held(hosts(4), lambda _, group: SLOW if slow(group) else FAST, BUSY))
    assert found.level is Severity.INFO
    assert found.message.endswith("; measured while the CPU was busy with other work")


def test_two_hosts_are_measured_and_not_compared() -> None:
    made = held(hosts(2), lambda *_: SLOW)
    assert judged(made) == []
    shown = {figure.name: figure for figure in CHECK.figures(made)}
    assert set(shown) == {
        "all-reduce over the network alone, local rank 0, 128 MiB",
        "all-reduce over the network alone, local rank 1, 128 MiB",
        "all-reduce over the network alone, 2 pairs of ranks at once, 128 MiB",
    }
    whole = shown["all-reduce over the network alone, 2 pairs of ranks at once, 128 MiB"]
    assert (whole.value, whole.unit, whole.better) == (pytest.approx(8.0), "GB/s", "higher")
    assert whole.where.links == (("nd0", "nd1"), ("nd1", "nd0"))


def test_the_figures_of_a_busy_machine_do_not_count() -> None:
    shown = list(CHECK.figures(held(hosts(2), lambda *_: FAST, BUSY)))
    assert shown
    assert {figure.counts for figure in shown} == {False}


def test_a_pair_with_a_rank_that_did_not_finish_is_not_compared() -> None:
    def facts(round_: Round, group: tuple[int, ...], seat: int) -> Any:
        if 2 in group:
            return Outcome(OutcomeStatus.HUNG, duration_s=20.0)
        return all_reduce(LARGE, LARGE / FAST / 1e9)

    made, rounds = hold(CHECK, hosts(4), facts)
    assert judged(made) == []
    assert {r.name for r in rounds} == {"network-0", "network-1"}


def test_a_host_with_fewer_ranks_is_not_compared() -> None:
    made = hosts(5)
    made = replace(made, ranks=tuple(rank for rank in made.ranks if rank.seat != 3))
    slow = with_rank_of(1)
    assert judged(held(made, lambda _, group: SLOW if slow(group) else FAST)) == []


def test_an_own_view_blames_nobody() -> None:
    slow = with_rank_of(1)
    made = held(hosts(4), lambda _, group: SLOW if slow(group) else FAST)
    assert judged(replace(made, complete=False)) == []


def test_no_round_grows_with_the_cluster() -> None:
    rounds = CHECK.plan(hosts(33, 8))
    assert len(rounds) == 3
    assert sum(len(r.groups) for r in rounds) == 33 * 8
