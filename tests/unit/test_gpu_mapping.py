"""Which rank takes which GPU, on made-up clusters: shared, hidden, beyond, guessed, parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Severity
from nccl_doctor.checks.backend_device import BackendDevice
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.gpu_facts import facts, gpu

CHECK = BackendDevice()
NEW, OLD = "2.15.0+cu132", "2.13.0+cu130"


def cluster(
    changes: dict[int, Any] | None = None,
    *,
    hosts: int = 1,
    nproc: int = 4,
    gpus: int = 4,
    torch: str = OLD,
    told: bool = True,
    env: dict[str, str] | None = None,
    **healthy: Any,
) -> Cluster:
    """Every rank on its own GPU; where `told`, LOCAL_RANK is in the environment."""
    by_rank = {
        node * nproc + local: facts(node, local, gpus, torch=torch, **healthy)
        for node in range(hosts)
        for local in range(nproc)
    }
    by_rank |= changes or {}
    every = {
        number: {**({"LOCAL_RANK": str(number % nproc)} if told else {}), **(env or {})}
        for number in by_rank
    }
    names = [f"nd{node}" for node in range(hosts)]
    return make_cluster(names, nproc, check=CHECK.name, by_rank=by_rank, backend="nccl", env=every)


def visible(node: int, local: int, order: list[int], **changes: Any) -> dict[str, Any]:
    """A rank with CUDA_VISIBLE_DEVICES in some order."""
    devices = [{**gpu(node, number), "index": index} for index, number in enumerate(order)]
    text = ",".join(map(str, order))
    return facts(
        node, local, devices=devices, visible={"CUDA_VISIBLE_DEVICES": text},
        host_gpus={"nodes": 4, "proc": 4, "kfd": 0, "driver": "580.95.05"}, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("torch", [OLD, NEW])
@pytest.mark.parametrize("told", [True, False])
def test_ranks_in_order_are_fine_with_every_torch(torch: str, told: bool) -> None:
    assert judge(CHECK, cluster(torch=torch, told=told, hosts=3)) == []
    assert judge(CHECK, cluster(torch=OLD, told=told, hosts=3, gpus=8)) == []


# Orders of CUDA_VISIBLE_DEVICES -------------------------------------------------------------------


def test_two_orders_that_meet_on_one_gpu_are_named_with_it() -> None:
    made = cluster({2: visible(0, 2, [3, 1, 0, 2]), 0: visible(0, 0, [0, 1, 2, 3]),
                    1: visible(0, 1, [0, 1, 2, 3]), 3: visible(0, 3, [0, 1, 2, 3])})  # fmt: skip
    found = only(CHECK, made, "gpu-shared-by-ranks", hosts=["nd0"], ranks=[0, 2],
                 devices=["GPU-0-0"])  # fmt: skip
    assert found.level is Severity.FAIL
    assert found.evidence["visible"][1] == {"CUDA_VISIBLE_DEVICES": "3,1,0,2"}


def test_orders_that_differ_and_do_not_meet_are_a_risk_of_the_odd_ranks() -> None:
    same = [0, 1, 2, 3]
    made = cluster({**{local: visible(0, local, same) for local in range(3)},
                    3: visible(0, 3, [1, 0, 2, 3])})  # fmt: skip
    found = only(CHECK, made, "gpu-hidden", hosts=["nd0"], ranks=[3])
    assert found.level is Severity.WARN
    assert "CUDA_VISIBLE_DEVICES='1,0,2,3' (local rank 3)" in found.message
    assert found.kind.title == "Ranks of one host see the same GPUs in different orders"


# LOCAL_RANK beyond the count ----------------------------------------------------------------------


def test_a_local_rank_beyond_the_visible_gpus_is_named() -> None:
    lonely = change_rank(cluster(nproc=1, gpus=2), 0, local_rank=5, env={"LOCAL_RANK": "5"})
    found = only(CHECK, lonely, "local-rank-beyond-gpus", hosts=["nd0"], ranks=[0])
    assert found.message == "LOCAL_RANK 5, but 2 visible GPUs, numbered 0 to 1"
    assert found.level is Severity.WARN


def test_a_gpu_for_each_rank_by_a_variable_makes_local_rank_fail() -> None:
    own = {local: visible(0, local, [local]) for local in range(4)}
    found = judge(CHECK, cluster(own))
    assert [(one.code, one.where.ranks, one.explained_by) for one in found] == [
        ("gpu-hidden", (0, 1, 2, 3), None),
        ("local-rank-beyond-gpus", (1, 2, 3), None),
    ]
    assert [one.level for one in found] == [Severity.INFO, Severity.WARN]
    assert found[1].message == "LOCAL_RANK 1–3, but 1 visible GPU, numbered 0 to 0"
    # Without LOCAL_RANK in the environment, no script can trip over it.
    assert [one.code for one in judge(CHECK, cluster(own, told=False))] == ["gpu-hidden"]


def in_a_cgroup(local: int, **changes: Any) -> dict[str, Any]:
    """A rank of which Slurm hides all GPUs but one: it is number 0, as on all the others."""
    device = {**gpu(0, local), "index": 0}
    return facts(0, local, devices=[device], visible={"CUDA_VISIBLE_DEVICES": "0"}, **changes)


def test_gpus_that_a_control_group_hides_are_seen_by_their_uuids() -> None:
    made = cluster({local: in_a_cgroup(local) for local in range(4)}, told=False)
    found = only(CHECK, made, "gpu-hidden", hosts=["nd0"], ranks=[0, 1, 2, 3])
    assert found.level is Severity.WARN
    assert "(CUDA_VISIBLE_DEVICES='0'): a control group hides the other GPUs" in found.message
    assert found.kind.title == "A control group hides GPUs from ranks"
    assert found.evidence["seen"][3] == "GPU-0-3 (local rank 3)"
    assert "--gpu-bind=none" in found.fix


def test_gpus_without_uuids_say_nothing_of_control_groups() -> None:
    old = {}
    for local in range(4):
        devices = [{**gpu(0, index), "uuid": None} for index in range(4)]
        old[local] = facts(0, local, devices=devices)
    assert judge(CHECK, cluster(old, told=False)) == []


# What torch chooses by itself ---------------------------------------------------------------------


def cyclic(torch: str, *, told: bool = False, env: dict[str, str] | None = None) -> Cluster:
    """Two hosts with two ranks each, dealt out in turn: ranks 0 and 2, ranks 1 and 3."""
    made = cluster(hosts=2, nproc=2, gpus=2, torch=torch, told=told, env=env)
    for seat, number in enumerate((0, 2, 1, 3)):
        made = change_rank(made, seat, rank=number)
    return made


def test_new_torch_without_local_rank_puts_two_ranks_on_one_gpu() -> None:
    found = judge(CHECK, cyclic(NEW))
    assert [(one.code, one.level, one.where.hosts, one.where.ranks) for one in found] == [
        ("gpu-shared-by-ranks", Severity.FAIL, ("nd0",), (0, 2)),
        ("gpu-shared-by-ranks", Severity.FAIL, ("nd1",), (1, 3)),
    ]
    assert [one.where.devices for one in found] == [("GPU-0-0",), ("GPU-1-1",)]
    assert found[0].message.startswith("torch 2.15.0 takes GPU RANK modulo the number of GPUs")
    assert "SLURM_LOCALID" in found[0].fix


def test_with_local_rank_or_the_older_backend_it_does_not() -> None:
    assert judge(CHECK, cyclic(NEW, told=True)) == []
    off = judge(CHECK, cyclic(NEW, env={"TORCH_DIST_USE_NCCL2": "0"}))
    assert {(one.code, one.level) for one in off} == {("gpu-guess-differs", Severity.INFO)}
    on = judge(CHECK, cyclic("2.14.1+cu132", env={"TORCH_DIST_USE_NCCL2": "1"}))
    assert {(one.code, one.level) for one in on} == {("gpu-shared-by-ranks", Severity.FAIL)}


def test_older_torch_guesses_in_a_barrier_that_comes_too_early() -> None:
    found = judge(CHECK, cyclic(OLD))
    assert [(one.code, one.level, one.where.ranks) for one in found] == [
        ("gpu-guess-differs", Severity.INFO, (2,)),
        ("gpu-guess-differs", Severity.INFO, (1,)),
    ]
    assert found[0].message == "a barrier() before it would take: rank 2 GPU 0, its own is 1"


def test_new_torch_without_local_rank_takes_another_gpu_that_is_free() -> None:
    made = cluster(hosts=2, nproc=2, gpus=4, torch=NEW, told=False)
    found = only(CHECK, made, "gpu-guess-differs", hosts=["nd1"], ranks=[2, 3])
    assert found.level is Severity.WARN
    assert found.message == (
        "init_process_group binds to: rank 2 GPU 2, its own is 0; rank 3 GPU 3, its own is 1"
    )


# Parts of one GPU ---------------------------------------------------------------------------------


def parts(nccl: str, *, addresses: tuple[str, str] = ("0000:1b:00.0", "0000:1b:00.0")) -> Cluster:
    """Two ranks of one host, each sees one MIG instance."""
    seen = {
        local: facts(0, local, nccl=nccl, devices=[{**gpu(0, 0), "uuid": f"MIG-{local}"}],
                     visible={"CUDA_VISIBLE_DEVICES": f"MIG-{local}"},
                     host_gpus={"nodes": 2, "proc": 2, "kfd": 0, "driver": "580.95.05"})
        for local in range(2)
    }  # fmt: skip
    made = cluster(seen, nproc=2, told=False)
    for seat, address in enumerate(addresses):
        place = {"gpu_affinity": {"alone": outcome({"uuid": None, "address": address})}}
        made = change_rank(made, seat, facts={**made.ranks[seat].facts, **place})
    return made


def test_parts_of_one_gpu_are_one_gpu_to_older_nccl() -> None:
    found = [one for one in judge(CHECK, parts("2.28.9")) if one.code == "gpu-shared-by-ranks"]
    assert [(one.level, one.where.ranks, one.where.devices) for one in found] == [
        (Severity.FAIL, (0, 1), ("MIG-0", "MIG-1"))
    ]
    assert "parts (MIG instances) of the GPU at 0000:1b:00.0; NCCL 2.28.9" in found[0].message


def test_the_nccl_that_is_loaded_counts() -> None:
    for loaded, built in (("2.28.9", "2.30.7"), ("2.30.7", "2.28.9")):
        made = parts(built)
        library = outcome({"built": built, "loaded": {"version": loaded}})
        for rank in made.ranks:
            facts = {**rank.facts, "nccl_library": {"alone": library}}
            made = change_rank(made, rank.seat, facts=facts)
        shared = [one for one in judge(CHECK, made) if one.code == "gpu-shared-by-ranks"]
        assert len(shared) == (loaded == "2.28.9")
        assert all("NCCL 2.28.9 takes them for the same GPU" in one.message for one in shared)


@pytest.mark.parametrize(
    "made", [parts("2.30.7"), parts("2.28.9", addresses=("0000:1b:00.0", "0000:1c:00.0"))]
)
def test_newer_nccl_and_other_gpus_are_fine(made: Cluster) -> None:
    assert {one.code for one in judge(CHECK, made)} == {"gpu-hidden"}


def test_nothing_is_said_where_gloo_is_the_backend() -> None:
    made = replace(cyclic(NEW), backend="gloo")
    assert {one.code for one in judge(CHECK, made)} == {"backend-device-mismatch"}
