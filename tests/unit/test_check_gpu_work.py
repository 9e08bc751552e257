"""Work of GPUs on made-up clusters: who hangs, who computes wrongly, who is slow."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    Cluster,
    Confidence,
    Context,
    Launch,
    Level,
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
    Untested,
)
from nccl_doctor.checks.gpu_work import DRIVER, GpuWork, _neighbour, _work
from nccl_doctor.checks.gpu_work.work import GPU_STEPS, DeviceWork
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.gpu_facts import H200, cluster, measured, worked

pytestmark = pytest.mark.xdist_group("torch")

CHECK = GpuWork()
MULTIPLY = "multiplying matrices on the GPU"


def stuck(step: str = MULTIPLY, uuid: str | None = "GPU-2", **changes: Any) -> Outcome:
    crumb = {"step": step, "at_s": 1.0} | ({"uuid": uuid} if uuid else {})
    ended = Outcome(
        OutcomeStatus.HUNG,
        breadcrumbs=({"step": "importing torch", "at_s": 0.0}, crumb),
        duration_s=45.0,
        state="D",
        wchan="nv_wait",
    )
    return replace(ended, **changes)


def test_gpus_that_work_are_fine() -> None:
    assert judge(CHECK, cluster({})) == []
    assert judge(CHECK, measured({})) == []


# What does not work -------------------------------------------------------------------------------


@pytest.mark.parametrize("step", GPU_STEPS)
def test_a_wedged_gpu_is_named_with_its_step(step: str) -> None:
    found = only(
        CHECK,
        cluster({2: stuck(step)}),
        "gpu-unhealthy",
        hosts=["nd0"],
        ranks=[2],
        devices=["GPU-2"],
    )
    assert f"stuck in {step}: no end within 45 s" in found.message
    assert "process state D, kernel wait nv_wait" in found.message
    assert found.level is Severity.FAIL


def test_a_process_that_dies_in_a_gpus_step_is_named() -> None:
    died = stuck(status=OutcomeStatus.DIED, signal="SIGSEGV", state="", wchan="")
    found = only(
        CHECK,
        cluster({2: died}),
        "gpu-unhealthy",
        hosts=["nd0"],
        ranks=[2],
        devices=["GPU-2"],
    )
    assert "died by SIGSEGV in multiplying" in found.message


@pytest.mark.parametrize(
    "ended",
    [
        stuck("importing torch", None),
        stuck(state="T"),
        stuck(status=OutcomeStatus.DIED, signal="SIGKILL", state=""),
        Outcome(OutcomeStatus.RAISED, reason="Traceback: ValueError"),
        Outcome(OutcomeStatus.SILENT),
        Outcome(OutcomeStatus.UNTESTED, reason="the GPU's memory is taken"),
        Outcome(OutcomeStatus.HUNG),
    ],
)
def test_what_is_not_the_gpus_doing_is_not_blamed_on_it(ended: Outcome) -> None:
    assert judge(CHECK, cluster({2: ended})) == []


def test_a_driver_that_does_not_start_is_said_once() -> None:
    hung = stuck(DRIVER, None)
    made = cluster({2: hung})
    only(CHECK, made, "gpu-unhealthy", hosts=["nd0"], ranks=[2])
    other = {"backend_device": {ALONE: hung}}
    facts = {**made.ranks[2].facts, **other}
    assert judge(CHECK, change_rank(made, 2, facts=facts)) == []


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "ECC cannot repair"),
        ("CUDA error: unspecified launch failure", "works on other GPUs"),
        ("CUDA error: gremlins", "gremlins"),
    ],
)
def test_an_error_has_a_meaning_and_a_fix(text: str, means: str) -> None:
    failed = worked(5, error={"step": MULTIPLY, "text": text})
    found = only(
        CHECK, cluster({5: failed}), "gpu-unhealthy", hosts=["nd1"], ranks=[5], devices=["GPU-5"]
    )
    assert text in found.message
    assert means in found.message
    assert (found.fix or found.kind.fix).strip()


def test_a_wrong_product_is_a_failure() -> None:
    bad = {"what": "product in bfloat16", "count": 3, "of": 16, "example": "element (0, 1) is 3"}
    found = only(
        CHECK,
        cluster({7: worked(7, wrong=[bad])}),
        "gpu-unhealthy",
        hosts=["nd1"],
        ranks=[7],
        devices=["GPU-7"],
    )
    assert found.level is Severity.FAIL
    assert found.confidence is Confidence.CERTAIN
    assert found.message == "wrong product in bfloat16: 3 of 16 elements, element (0, 1) is 3"


# Between GPUs -------------------------------------------------------------------------------------

PEER = "copying to another GPU"


def at_peer(rank: int, peer: int, **changes: Any) -> Outcome:
    crumb = {"step": PEER, "at_s": 1.0, "uuid": f"GPU-{rank}", "peer": f"GPU-{peer}"}
    return stuck(breadcrumbs=(crumb,), **changes)


def to_peer(rank: int, peer: int, **changes: Any) -> dict[str, Any]:
    return worked(rank, peer={"uuid": f"GPU-{peer}", "wrong": [], "error": None, **changes})


def test_copies_that_arrive_are_fine() -> None:
    assert judge(CHECK, cluster({rank: to_peer(rank, (rank + 1) % 4) for rank in range(4)})) == []


def test_a_copy_that_never_arrives_names_both_gpus_and_no_third() -> None:
    found = only(CHECK, cluster({1: at_peer(1, 2)}), "gpu-p2p-broken", hosts=["nd0"], ranks=[1],
                 devices=["GPU-1", "GPU-2"])  # fmt: skip
    assert found.level is Severity.FAIL
    assert found.message == "copy from GPU-1 to GPU-2: no end within 45 s"
    assert "NCCL_P2P_DISABLE=1" in found.kind.fix


def test_a_copy_that_arrives_changed_is_certain() -> None:
    wrong = {"what": "copy to another GPU", "count": 7, "of": 16, "example": "element (0) is 3"}
    found = only(CHECK, cluster({6: to_peer(6, 7, wrong=[wrong])}), "gpu-p2p-broken",
                 hosts=["nd1"], ranks=[6], devices=["GPU-6", "GPU-7"])  # fmt: skip
    assert found.message == "copy from GPU-6 to GPU-7: 7 of 16 numbers changed, element (0) is 3"
    assert found.confidence is Confidence.CERTAIN


@pytest.mark.parametrize(
    ("iommu", "acs", "said"),
    [
        ("identity", 0, ""),
        ("DMA-FQ", 0, "; the IOMMU translates for 1 GPUs and NICs"),
        ("identity", 0x1D, "; ACS is on for 1 PCIe bridges"),
        ("identity", None, "; ACS of 1 PCIe bridges was not read: it needs root"),
    ],
)
@pytest.mark.parametrize("fault", [at_peer(1, 2), to_peer(1, 2, error="no end within 45 s")])
def test_what_stands_between_them_is_said_beside_it(
    fault: Any, iommu: str, acs: int | None, said: str
) -> None:
    made = cluster({1: fault})
    direct = {"iommu": {"0000:18:00.0": iommu}, "acs": {"0000:17:01.0": acs}}
    hosts = tuple(
        replace(host, facts={"gpu_direct": {ALONE: outcome(direct)}}) for host in made.hosts
    )
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    found = only(CHECK, replace(made, hosts=hosts, ranks=ranks), "gpu-p2p-broken", hosts=["nd0"],
                 ranks=[1], devices=["GPU-1", "GPU-2"])  # fmt: skip
    assert found.message == f"copy from GPU-1 to GPU-2: no end within 45 s{said}"


def test_an_error_between_two_gpus_is_told() -> None:
    text = "CUDA error: peer access is not supported between these two devices"
    found = only(CHECK, cluster({1: to_peer(1, 2, error=text)}), "gpu-p2p-broken", hosts=["nd0"],
                 ranks=[1], devices=["GPU-1", "GPU-2"])  # fmt: skip
    assert text in found.message


@pytest.mark.parametrize(
    "peer",
    [stuck(), worked(2, error={"step": MULTIPLY, "text": "CUDA error: gremlins"})],
)
def test_a_peer_that_is_sick_itself_is_the_one_that_is_named(peer: Any) -> None:
    found = judge(CHECK, cluster({1: at_peer(1, 2), 2: peer}))
    assert [(one.code, one.where.ranks) for one in found] == [("gpu-unhealthy", (2,))]


def test_a_peer_that_the_driver_lost_is_not_said_twice() -> None:
    made = cluster({1: at_peer(1, 2)})
    gone = {"gpus": [{"index": 2, "uuid": "GPU-2", "lost": True}]}
    hosts = tuple(replace(host, facts={"gpu_state": {ALONE: outcome(gone)}}) for host in made.hosts)
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    assert judge(CHECK, replace(made, hosts=hosts, ranks=ranks)) == []


@pytest.mark.parametrize("ended", [{"state": "T"}, {"status": OutcomeStatus.DIED,
                                                    "signal": "SIGKILL", "state": ""}])  # fmt: skip
def test_a_process_that_somebody_stopped_says_nothing_of_gpus(ended: dict[str, Any]) -> None:
    assert judge(CHECK, cluster({1: at_peer(1, 2, **ended)})) == []


def seeing(made: Cluster, count: int) -> Cluster:
    """All ranks see so many GPUs, by check backend_device."""
    facts = {"backend_device": {ALONE: outcome({"devices": [{}] * count})}}
    ranks = tuple(replace(rank, facts={**rank.facts, **facts}) for rank in made.ranks)
    return replace(made, ranks=ranks)


def test_ranks_that_see_no_other_gpu_are_told_that_nothing_was_copied() -> None:
    made = seeing(cluster({}, hosts=1), 1)
    for found in judge(CHECK, made):
        assert (found.code, found.level) == ("gpu-p2p-untested", Severity.INFO)
    assert [found.where.ranks for found in judge(CHECK, made)] == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    "made",
    [
        seeing(cluster({}), 4),
        seeing(cluster({rank: worked(rank, uuid=f"MIG-{rank}") for rank in range(8)}), 1),
        seeing(
            make_cluster(
                ["nd0", "nd1"],
                1,
                check=CHECK.name,
                by_rank={rank: worked(rank) for rank in range(2)},
                backend="nccl",
            ),
            1,
        ),
    ],
)
def test_where_nothing_could_be_copied_no_word_is_lost(made: Cluster) -> None:
    assert judge(CHECK, made) == []


def test_where_nccl_does_not_copy_between_gpus_no_word_is_lost() -> None:
    made = seeing(cluster({}, hosts=1), 1)
    for seat in range(4):
        made = change_rank(made, seat, env={"NCCL_P2P_DISABLE": "1"})
    assert judge(CHECK, made) == []


# Observing ----------------------------------------------------------------------------------------


def gpu(index: int, mode: int | None = 0) -> dict[str, Any]:
    return {"index": index, "uuid": f"GPU-{index}", "name": H200, "compute_mode": mode}


def test_a_gpu_that_lets_one_process_in_is_left_to_its_own_rank() -> None:
    launch = Launch(rank=0, local_rank=0, world_size=2, local_world_size=2)
    ctx = Context(launch=launch, env={}, backend="nccl")
    assert _neighbour(ctx, [gpu(0), gpu(1)], gpu(0)) == gpu(1)
    assert _neighbour(ctx, [gpu(0), gpu(1, None)], gpu(0)) == gpu(1, None)
    assert _neighbour(ctx, [gpu(0), gpu(1, 3)], gpu(0)) is None


def test_a_speed_that_was_asked_for_and_not_measured_is_no_pass() -> None:
    """The real work on the CPU, where 4 s are left."""
    import torch

    launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)
    until = time.monotonic() + 4
    ctx = Context(launch=launch, env={}, backend="nccl", level=Level.FULL, deadline=until)
    with pytest.raises(Untested, match=r"speed of the GPU was not measured: only . s were left"):
        _work(ctx, gpu(0), None, DeviceWork(lambda *_, **__: None, torch.device("cpu")))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_without_a_gpu_it_is_skipped(backend: str) -> None:
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is built for GPUs")
    launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)
    with pytest.raises(Skip, match="gloo" if backend == "gloo" else "built without CUDA"):
        CHECK.observe(Context(launch=launch, env={}, backend=backend))
