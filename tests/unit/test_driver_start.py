"""Groups on hosts where the GPU driver starts anew for each process: nobody there is frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Job, Outcome, OutcomeStatus, Severity
from nccl_doctor.toolkit.groups.attempts import FIRST_S, attempt_deadline, driver_start_s
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import only
from tests.support.gpu_facts import facts as built
from tests.support.gpu_facts import worked

ROUNDS = (
    "collectives", "exchanges", "groups", "group_speed", "device_mesh", "side_group",
    "deepspeed_groups",
)  # fmt: skip
GOOD = {"steps": ["all_reduce"], "wrong": []}


def crumbs(*steps: str) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"step": step, "at_s": float(at), "group": "world"} for at, step in enumerate(steps)
    )


SETTING = ("set device cuda:1",)
ENTERED = ("set device cuda:1", "connect to the store", "init_process_group", "all_reduce")


def stuck(steps: tuple[str, ...], state: str = "S", wchan: str = "ep_poll") -> Outcome:
    return Outcome(
        OutcomeStatus.HUNG, breadcrumbs=crumbs(*steps), state=state, wchan=wchan, duration_s=45
    )


def measured(backend: str = "nccl", **by_rank: dict[str, Any]) -> Cluster:
    """Two hosts of two ranks; `backend_device` and `gpu_work` of some ranks, by `r0`, `r1`, …"""
    cluster = make_cluster(backend=backend)
    for name, seen in by_rank.items():
        seat = int(name.removeprefix("r"))
        facts = {check: {ALONE: outcome(value)} for check, value in seen.items()}
        cluster = change_rank(cluster, seat, facts=facts)
    return cluster


def start(rank: int, start_s: float, context_s: float | None = 0.4) -> dict[str, Any]:
    return {
        "backend_device": built(0, rank, start_s=start_s),
        "gpu_work": worked(rank, start_s=start_s, context_s=context_s),
    }


def test_an_attempt_has_the_time_of_the_slowest_driver() -> None:
    cluster = measured(r0=start(0, 0.3), r2=start(2, 21.7, 0.8))
    # No group has finished yet: the first communicator has its own time.
    assert attempt_deadline(cluster) == cluster.collective_timeout_s + 23 + FIRST_S


@pytest.mark.parametrize(
    ("cluster", "more_s"),
    [
        (measured("gloo", r0=start(0, 21.0)), 0),
        (measured(r0=start(0, 400.0)), 60),  # however long
        (measured(r0=start(0, 2.0, None)), 2),
        (measured(), 25),  # nobody looked
        (measured(r0={"backend_device": {"torch": "2.8"}, "gpu_work": {"context_s": 1.2}}), 25),
        (measured(r0=start(0, 0.0)), 1),
    ],
)
def test_the_time_is_bounded_and_none_where_no_gpu_is_used(cluster: Cluster, more_s: float) -> None:
    assert driver_start_s(cluster) == more_s
    first_s = FIRST_S if more_s else 0
    assert attempt_deadline(cluster) == cluster.collective_timeout_s + more_s + first_s


@pytest.mark.parametrize("name", ROUNDS)
def test_every_round_of_groups_has_it(name: str) -> None:
    job = Job(mesh=(("dp", 2), ("tp", 2)), groups="weight-sync", deepspeed=True)
    cluster = replace(measured(r1=start(1, 19.2)), job=job)
    if name == "deepspeed_groups":
        imported = outcome({"deepspeed": "0.17", "torch": "2.8", "import_s": 1.0})
        for rank in cluster.ranks:
            facts = {**rank.facts, name: {"import": imported}}
            cluster = change_rank(cluster, rank.seat, facts=facts)
    rounds = [round_ for round_ in CHECKS[name].plan(cluster) if round_.name != "import"]
    assert rounds
    assert all(round_.deadline_s >= cluster.collective_timeout_s + 19 for round_ in rounds)


def of_collectives(by_rank: dict[int, Outcome]) -> Cluster:
    seen = {rank: by_rank.get(rank, GOOD) for rank in range(4)}
    return make_cluster(check="collectives", by_rank=seen, round_name="world", backend="nccl")


@pytest.mark.parametrize("state", ["D", "S", "R"])
def test_a_driver_that_still_starts_is_named_and_nobody_is_frozen(state: str) -> None:
    by_rank = {rank: stuck(ENTERED) for rank in range(4)}
    by_rank |= {rank: stuck(SETTING, state, "os_acquire_mutex") for rank in (2, 3)}
    check = CHECKS["collectives"]
    cluster = of_collectives(by_rank)
    found = only(check, cluster, "gpu-not-started", hosts=["nd1"], ranks=[2, 3])
    assert f"process state {state}, kernel wait os_acquire_mutex" in found.message
    assert "within 45 s" in found.message
    assert (found.level, found.confidence.value) == (Severity.FAIL, "likely")
    assert "nvidia-smi -pm 1" in (found.fix or found.kind.fix)
    # It is known where: nothing is isolated, and nothing tried again.
    assert [r.name for r in check.plan(cluster)] == ["world", "each-host", "across-hosts"]


def test_where_all_drivers_still_start_no_group_hangs() -> None:
    everybody = {rank: stuck(SETTING, "D") for rank in range(4)}
    only(
        CHECKS["collectives"],
        of_collectives(everybody),
        "gpu-not-started",
        hosts=["nd0", "nd1"],
        ranks=range(4),
    )


def test_a_process_that_somebody_stopped_there_is_frozen() -> None:
    by_rank = {rank: stuck(ENTERED) for rank in range(4)}
    cluster = of_collectives({**by_rank, 1: stuck(SETTING, "T", "do_signal_stop")})
    only(CHECKS["collectives"], cluster, "rank-frozen", hosts=["nd0"], ranks=[1])


def test_one_in_the_kernel_in_a_collective_is_frozen_as_before() -> None:
    by_rank = {rank: stuck(ENTERED) for rank in range(4)}
    cluster = of_collectives({**by_rank, 1: stuck(ENTERED, "D")})
    found = only(CHECKS["collectives"], cluster, "rank-frozen", hosts=["nd0"], ranks=[1])
    assert found.confidence.value == "certain"


def test_a_slow_driver_is_not_taken_for_a_binding_that_hangs() -> None:
    """Bound it did not start, unbound it did: the other variant says nothing of the binding."""
    cluster = make_cluster(
        check="side_group", by_rank=dict.fromkeys(range(4), GOOD), round_name="unbound",
        backend="nccl", job=Job(groups="weight-sync"),
    )  # fmt: skip
    for rank in cluster.ranks:
        late = stuck(SETTING, "D") if rank.seat == 1 else stuck(ENTERED)
        facts = {**rank.facts["side_group"], "bound": replace(late, group=0)}
        cluster = change_rank(cluster, rank.seat, facts={"side_group": facts})
    only(CHECKS["side_group"], cluster, "gpu-not-started", hosts=["nd0"], ranks=[1])
