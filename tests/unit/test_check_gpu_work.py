"""Work of GPUs on made-up clusters: who hangs, who computes wrongly, who is slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    GPU_STEPS,
    Cluster,
    Confidence,
    Context,
    Launch,
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
)
from nccl_doctor.checks.gpu_work import DRIVER, GpuWork
from nccl_doctor.report.tables import is_table
from nccl_doctor.tools.machine.gpurates import rates_table
from tests.clusters import change_rank, make_cluster, outcome
from tests.findings import judge, only
from tests.gpu_facts import H200, worked

CHECK = GpuWork()
MULTIPLY = "multiplying matrices on the GPU"


def rates(
    half: float = 700, copy: float = 4300, to_device: float = 54, to_host: float = 55
) -> dict[str, float]:
    """A healthy H200: TFLOP/s, then GB/s."""
    across = {"to_device": to_device * 1e9, "to_host": to_host * 1e9}
    return {"half": half * 1e12, "copy": copy * 1e9, **across}


def cluster(by_rank: dict[int, Any], hosts: int = 2) -> Cluster:
    """Four ranks per host; who is not said works well, and was not measured."""
    full = {rank: by_rank.get(rank, worked(rank)) for rank in range(4 * hosts)}
    names = [f"nd{i}" for i in range(hosts)]
    return make_cluster(names, 4, check=CHECK.name, by_rank=full, backend="nccl")


def measured(odd: dict[int, Any], hosts: int = 2, **usual: float) -> Cluster:
    """All GPUs within 2 % of each other, but for the odd ones."""
    usual = {"half": 700, "copy": 4300, **usual}
    made = {}
    for rank in range(4 * hosts):
        one = rates(**{key: value * (1 + 0.005 * (rank % 4)) for key, value in usual.items()})
        made[rank] = odd.get(rank, worked(rank, one, one))
    return cluster(made, hosts)


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
    assert f"wedged in {step}: no end within 45 s" in found.message
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
    other = {"backend_device": {ALONE: hung.to_json()}}
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


# Who is slow --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ({"half": 400}, "bf16 matrix product 400 TFLOP/s, the median of 8 equal GPUs is 703"),
        ({"copy": 3000}, "copy within the GPU 3000 GB/s"),
        ({"to_device": 13}, "copy to the GPU 13 GB/s"),
        ({"to_host": 6}, "copy to the host 6 GB/s"),
    ],
)
def test_a_slow_gpu_stands_out(slow: dict[str, float], words: str) -> None:
    one = rates(**slow)
    found = only(
        CHECK,
        measured({6: worked(6, one, one)}),
        "gpu-slow",
        hosts=["nd1"],
        ranks=[6],
        devices=["GPU-6"],
    )
    assert words in found.message
    assert found.level is Severity.WARN


def test_slow_once_is_not_slow() -> None:
    assert judge(CHECK, measured({6: worked(6, rates(half=300), rates())})) == []
    assert judge(CHECK, measured({6: worked(6, rates(), rates(half=300))})) == []


def test_a_little_slower_is_not_worth_a_word() -> None:
    one = rates(half=600, to_host=30)
    assert judge(CHECK, measured({6: worked(6, one, one)})) == []


def test_a_slow_host_is_all_its_gpus() -> None:
    slow = rates(half=450)
    made = measured({rank: worked(rank, slow, slow) for rank in range(8, 12)}, hosts=3)
    found = judge(CHECK, made)
    assert [one.where.ranks for one in found] == [(8,), (9,), (10,), (11,)]
    assert {one.code for one in found} == {"gpu-slow"}


def test_a_slow_gpu_stands_out_on_its_host_where_hosts_differ() -> None:
    """Two halves of a cluster are unlike; within its half, one GPU is slow."""
    made: dict[int, Any] = {}
    for rank in range(16):
        one = rates(half=(800 if rank < 8 else 500) * (1 + 0.004 * (rank % 4)))
        made[rank] = worked(rank, one, one)
    one = rates(half=560)
    made[1] = worked(1, one, one)
    found = only(CHECK, cluster(made, 4), "gpu-slow", hosts=["nd0"], ranks=[1], devices=["GPU-1"])
    assert "the median of 4 equal GPUs of the host is 80" in found.message


def test_gpus_of_another_model_are_not_compared() -> None:
    one = rates(half=120, copy=1300)
    assert judge(CHECK, measured({6: worked(6, one, one, model="NVIDIA A30")})) == []


def test_ranks_that_share_a_gpu_are_not_compared() -> None:
    one = rates(half=350, copy=2000)
    shared = {rank: worked(rank, one, one, uuid="GPU-x") for rank in (5, 6)}
    assert judge(CHECK, measured(shared)) == []


def test_two_gpus_are_held_against_what_is_published() -> None:
    one, bad = rates(), rates(half=200)
    made = {0: worked(0, one, one), 1: worked(1, bad, bad)}
    found = only(CHECK, cluster(made), "gpu-slow", hosts=["nd0"], ranks=[1], devices=["GPU-1"])
    assert "bf16 matrix product of NVIDIA H200 at most 200 TFLOP/s" in found.message
    assert "publishes 989 TFLOP/s" in found.message


def test_all_slow_together_is_one_finding() -> None:
    found = only(
        CHECK,
        measured({}, copy=2000),
        "gpu-slow",
        hosts=["nd0", "nd1"],
        ranks=range(8),
        devices=[f"GPU-{rank}" for rank in range(8)],
    )
    assert "copy within the GPU" in found.message


def test_a_model_nobody_knows_is_held_against_nothing() -> None:
    one = rates(half=1, copy=1)
    made = {rank: worked(rank, one, one, model="Toy") for rank in range(8)}
    assert judge(CHECK, cluster(made)) == []


def test_the_rates_are_a_table() -> None:
    table = rates_table(H200, [rates(half=700), rates(half=710)])
    assert is_table(table)
    first = table["rows"][0]
    assert first == ["bf16 matrix product", "TFLOP/s", 700.0, 710.0, 989.0, "72 %"]
    assert [row[-1] for row in rates_table("Toy", [rates(), rates()])["rows"]] == [None] * 4


# Observing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_without_a_gpu_it_is_skipped(backend: str) -> None:
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is built for GPUs")
    launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)
    with pytest.raises(Skip, match="gloo" if backend == "gloo" else "built without CUDA"):
        CHECK.observe(Context(launch=launch, env={}, backend=backend))
