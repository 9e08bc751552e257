"""Backend, builds and GPUs, on made-up clusters and on this machine."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    Cluster,
    Context,
    Finding,
    Kind,
    Launch,
    Outcome,
    OutcomeStatus,
    Severity,
)
from nccl_doctor.report.profiles import drains
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.gpu_facts import H100, cpu_facts, facts, gpu
from tests.support.rows import each_row

pytestmark = pytest.mark.xdist_group("torch")

module = importlib.import_module("nccl_doctor.checks.backend_device")
check = module.BackendDevice()


def cluster_of(
    by_rank: Mapping[int, Any] | None = None,
    *,
    hosts: int = 2,
    nproc: int = 8,
    backend: str = "nccl",
    healthy: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Cluster:
    """`hosts` x `nproc` healthy ranks, but for the facts in `by_rank`; through JSON and back."""
    every: dict[int, Any] = {
        node * nproc + local: facts(node, local, **(healthy or {}))
        for node in range(hosts)
        for local in range(nproc)
    }
    every |= by_rank or {}
    plain = {
        rank: value if isinstance(value, Outcome) else json.loads(json.dumps(value))
        for rank, value in every.items()
    }
    return make_cluster(
        [f"nd{node}" for node in range(hosts)],
        nproc,
        check="backend_device",
        by_rank=plain,
        backend=backend,
        **fields,
    )


def judge(cluster: Cluster) -> list[Finding]:
    return list(check.judge(cluster))


def places(found: list[Finding]) -> set[tuple[str, Severity, tuple[str, ...], tuple[int, ...]]]:
    return {(f.code, f.level, f.where.hosts, f.where.ranks) for f in found}


def one_host(node: int, nproc: int, **changes: Any) -> dict[int, Any]:
    """The same change on every rank of one host."""
    return {node * nproc + local: facts(node, local, **changes) for local in range(nproc)}


def error(code: int | None, name: str, text: str) -> dict[str, Any]:
    return {"code": code, "name": name, "text": text}


def test_eight_healthy_gpus_on_each_of_two_hosts_give_no_finding() -> None:
    assert judge(cluster_of()) == []


def test_a_machine_without_gpus_is_fit_for_gloo() -> None:
    by_rank = {rank: cpu_facts() for rank in range(4)}
    assert judge(cluster_of(by_rank, nproc=2, backend="gloo")) == []


def test_a_cuda_build_on_a_machine_without_gpus_is_fit_for_gloo() -> None:
    missing = error(None, "libcuda.so.1", "cannot open shared object file")
    none = {"nodes": 0, "proc": 0, "kfd": 0, "driver": None}
    by_rank = {r: facts(0, 0, devices=[], host_gpus=none, driver_error=missing) for r in range(4)}
    assert judge(cluster_of(by_rank, nproc=2, backend="gloo")) == []


def one_gpu_each(node: int, *given: int | None) -> dict[int, Any]:
    """Ranks of one host of which each sees one GPU by CUDA_VISIBLE_DEVICES, or none."""
    return {
        node * len(given) + local: facts(
            node,
            local,
            devices=[] if own is None else [gpu(node, own)],
            host_gpus={"nodes": 8, "proc": 8, "kfd": 0, "driver": "580.95.05"},
            visible={"CUDA_VISIBLE_DEVICES": "" if own is None else str(own)},
        )
        for local, own in enumerate(given)
    }


def test_rank_per_gpu_binding_by_visible_devices_is_only_worth_knowing() -> None:
    found = judge(cluster_of(one_gpu_each(0, *range(8))))
    assert places(found) == {("gpu-hidden", Severity.INFO, ("nd0",), tuple(range(8)))}


def test_two_ranks_with_the_same_gpu_of_their_own_are_named_and_not_the_last_of_the_host() -> None:
    by_rank = one_gpu_each(0, *range(8)) | one_gpu_each(1, 0, 1, 2, 3, 3, 5, 6, 7)
    (found,) = [each for each in judge(cluster_of(by_rank)) if each.level is not Severity.INFO]
    assert (found.code, found.level) == ("gpu-shared-by-ranks", Severity.FAIL)
    assert (found.where.hosts, found.where.ranks) == (("nd1",), (11, 12))


def test_a_rank_without_a_gpu_of_its_own_is_named_once() -> None:
    by_rank = one_gpu_each(0, *range(8)) | one_gpu_each(1, 0, 1, 2, 3, 4, 5, None, 7)
    found = [each for each in judge(cluster_of(by_rank)) if each.level is not Severity.INFO]
    assert places(found) == {("gpu-hidden", Severity.FAIL, ("nd1",), (14,))}


def test_nccl_with_a_cpu_build_blames_the_ranks_with_that_build_alone() -> None:
    host = {"nodes": 8, "proc": 8, "kfd": 0, "driver": "580.95.05"}
    found = judge(cluster_of({r: cpu_facts(host_gpus=host) for r in range(8, 16)}))
    expected = {("backend-device-mismatch", Severity.FAIL, ("nd1",), (r,)) for r in range(8, 16)}
    assert places(found) == expected
    assert "CUDA build of torch 2.13.0" in found[0].fix


def test_nccl_with_a_cpu_build_on_a_machine_without_gpus_points_to_gloo() -> None:
    found = judge(cluster_of({0: cpu_facts()}, hosts=1, nproc=1))
    assert places(found) == {("backend-device-mismatch", Severity.FAIL, ("nd0",), (0,))}
    assert "gloo" in found[0].fix


def with_env(cluster: Cluster, **env: str) -> Cluster:
    for rank in cluster.ranks:
        cluster = change_rank(cluster, rank.seat, env=env)
    return cluster


@each_row(
    ("cluster", "builds"),
    [
        # The GPUs of nd0 say that nd1 should have some.
        (cluster_of({1: cpu_facts()}, nproc=1), True),
        (with_env(cluster_of({0: cpu_facts()}, hosts=1, nproc=1), SLURM_JOB_GPUS="0,1"), True),
        (with_env(cluster_of({0: cpu_facts()}, hosts=1, nproc=1), CUDA_VISIBLE_DEVICES=""), False),
        (cluster_of({0: cpu_facts(), 1: cpu_facts()}, nproc=1), False),
    ],
)
def test_a_cpu_build_on_a_host_that_should_have_gpus_points_to_a_cuda_build(
    cluster: Cluster, builds: bool
) -> None:
    found = judge(cluster)
    assert {f.code for f in found} == {"backend-device-mismatch"}
    assert all(("CUDA build of torch" in f.fix) is builds for f in found)
    assert all(("gloo" in f.fix) is not builds for f in found)
    assert {host for f in found for host in f.where.hosts} <= {"nd0", "nd1"}


def test_a_host_without_gpus_among_others_is_not_sent_to_gloo() -> None:
    none = {"nodes": 0, "proc": 0, "kfd": 0, "driver": None}
    missing = error(None, "libcuda.so.1", "cannot open shared object file")
    changes = {"devices": [], "host_gpus": none, "driver_error": missing}
    found = judge(cluster_of(one_host(1, 1, **changes), nproc=1))
    assert {(f.code, f.where.hosts) for f in found} == {("gpu-missing", ("nd1",))}
    assert not any("gloo" in f.fix for f in found)
    (alone,) = judge(cluster_of(one_host(0, 1, **changes), hosts=1, nproc=1))
    assert "gloo" in alone.fix


def test_a_cuda_build_without_nccl() -> None:
    found = judge(cluster_of({5: facts(0, 5, nccl_built=False, nccl=None)}))
    assert places(found) == {("nccl-unavailable", Severity.FAIL, ("nd0",), (5,))}


def test_gloo_although_gpus_are_there() -> None:
    found = judge(cluster_of(hosts=1, nproc=2, backend="gloo"))
    assert places(found) == {
        ("backend-device-mismatch", Severity.WARN, ("nd0",), (rank,)) for rank in range(2)
    }
    assert len({f.message for f in found}) == 1


def test_gloo_without_gloo_in_the_build() -> None:
    found = judge(cluster_of({0: cpu_facts(gloo_built=False)}, hosts=1, nproc=1, backend="gloo"))
    assert places(found) == {("backend-device-mismatch", Severity.FAIL, ("nd0",), (0,))}


def test_one_lost_gpu_names_the_host_and_the_rank_that_is_left_without() -> None:
    lost = [gpu(1, index) for index in range(7)]
    found = judge(cluster_of(one_host(1, 8, devices=lost)))
    assert places(found) == {("gpu-missing", Severity.FAIL, ("nd1",), (15,))}
    assert found[0].message == "7 visible GPUs, 8 local ranks"


def test_more_ranks_than_gpus() -> None:
    by_rank = {rank: facts(0, rank, gpus=2) for rank in range(4)}
    found = judge(cluster_of(by_rank, hosts=1, nproc=4))
    assert places(found) == {("gpu-missing", Severity.FAIL, ("nd0",), (2, 3))}
    assert "--nproc-per-node 2" in found[0].fix


def test_no_gpu_at_all_under_nccl() -> None:
    none = {"nodes": 0, "proc": 0, "kfd": 0, "driver": None}
    missing = error(None, "libcuda.so.1", "cannot open shared object file")
    found = judge(cluster_of(one_host(1, 8, devices=[], host_gpus=none, driver_error=missing)))
    assert places(found) == {("gpu-missing", Severity.FAIL, ("nd1",), (r,)) for r in range(8, 16)}


def test_gpus_that_the_kernels_own_driver_holds_are_why_there_is_none() -> None:
    none = {"nodes": 0, "proc": 0, "kfd": 0, "driver": None, "nouveau": 2}
    missing = error(None, "libcuda.so.1", "cannot open shared object file")
    found = judge(cluster_of(one_host(1, 8, devices=[], host_gpus=none, driver_error=missing)))
    assert places(found) == {("gpu-missing", Severity.FAIL, ("nd1",), (r,)) for r in range(8, 16)}
    assert "nouveau holds 2 NVIDIA GPUs" in found[0].message
    assert "blacklist" in found[0].fix
    # With both loaded, one of them has a display.
    both = {**none, "driver": "580.95.05"}
    found = judge(cluster_of(one_host(1, 8, devices=[], host_gpus=both, driver_error=missing)))
    assert not any("nouveau" in one.message for one in found)


def test_driver_reports_no_device_although_the_kernel_shows_some() -> None:
    no_device = error(100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")
    found = judge(
        cluster_of({3: facts(0, 3, devices=[], driver_error=no_device) | {"device": None}})
    )
    assert places(found) == {("gpu-missing", Severity.FAIL, ("nd0",), (3,))}


def test_fewer_gpus_than_configured() -> None:
    few = {0: facts(0, 0, gpus=4), 1: facts(0, 1, gpus=4)}
    found = judge(cluster_of(few, nproc=2, expected={"gpus_per_host": 8}))
    assert ("gpu-missing", Severity.FAIL, ("nd0",), ()) in places(found)
    assert {f.code for f in found} == {"gpu-missing"}


def test_where_gpus_are_expected_their_absence_is_the_fault_and_not_the_backend() -> None:
    bare = {0: cpu_facts(), 1: cpu_facts()}
    found = judge(cluster_of(bare, nproc=2, expected={"gpus_per_host": 8}))
    assert {(f.code, f.where.hosts, f.explained_by) for f in found} == {
        ("gpu-missing", ("nd0",), None),
        ("backend-device-mismatch", ("nd0",), "gpu-missing"),
    }
    assert all("gloo" not in f.fix for f in found)
    (missing,) = (f for f in found if f.code == "gpu-missing")
    assert (missing.message, missing.level) == ("no GPU, expected 8 per host", Severity.FAIL)
    assert drains(missing)  # a scheduler takes such a node out of service
    of_job = judge(cluster_of({0: facts(0, 0, gpus=4), 1: facts(0, 1, gpus=4)}, nproc=8))
    assert not any(map(drains, of_job))  # not for a job that wants more than the node ever had
    assert {f.code for f in judge(cluster_of(bare, nproc=2))} == {"backend-device-mismatch"}


def test_visible_devices_hide_all_gpus() -> None:
    no_device = error(100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")
    hidden = facts(
        0, 3, devices=[], driver_error=no_device, visible={"CUDA_VISIBLE_DEVICES": ""}
    )  # fmt: skip
    found = judge(cluster_of({3: hidden}))
    assert places(found) == {("gpu-hidden", Severity.FAIL, ("nd0",), (3,))}
    assert found[0].message == "CUDA_VISIBLE_DEVICES='' hides all 8 GPUs"
    assert found[0].fix == "unset CUDA_VISIBLE_DEVICES"


def test_visible_devices_leave_too_few() -> None:
    two = [gpu(1, 0), gpu(1, 1)]
    found = judge(
        cluster_of(one_host(1, 4, devices=two, visible={"CUDA_VISIBLE_DEVICES": "0,1"}), nproc=4)
    )
    assert places(found) == {("gpu-hidden", Severity.FAIL, ("nd1",), (6, 7))}
    assert "leaves 2 of 8 GPUs; 4 local ranks" in found[0].message


def test_one_gpu_for_two_ranks_by_uuid() -> None:
    found = judge(cluster_of({3: facts(0, 3) | {"device": 2}}))
    assert places(found) == {("gpu-shared-by-ranks", Severity.FAIL, ("nd0",), (2, 3))}
    assert found[0].where.devices == ("GPU-0-2",)


def test_one_visible_device_twice_is_named_once() -> None:
    by_rank = {
        local: facts(0, local, devices=[gpu(0, seen)], visible={"CUDA_VISIBLE_DEVICES": str(seen)})
        for local, seen in enumerate([0, 0, 2, 3])
    }
    by_rank[3] |= {"devices": [gpu(0, n) for n in range(8)], "device": 3, "visible": {}}
    found = judge(cluster_of(by_rank, nproc=4))
    assert places(found) == {("gpu-shared-by-ranks", Severity.FAIL, ("nd0",), (0, 1))}


def test_a_gpu_of_two_containers_is_a_risk() -> None:
    shared = {rank: facts(0, 0, devices=[gpu(0, 0)]) for rank in range(2)}
    found = judge(cluster_of(shared, nproc=1))
    assert places(found) == {("gpu-shared-by-ranks", Severity.WARN, ("nd0", "nd1"), (0, 1))}


@pytest.mark.parametrize(
    "env",
    [
        {rank: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} for rank in range(4)},
        {rank: {"NCCL_HOSTID": f"h{rank}"} for rank in range(4)},
    ],
)
def test_sharing_that_is_meant_is_information(env: dict[int, dict[str, str]]) -> None:
    by_rank = {rank: facts(0, rank, gpus=1) for rank in range(4)}
    found = judge(cluster_of(by_rank, hosts=1, nproc=4, env=env))
    assert places(found) == {("gpu-shared-by-ranks", Severity.INFO, ("nd0",), (0, 1, 2, 3))}


def with_mps(cluster: Cluster, control: bool) -> Cluster:
    """Every rank with the facts of check `mps`."""
    daemons = [[700, 0]] if control else []
    seen = {"control": control, "daemons": daemons, "servers": [], "all_seen": True}
    for rank in cluster.ranks:
        more = {**rank.facts, "mps": {ALONE: outcome(seen)}}
        cluster = change_rank(cluster, rank.seat, facts=more)
    return cluster


MEANT = {rank: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} for rank in range(4)}


def sharing(mode: int = 0, env: Any = None) -> Cluster:
    devices = [{**gpu(0, number), "compute_mode": mode} for number in range(4)]
    by_rank = {rank: facts(0, rank, devices=devices) | {"device": 0} for rank in range(4)}
    return cluster_of(by_rank, hosts=1, nproc=4, env=env)


def test_mps_makes_no_nccl_take_several_ranks_on_one_gpu() -> None:
    found = judge(with_mps(sharing(), True))
    assert places(found) == {("gpu-shared-by-ranks", Severity.FAIL, ("nd0",), (0, 1, 2, 3))}
    assert found[0].message.endswith("; that MPS is here changes nothing for NCCL")
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in found[0].fix
    (meant,) = judge(with_mps(sharing(mode=3, env=MEANT), True))
    assert (meant.level, meant.fix[:7]) == (Severity.INFO, "nothing")


def test_sharing_in_exclusive_mode_needs_mps() -> None:
    (found,) = judge(with_mps(sharing(mode=3, env=MEANT), False))
    assert (found.code, found.level) == ("gpu-shared-by-ranks", Severity.FAIL)
    assert "Exclusive Process, and there is no MPS here" in found.message
    (unknown,) = judge(sharing(mode=3, env=MEANT))
    assert unknown.level is Severity.INFO


@pytest.mark.parametrize(
    ("code", "name", "text", "expected", "fix"),
    [
        (802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized", "fabric-manager-down",
         "nvidia-fabricmanager"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "mismatch", "driver-mismatch", "reboot"),
        (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "compat", "driver-mismatch", "compat"),
        (801, "CUDA_ERROR_NOT_SUPPORTED", "not supported", "driver-mismatch", "vGPU"),
        (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "unavailable", "gpu-unhealthy", "-c DEFAULT"),
        (34, "CUDA_ERROR_STUB_LIBRARY", "stub library", "driver-mismatch", "stubs"),
        (999, "CUDA_ERROR_UNKNOWN", "unknown error", "gpu-unhealthy", ""),
        (None, "libcuda.so.1", "no such file", "driver-mismatch", "libcuda"),
    ],
)  # fmt: skip
def test_driver_errors(code: int | None, name: str, text: str, expected: str, fix: str) -> None:
    broken = one_host(1, 8, devices=[], driver_error=error(code, name, text))
    found = judge(cluster_of(broken))
    assert places(found) == {(expected, Severity.FAIL, ("nd1",), (r,)) for r in range(8, 16)}
    assert fix in (found[0].fix or found[0].kind.fix)
    assert len({f.message for f in found}) == 1


def test_a_broken_driver_is_a_warning_for_gloo() -> None:
    broken = facts(0, 0, devices=[], driver_error=error(802, "CUDA_ERROR_SYSTEM_NOT_READY", "x"))
    found = judge(cluster_of({0: broken}, hosts=1, nproc=1, backend="gloo"))
    assert places(found) == {("fabric-manager-down", Severity.WARN, ("nd0",), (0,))}


def test_driver_older_than_the_toolkit() -> None:
    old = facts(
        1,
        0,
        devices=[],
        driver_cuda="12.4",
        driver_error=error(None, "torch.cuda.init", "The NVIDIA driver on your system is too old"),
        host_gpus={"nodes": 8, "proc": 8, "kfd": 0, "driver": "550.54.15"},
    )
    found = judge(cluster_of({8: old}))
    assert places(found) == {("driver-mismatch", Severity.FAIL, ("nd1",), (8,))}
    assert found[0].message == "driver 550.54.15 supports CUDA up to 12.4, torch needs CUDA 13.0"
    assert "580.65.06" in found[0].fix


def test_driver_whose_libcuda_is_one_of_forward_compatibility() -> None:
    """It answers for the driver: the kernel module has no share in what CUDA it supports."""
    path = "/usr/local/cuda/compat/libcuda.so.570.86.10"
    table = {"columns": ["library", "version", "path"], "rows": [["libcuda", "570.86.10", path]]}
    old = facts(
        1,
        0,
        devices=[],
        driver_cuda="12.8",
        driver_error=error(None, "torch.cuda.init", "The NVIDIA driver on your system is too old"),
        host_gpus={"nodes": 8, "proc": 8, "kfd": 0, "driver": "535.104.05"},
    )
    made = cluster_of({8: old})
    more = {"driver_libraries": {ALONE: outcome({"kernel": "535.104.05", "loaded": table})}}
    made = change_rank(made, 8, facts={**made.ranks[8].facts, **more})
    found = judge(made)
    assert places(found) == {("driver-mismatch", Severity.FAIL, ("nd1",), (8,))}
    assert found[0].message == (
        f"{path} (570.86.10; the kernel module is 535.104.05) supports CUDA up to 12.8, torch "
        "needs CUDA 13.0"
    )


def test_no_code_for_this_gpu() -> None:
    v100 = [gpu(1, n, "Tesla V100-SXM2-16GB", (7, 0)) for n in range(8)]
    found = judge(cluster_of(one_host(1, 8, devices=v100)))
    arch = [f for f in found if f.code == "arch-unsupported"]
    assert places(arch) == {
        ("arch-unsupported", Severity.FAIL, ("nd1",), (r,)) for r in range(8, 16)
    }
    assert "Tesla V100-SXM2-16GB is sm_70" in arch[0].message
    assert "sm_75 sm_80" in arch[0].message
    assert {f.code for f in found} == {"arch-unsupported", "gpu-differs"}


def test_rocm_is_compared_by_its_own_names() -> None:
    mi300 = {**gpu(0, 0, "AMD Instinct MI300X"), "arch": "gfx942"}
    rocm = {"cuda": None, "rocm": "7.1", "devices": [mi300], "arch_list": ["gfx90a", "gfx942"]}
    assert judge(cluster_of({0: facts(0, 0, **rocm)}, hosts=1, nproc=1)) == []
    found = judge(
        cluster_of({0: facts(0, 0, **{**rocm, "arch_list": ["gfx90a"]})}, hosts=1, nproc=1)
    )
    assert places(found) == {("arch-unsupported", Severity.FAIL, ("nd0",), (0,))}


def test_what_to_type_is_of_the_maker_of_the_gpus() -> None:
    on_host = {"nodes": 0, "proc": 0, "kfd": 8, "driver": None}
    amd = {"cuda": None, "rocm": "7.1", "host_gpus": on_host}
    devices = [{**gpu(1, index, "AMD Instinct MI300X"), "arch": "gfx942"} for index in range(7)]
    none = {**on_host, "kfd": 0}
    for changes, words in (
        ({"devices": devices}, "amd-smi list"),
        ({"devices": []}, "amd-smi list"),
        ({"devices": [], "host_gpus": none}, "--device /dev/kfd"),
    ):
        found = judge(cluster_of(one_host(1, 8, **{**amd, "arch_list": [], **changes}), hosts=2))
        missing = [each for each in found if each.code == "gpu-missing"]
        assert {each.where.hosts for each in missing} == {("nd1",)}
        for each in missing:
            assert words in each.fix
            assert "nvidia" not in each.fix
    lost = [gpu(1, index) for index in range(7)]
    assert "nvidia-smi -L" in judge(cluster_of(one_host(1, 8, devices=lost)))[0].fix


def test_another_model_on_one_host() -> None:
    a100 = [gpu(2, n, "NVIDIA A100-SXM4-80GB", (8, 0)) for n in range(8)]
    found = judge(cluster_of(one_host(2, 8, devices=a100), hosts=3))
    assert places(found) == {("gpu-differs", Severity.WARN, ("nd2",), ())}
    assert found[0].message == f"8 x NVIDIA A100-SXM4-80GB; the others have 8 x {H100}"


def crumbs(step: str) -> tuple[dict[str, Any], ...]:
    return ({"step": step, "at_s": 0.1, "call": "cuInit", "gpus": 8},)


@pytest.mark.parametrize(
    "ended",
    [
        Outcome(OutcomeStatus.HUNG, breadcrumbs=crumbs(module.DRIVER_STEP), state="D"),
        Outcome(OutcomeStatus.DIED, breadcrumbs=crumbs(module.DRIVER_STEP), signal="SIGBUS"),
    ],
)
def test_a_wedged_driver_blames_its_own_rank(ended: Outcome) -> None:
    found = judge(cluster_of({11: ended}))
    assert places(found) == {("gpu-unhealthy", Severity.FAIL, ("nd1",), (11,))}
    assert "cuInit" in found[0].message


def test_a_child_that_hung_before_the_driver_is_not_the_gpus_fault() -> None:
    hung = Outcome(OutcomeStatus.HUNG, breadcrumbs=crumbs("importing"))
    assert judge(cluster_of({11: hung, 12: Outcome(OutcomeStatus.HUNG)})) == []


def test_silent_hosts_and_ranks_without_numbers_are_left_alone() -> None:
    cluster = cluster_of({r: facts(0, r) for r in range(8)}, absent_nodes=[1])
    assert judge(cluster) == []
    nameless = change_rank(cluster_of(nproc=2), 3, rank=None, local_rank=None)
    assert judge(nameless) == []


def test_every_kind_is_declared_once() -> None:
    codes = {value.code for value in vars(module).values() if isinstance(value, Kind)}
    assert codes == {kind.code for kind in check.kinds}
    assert len(codes) == len(check.kinds)


def test_the_page_has_its_headings() -> None:
    for heading in ("What it checks", "Why it matters", "How to fix", "When it is wrong"):
        assert f"\n{heading}\n---" in module.__doc__


def test_observe_on_this_machine() -> None:
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("a GPU build: observed by tests/gpu in a child process")
    steps: list[str] = []
    ctx = Context(
        launch=Launch(rank=0, local_rank=0, world_size=1),
        env={"CUDA_VISIBLE_DEVICES": "0,1", "HOME": "/somewhere"},
        breadcrumb=lambda step, **_: steps.append(step),
    )
    seen = json.loads(json.dumps(check.observe(ctx)))
    assert seen["torch"] == torch.__version__
    assert seen["gloo_built"] is True
    assert seen["devices"] == []
    assert seen["visible"] == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert set(seen) == set(facts(0, 0))
    assert steps == []  # a CPU build never touches a driver
    cluster = cluster_of({0: seen}, hosts=1, nproc=1, backend="gloo")
    assert next(cluster.evidence("backend_device", ALONE).__iter__()).outcome.facts == seen
    assert {f.level for f in judge(cluster)} <= {Severity.WARN}
