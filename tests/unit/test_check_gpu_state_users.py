"""Who uses a GPU: what is said of our own processes, of a neighbour's GPU, and of MIG instances."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Finding, Level, Outcome, Severity
from nccl_doctor.checks.gpu_state import GpuState
from nccl_doctor.model.cluster import OutcomeStatus
from tests.support.clusters import outcome
from tests.support.findings import judge, only
from tests.support.gpu_facts import facts as seen_by_torch
from tests.support.gpu_facts import worked
from tests.support.gpu_states import GIB, cluster_of, gpu, state, torch_sees, with_backend

CHECK = GpuState()


def also(cluster: Cluster, check: str, by_rank: dict[int, Any]) -> Cluster:
    """What another check observed at some ranks, beside what is known of them already."""
    return replace(
        cluster,
        ranks=tuple(
            replace(rank, facts={**rank.facts, check: {ALONE: outcome(by_rank[rank.seat])}})
            if rank.seat in by_rank
            else rank
            for rank in cluster.ranks
        ),
    )


def with_gpus(node: int = 0, /, **changed: dict[str, Any]) -> dict[str, Any]:
    """A host of eight; `g3={...}` changes GPU 3."""
    return state(node, [gpu(node, index, **changed.get(f"g{index}", {})) for index in range(8)])


def on_it(pid: int, name: str | None) -> dict[str, Any]:
    return {"processes": [{"pid": pid, "bytes": 3 * GIB, "name": name}]}


# Our own processes --------------------------------------------------------------------------------


def test_a_process_of_ours_that_has_ended_since_is_not_blamed() -> None:
    made = with_gpus(g3=on_it(4711, "ncd:gpu_work"))  # and nobody in `own`: it is gone
    assert judge(CHECK, cluster_of(made)) == []


def test_a_process_that_nobody_can_name_is_only_possibly_a_stranger() -> None:
    found = only(CHECK, cluster_of(with_gpus(g3=on_it(4711, None))), "gpu-busy", hosts=["nd0"],
                 devices=["GPU-0-3"])  # fmt: skip
    assert found.confidence is Confidence.POSSIBLE
    assert "4711" not in found.fix
    named = only(CHECK, cluster_of(with_gpus(g3=on_it(43, "python"))), "gpu-busy", hosts=["nd0"],
                 devices=["GPU-0-3"])  # fmt: skip
    assert named.confidence is Confidence.CERTAIN
    assert [step.command for step in named.fix.steps] == [
        "ps -o user,pid,lstart,args -p 43",
        "kill 43",
    ]


# GPUs of others -----------------------------------------------------------------------------------


def on_shared_host(host: dict[str, Any]) -> Cluster:
    """Four ranks on GPUs 0 to 3 of eight."""
    seen = {rank: seen_by_torch(0, rank, gpus=4) for rank in range(4)}
    return with_backend(cluster_of(host, nproc=4), seen)


@pytest.mark.parametrize(
    ("sick", "code"),
    [
        (on_it(43, "python"), "gpu-busy"),
        ({"ecc_uncorrected": 4, "retired_pages_pending": 1}, "gpu-unhealthy"),
        ({"throttle": 0x40}, "gpu-throttled"),
        ({"recovery_action": "GPU_RESET"}, "gpu-unhealthy"),
        ({"mig": [1, 1]}, "gpu-differs"),
    ],
)
def test_a_gpu_of_a_neighbour_is_only_worth_knowing(sick: dict[str, Any], code: str) -> None:
    theirs = only(CHECK, on_shared_host(with_gpus(g6=sick)), code, hosts=["nd0"],
                  devices=["GPU-0-6"])  # fmt: skip
    assert theirs.level is Severity.INFO
    assert "no rank uses" in theirs.message
    assert "kill" not in theirs.fix
    assert "reset" not in theirs.fix
    ours = only(CHECK, on_shared_host(with_gpus(g2=sick)), code, hosts=["nd0"], ranks=[2],
                devices=["GPU-0-2"])  # fmt: skip
    assert ours.level is not Severity.INFO
    assert "no rank uses" not in ours.message


def test_the_same_on_ours_and_on_a_neighbours_gpu_is_told_apart() -> None:
    sick = {"ecc_uncorrected": 4}
    found = judge(CHECK, on_shared_host(with_gpus(g1=sick, g7=sick)))
    assert [(one.level, one.where.devices, one.where.ranks) for one in found] == [
        (Severity.WARN, ("GPU-0-1",), (1,)),
        (Severity.INFO, ("GPU-0-7",), ()),
    ]


def test_a_lost_gpu_counts_whoever_would_have_used_it() -> None:
    stuck = {"call": "nvmlDeviceGetName", "how": "did not return within 9 s", "state": "D"}
    host = with_gpus()
    host["gpus"][6] = {"index": 6, "uuid": "GPU-0-6", "lost": False, "refused": {}, "wedged": stuck}
    found = only(CHECK, on_shared_host(host), "gpu-lost", hosts=["nd0"], devices=["GPU-0-6"])
    assert found.level is Severity.FAIL
    host["gpus"][6] = {"index": 6, "lost": False, "refused": {"UNKNOWN": ["handle"]}}
    found = only(CHECK, on_shared_host(host), "gpu-unhealthy", hosts=["nd0"], devices=["GPU 6"])
    assert found.level is Severity.FAIL


def test_where_a_rank_did_not_say_its_gpu_every_gpu_may_be_ours() -> None:
    made = on_shared_host(with_gpus(g6=on_it(43, "python")))
    for without in (
        replace(made, ranks=tuple(replace(r, facts={}) if r.seat == 3 else r for r in made.ranks)),
        # One that never signed in may be of this host.
        replace(made, ranks=made.ranks[:3]),
    ):
        found = only(CHECK, without, "gpu-busy", hosts=["nd0"], devices=["GPU-0-6"])
        assert found.level is Severity.WARN


def test_a_pair_of_gpus_counts_where_ranks_use_both() -> None:
    cut = {"OK": [[a, b] for a in range(8) for b in range(a + 1, 8) if (a, b) not in _CUT],
           "CHIPSET_NOT_SUPPORTED": [list(pair) for pair in _CUT]}  # fmt: skip
    host = {**with_gpus(), "p2p": cut}
    found = only(CHECK, on_shared_host(host), "gpu-p2p-unavailable", hosts=["nd0"], ranks=[1],
                 devices=["GPU-0-1", "GPU-0-6"])  # fmt: skip
    assert found.level is Severity.INFO


_CUT = [(1, 6)]


# MIG ----------------------------------------------------------------------------------------------


def with_instances(**changed: Any) -> Cluster:
    """One rank on an instance of GPU 2; torch knows it by a UUID that NVML does not list."""
    one = {"index": 0, "name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "uuid": "GPU-of-an-instance",
           "memory_bytes": 40 << 30, "capability": [9, 0], "arch": None}  # fmt: skip
    gpus = {f"g{index}": {"mig": [1, 1], **changed.get(f"g{index}", {})} for index in range(8)}
    made = cluster_of(with_gpus(**gpus), nproc=1)
    made = with_backend(made, {0: seen_by_torch(0, 0, devices=[one])})
    return also(made, "gpu_affinity", {0: {"uuid": one["uuid"], "address": "0000:1a:00.0"}})


def test_tenants_of_other_instances_are_not_blamed() -> None:
    made = with_instances(g2=on_it(4711, "python"), g5=on_it(4712, None))
    assert judge(CHECK, made) == []


def test_the_rank_of_an_instance_is_known_by_the_address_of_its_gpu() -> None:
    made = with_instances(g2={"recovery_action": "GPU_RESET"}, g5={"recovery_action": "GPU_RESET"})
    found = judge(CHECK, made)
    assert [(one.level, one.where.devices, one.where.ranks) for one in found] == [
        (Severity.FAIL, ("GPU-0-2",), (0,)),
        (Severity.INFO, ("GPU-0-5",), ()),
    ]


# By no process ------------------------------------------------------------------------------------


def with_work(used_gib: float, total_gib: int, level: Level, ended: Any = None) -> list[Finding]:
    """Processes are not listed; the rank's own GPU is full to so much while `gpu_work` runs."""
    memory = {"total": total_gib * GIB, "used": int(used_gib * GIB)}
    made = cluster_of(state(0, [gpu(0, 0, memory=memory)]), nproc=1, level=level)
    made = with_backend(made, {0: seen_by_torch(0, 0, gpus=1)})
    if ended is not None:
        made = also(made, "gpu_work", {0: ended})
    return judge(CHECK, made)


def test_what_our_own_work_holds_is_nobody_elses() -> None:
    ours = worked(0)
    assert with_work(3.6, 24, Level.FULL, ours) == []
    assert with_work(3.6, 40, Level.FULL, ours) == []
    assert with_work(1.5, 24, Level.STANDARD, ours) == []
    # It ran all the same, and held as much.
    hung = Outcome(OutcomeStatus.HUNG, breadcrumbs=({"step": "measuring the GPU", "at_s": 9.0},))
    assert with_work(3.6, 24, Level.FULL, hung) == []


def test_what_is_more_than_our_own_work_holds_is_said() -> None:
    for level in (Level.STANDARD, Level.FULL):
        (found,) = with_work(18, 24, level, worked(0))
        assert (found.code, found.level) == ("gpu-busy", Severity.WARN)
        assert "18 of 24 GiB in use, but no process" in found.message
    skipped = Outcome(OutcomeStatus.SKIPPED, reason="the backend is gloo")
    for ended in (None, skipped):
        (found,) = with_work(3.6, 24, Level.FULL, ended)
        assert found.code == "gpu-busy"


def test_healthy_hosts_stay_fine_with_all_that_is_known_of_users() -> None:
    made = with_backend(cluster_of(with_gpus(), with_gpus(1)), torch_sees(2))
    assert judge(CHECK, also(made, "gpu_work", {rank: worked(rank) for rank in range(16)})) == []
    assert judge(CHECK, on_shared_host(with_gpus())) == []
