"""Slow starts of communicators: time for them where it is needed, and nobody blamed for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Job, Outcome, OutcomeStatus, Severity
from nccl_doctor.judge.status import check_results
from nccl_doctor.model.findings import Status
from nccl_doctor.toolkit.groups.attempts import CONNECT, ENTRY, FIRST, FIRST_S, attempt_deadline
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster, outcome, reread
from tests.support.findings import judge, only
from tests.support.gpu_facts import worked
from tests.support.rows import each_row

CHECK = CHECKS["collectives"]
GOOD = {"steps": ["all_reduce"], "wrong": []}
STARTED_S = 1.0
"""Seconds that driver and context take in these clusters."""
LIMIT_S = 20.0
"""--collective-timeout."""
DEVICE_S = 0.5


def crumbs(*steps: str) -> tuple[dict[str, Any], ...]:
    at = {"set device cuda:0": 0.0}
    return tuple({"step": each, "at_s": at.get(each, DEVICE_S), "group": FIRST} for each in steps)


ENTERED = crumbs("set device cuda:0", CONNECT, ENTRY, "all_reduce")


def done(took_s: float) -> Outcome:
    """Outcome of a member whose group took so long after its GPU had started."""
    return Outcome(OutcomeStatus.OK, facts=GOOD, breadcrumbs=ENTERED, duration_s=DEVICE_S + took_s)


def hung(duration_s: float, steps: tuple[dict[str, Any], ...] = ENTERED, state: str = "S") -> Any:
    return Outcome(OutcomeStatus.HUNG, breadcrumbs=steps, state=state, duration_s=duration_s)


def seen(
    first: Mapping[int, Outcome] | None = None,
    world: Outcome | None = None,
    start_s: float = STARTED_S,
    **fields: Any,
) -> Cluster:
    """Two hosts of two ranks with NCCL, whose GPUs start in `start_s`; rank → its own group in the
    first round, and the same end for all ranks in the round of all.
    """
    cluster = make_cluster(**{"backend": "nccl", **fields})
    for rank in cluster.ranks:
        rounds = {}
        if first and rank.seat in first:
            rounds[FIRST] = replace(first[rank.seat], group=rank.seat)
        if world is not None:
            rounds["world"] = replace(world, group=0)
        facts = {"gpu_work": {ALONE: outcome(worked(rank.seat, start_s=start_s, context_s=0.0))}}
        cluster = change_rank(cluster, rank.seat, facts={**facts, "collectives": rounds})
    return cluster


def both(took_s: float) -> dict[int, Outcome]:
    return dict.fromkeys((0, 2), done(took_s))


# -- deadlines ----------------------------------------------------------------------------------


@each_row(
    ("cluster", "more_s"),
    [
        (seen(), FIRST_S),  # no group has finished yet
        (seen(both(2.0)), 0),
        (seen(both(52.3)), 53),  # it may be compiled again
        (seen({0: done(2.0), 2: done(52.3)}), 53),
        (seen(both(52.3), done(2.1)), 0),  # it was not: the cache holds it
        (seen(both(52.3), done(48.0)), 48),
        (seen(both(900.0)), 120),  # however long
        (seen({0: hung(81.0), 2: hung(81.0)}), FIRST_S),
        (seen(world=done(30.0)), 30),
    ],
)
def test_an_attempt_has_the_time_that_the_last_group_took(cluster: Cluster, more_s: float) -> None:
    assert attempt_deadline(cluster) == LIMIT_S + STARTED_S + more_s


@pytest.mark.parametrize(
    ("cluster", "more_s"),
    [
        (seen(both(2.0)), 3 * 6),  # a usual time: nothing was measured
        (seen(both(2.0), done(1.2)), 3 * 3),
        (seen(both(2.0), done(18.0)), 18 + 3 * LIMIT_S),  # never more than the user allows for one
    ],
)
def test_each_communicator_of_a_rank_adds_its_time(cluster: Cluster, more_s: float) -> None:
    assert attempt_deadline(cluster, 4) == LIMIT_S + STARTED_S + more_s


def test_a_large_world_has_more_time() -> None:
    large = replace(seen(both(2.0)), world_size=8192)
    assert attempt_deadline(large) == LIMIT_S + STARTED_S + 40


@pytest.mark.parametrize("communicators", [1, 5])
@pytest.mark.parametrize("cluster", [seen(backend="gloo"), seen(both(70.0), backend="gloo")])
def test_without_gpus_an_attempt_has_what_the_user_allows(
    cluster: Cluster, communicators: int
) -> None:
    huge = replace(cluster, world_size=10_000)
    assert attempt_deadline(huge, communicators) == LIMIT_S


@pytest.mark.parametrize(("name", "most"), [("groups", 5), ("device_mesh", 3), ("side_group", 2)])
def test_rounds_of_several_groups_have_time_for_each(name: str, most: int) -> None:
    job = Job(mesh=(("dp", 2), ("tp", 2)), groups="weight-sync")
    cluster = seen(both(2.0), done(2.0), job=job)
    rounds = CHECKS[name].plan(cluster)
    assert {round_.deadline_s for round_ in rounds} == {attempt_deadline(cluster, most)}
    slow = seen(both(52.0), done(50.0), job=job)
    assert all(round_.deadline_s > 50 + LIMIT_S for round_ in CHECKS[name].plan(slow))


# -- the first round ----------------------------------------------------------------------------


def test_one_rank_of_each_host_is_first_and_alone() -> None:
    (first,) = CHECK.plan(make_cluster(backend="nccl"))
    assert (first.name, first.groups) == (FIRST, ((0,), (2,)))
    (world,) = CHECK.plan(seen(both(52.0)))
    assert (world.name, world.groups) == ("world", ((0, 1, 2, 3),))
    assert world.deadline_s >= LIMIT_S + 52


@pytest.mark.parametrize(
    "cluster", [make_cluster(), make_cluster(("nd0",), 1, backend="nccl"), seen(world=done(1.0))]
)
def test_it_is_not_held_without_nccl_nor_for_one_rank_nor_afterwards(cluster: Cluster) -> None:
    assert CHECK.plan(cluster)[0].name == "world"


def test_an_error_in_it_is_left_to_the_group_of_all() -> None:
    error = Outcome(OutcomeStatus.RAISED, reason="RuntimeError: NCCL error", breadcrumbs=ENTERED)
    cluster = seen({0: error, 2: done(1.0)})
    assert judge(CHECK, cluster) == []
    assert [round_.name for round_ in CHECK.plan(cluster)] == ["world"]


# -- slow starts --------------------------------------------------------------------------------


def slow_start(cluster: Cluster, **where: Any) -> str:
    found = only(CHECK, cluster, "group-start-slow", **where)
    assert found.level is Severity.INFO
    return found.message


FIRSTS = {"hosts": ["nd0", "nd1"], "ranks": [0, 2]}


def test_a_first_communicator_that_is_compiled_is_only_information() -> None:
    words = slow_start(seen({0: done(51.6), 2: done(55.2)}, done(2.1)), **FIRSTS)
    assert "first communicator took up to 55 s" in words
    assert "the next one, of all ranks, 2.1 s" in words
    assert "cached now" in words


def test_one_host_that_compiles_is_named_alone() -> None:
    words = slow_start(seen({0: done(2.0), 2: done(55.2)}, done(2.1)), hosts=["nd1"], ranks=[2])
    assert "took 55 s after" in words


def test_it_says_so_where_nothing_is_cached() -> None:
    again = seen(both(52.0), done(50.0))
    assert "anew in each process" in slow_start(again, **FIRSTS)
    off = {rank: {"CUDA_CACHE_DISABLE": "1"} for rank in range(4)}
    words = slow_start(seen(both(52.0), done(50.0), env=off), **FIRSTS)
    assert words.endswith("CUDA_CACHE_DISABLE=1 turns the JIT cache off")


def test_usual_starts_give_nothing() -> None:
    assert judge(CHECK, seen(both(4.0), done(3.0))) == []


def test_a_driver_that_wakes_is_only_information() -> None:
    asleep = {"gpus": [{"index": 0, "persistence": 0}]}
    cluster = seen(
        both(2.0), done(2.0), 21.4, check="gpu_state", by_host={"nd0": asleep, "nd1": asleep}
    )
    words = slow_start(cluster, hosts=["nd0", "nd1"], ranks=range(4))
    assert "took up to 21 s to start" in words
    assert "persistence mode is off" in words
    awake = slow_start(seen(both(2.0), done(2.0), 21.4), hosts=["nd0", "nd1"], ranks=range(4))
    assert "persistence" not in awake
    assert judge(CHECK, seen(start_s=21.4, backend="gloo")) == []


# -- no end -------------------------------------------------------------------------------------


def test_a_rank_that_hangs_with_no_other_in_its_group_is_named() -> None:
    cluster = seen({0: done(2.0), 2: hung(81.0)})
    found = only(CHECK, cluster, "group-init-hang", hosts=["nd1"], ranks=[2])
    assert "within 81 s in a group of this rank alone" in found.message
    assert found.confidence.value == "likely"
    assert CHECK.plan(cluster) == []  # a group of all would only wait for it


def test_one_that_somebody_stopped_there_is_frozen() -> None:
    cluster = seen({0: done(2.0), 2: hung(81.0, state="T")})
    only(CHECK, cluster, "rank-frozen", hosts=["nd1"], ranks=[2])


def test_one_that_does_not_reach_the_store_is_left_to_the_group_of_all() -> None:
    away = crumbs("set device cuda:0", CONNECT)
    cluster = seen({0: done(2.0), 2: hung(81.0, away)})
    assert judge(CHECK, cluster) == []
    assert [round_.name for round_ in CHECK.plan(cluster)] == ["world"]


@pytest.mark.parametrize("first", [{0: hung(40.0), 2: hung(40.0)}, {0: done(2.0), 2: hung(40.0)}])
def test_where_the_run_had_no_time_for_a_slow_start_nobody_is_blamed(
    first: dict[int, Outcome],
) -> None:
    cluster = seen(first)
    assert judge(CHECK, cluster) == []
    assert CHECK.plan(cluster) == []
    (result,) = check_results(cluster, [CHECK], [])
    assert result.status is Status.UNKNOWN
    assert "hung in all_reduce" in result.reason
    # Nor by what is held in the seconds that were left.
    for rank in cluster.ranks:
        rounds = {"in-order": replace(hung(4.0), group=0)}
        cluster = change_rank(cluster, rank.seat, facts={**rank.facts, "groups": rounds})
    assert judge(CHECKS["groups"], cluster) == []


@pytest.mark.parametrize("took_s", [2.0, 52.0])
def test_a_group_that_hangs_after_a_first_one_is_found_as_before(took_s: float) -> None:
    before = seen(both(took_s))
    cluster = seen(both(took_s), hung(CHECK.plan(before)[0].deadline_s))
    codes = {found.code for found in judge(CHECK, cluster)} - {"group-start-slow"}
    assert codes == {"collective-hang"}
    assert CHECK.plan(cluster)[-1].name == "each-host"


def test_a_saved_report_gives_the_same() -> None:
    cluster = seen(both(52.0), done(2.0))
    ranks = tuple(replace(rank, facts=reread(rank.facts)) for rank in cluster.ranks)
    same = replace(cluster, ranks=ranks)
    assert [f.message for f in judge(CHECK, same)] == [f.message for f in judge(CHECK, cluster)]
    assert attempt_deadline(same) == attempt_deadline(cluster)


def test_an_older_report_without_a_first_round_is_judged_as_before() -> None:
    found = judge(CHECK, seen(world=hung(21.0)))
    assert [each.code for each in found] == ["collective-hang"]
