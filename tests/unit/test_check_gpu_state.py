"""The state of GPUs on made-up clusters: who is blamed, and what is said once only."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_doctor.api import Confidence, Outcome, OutcomeStatus, Severity
from nccl_doctor.checks.backend_device import BackendDevice
from nccl_doctor.checks.gpu_state import GpuState
from nccl_doctor.toolkit.gpu.lost import hosts_without_gpu
from nccl_doctor.toolkit.gpu.nvml import STEP
from tests.support.findings import judge, only
from tests.support.gpu_facts import facts as seen_by_torch
from tests.support.gpu_states import cluster_of, every, gpu, lost, state, torch_sees, with_backend

CHECK, BACKEND = GpuState(), BackendDevice()


def test_healthy_hosts_are_fine_whatever_else_is_known() -> None:
    hosts = [state(node) for node in range(3)]
    assert judge(CHECK, cluster_of(*hosts)) == []
    assert judge(CHECK, with_backend(cluster_of(*hosts), torch_sees(3))) == []
    assert judge(CHECK, cluster_of(state(0))) == []


def test_the_rank_of_a_sick_gpu_is_named_too() -> None:
    sick = [gpu(1, index) for index in range(8)]
    sick[5] = gpu(1, 5, recovery_action="GPU_RESET")
    made = with_backend(cluster_of(state(0), state(1, sick), state(2)), torch_sees(3))
    found = only(CHECK, made, "gpu-unhealthy", hosts=["nd1"], ranks=[13], devices=["GPU-1-5"])
    assert found.fix.startswith("nvidia-smi --gpu-reset -i 0000:1d:00.0")


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"retired_pages": 63}, Severity.WARN, "63 memory pages are retired"),
        ({"retired_pages_pending": 1}, Severity.WARN, "will be remapped at the next reset"),
        (
            {"retired_pages_pending": 1, "ecc_uncorrected": 3},
            Severity.FAIL,
            "3 uncorrected ECC errors, and bad memory stays in use",
        ),
    ],
)
def test_pages_that_an_older_gpu_retires(
    changes: dict[str, Any], level: Severity, words: str
) -> None:
    sick = [gpu(1, index) for index in range(8)]
    sick[2] = gpu(1, 2, remapped=None, **changes)
    place = {"hosts": ["nd1"], "devices": ["GPU-1-2"]}
    found = only(CHECK, cluster_of(state(0), state(1, sick)), "gpu-unhealthy", **place)
    assert found.level is level
    assert words in found.message


def test_another_persistence_mode_is_only_mentioned() -> None:
    made = cluster_of(state(0), state(1), every(2, persistence=0))
    found = judge(CHECK, made)
    assert [one.code for one in found] == ["gpu-persistence-off", "gpu-differs"]
    assert all((one.level, one.where.hosts) == (Severity.INFO, ("nd2",)) for one in found)
    assert "persistence mode off" in found[1].message


def test_the_odd_host_is_named() -> None:
    lower = {"power_limit_mw": 500_000, "default_power_limit_mw": 500_000}
    made = cluster_of(state(0), state(1), every(2, **lower, ecc=[0, 0]))
    found = only(CHECK, made, "gpu-differs", hosts=["nd2"])
    assert found.level is Severity.WARN
    assert found.message == (
        "ECC off, power limit 500 W; the other hosts have ECC on, power limit 700 W"
    )


def test_a_host_whose_nvlinks_are_all_down_is_seen_against_the_others() -> None:
    made = cluster_of(state(0), state(1), every(2, nvlinks=[0] * 18))
    found = only(CHECK, made, "gpu-differs", hosts=["nd2"])
    assert found.message == "NVLinks 0 of 18 up; the other hosts have NVLinks 18 of 18 up"


def test_two_hosts_that_differ_are_a_tie() -> None:
    found = only(
        CHECK, cluster_of(state(0), every(1, max_sm_clock_mhz=1500)), "gpu-differs",
        hosts=["nd0", "nd1"],
    )  # fmt: skip
    assert "highest SM clock 1500 MHz on nd1; 1980 MHz on nd0: equally many have" in found.message


def test_a_host_with_one_odd_gpu_is_not_odd_itself() -> None:
    mixed = [gpu(1, index) for index in range(8)]
    mixed[2] = gpu(1, 2, mig=[1, 1])
    found = only(
        CHECK, cluster_of(state(0), state(1, mixed), state(2)), "gpu-differs",
        hosts=["nd1"], devices=["GPU-1-2"],
    )  # fmt: skip
    assert found.message.startswith("MIG on; the other GPUs of the host have MIG off")


def test_another_model_is_compared_with_none_of_the_others() -> None:
    other = {"name": "NVIDIA A100", "max_sm_clock_mhz": 1410, "nvlinks": [1] * 12}
    mixed = [gpu(0, index) for index in range(8)]
    mixed[7] = gpu(0, 7, **other)
    found = only(CHECK, cluster_of(state(0, mixed)), "gpu-differs", hosts=["nd0"],
                 devices=["GPU-0-7"])  # fmt: skip
    assert "model NVIDIA A100" in found.message
    hosts = cluster_of(state(0), state(1), every(2, **other))
    found = only(CHECK, hosts, "gpu-differs", hosts=["nd2"])
    assert found.message.startswith("GPUs 8 x NVIDIA A100; the other hosts have GPUs 8 x")
    # With torch that sees them, `backend_device` says so.
    assert judge(CHECK, with_backend(hosts, torch_sees(3))) == []


def test_releases_of_one_driver_branch_are_told_and_branches_left_to_another_check() -> None:
    made = cluster_of(state(0), state(1), state(2, driver="580.65.06"))
    found = only(CHECK, made, "gpu-differs", hosts=["nd2"])
    assert found.level is Severity.INFO
    assert judge(CHECK, cluster_of(state(0), state(1), state(2, driver="550.1.1"))) == []


def test_idle_links_that_are_slow_everywhere_are_no_fault() -> None:
    assert judge(CHECK, cluster_of(every(0, pcie_generation=1))) == []
    assert judge(CHECK, cluster_of(every(0, nvlinks=[0] * 18))) == []
    assert judge(CHECK, cluster_of(every(0, nvlinks=[], fabric=None, memory=None))) == []


def test_a_gpu_without_a_bridge_is_only_possibly_wrong() -> None:
    gpus = [gpu(0, index, fabric=None) for index in range(3)]
    gpus[2] = gpu(0, 2, fabric=None, nvlinks=[0] * 18)
    found = only(CHECK, cluster_of(state(0, gpus)), "nvlink-down", hosts=["nd0"],
                 devices=["GPU-0-2"])  # fmt: skip
    assert found.confidence is Confidence.POSSIBLE


def test_an_old_xid_is_a_warning_and_one_of_an_application_nothing() -> None:
    def logged(number: int) -> dict[str, Any]:
        one = {"bus": "0000:1a:00", "xid": number, "count": 1, "age_s": 9, "text": "x"}
        return state(0, kernel_log={"source": "/dev/kmsg", "reason": "", "xids": [one]})

    assert judge(CHECK, cluster_of(logged(31))) == []
    assert judge(CHECK, cluster_of(logged(9999))) == []
    found = only(CHECK, cluster_of(logged(119)), "gpu-unhealthy", hosts=["nd0"],
                 devices=["GPU-0-2"])  # fmt: skip
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert "Xid 119" in found.message


def test_a_lost_gpu_explains_that_cuda_does_not_start() -> None:
    gpus = [gpu(1, index) for index in range(8)]
    gpus[3] = lost(3)
    error = {"code": 999, "name": "CUDA_ERROR_UNKNOWN", "text": "unknown error"}
    broken = {
        8 + local: seen_by_torch(1, local, devices=[], driver_error=error) for local in range(8)
    }
    made = with_backend(cluster_of(state(0), state(1, gpus)), {**torch_sees(1), **broken})
    (first,) = [host for host in made.hosts if host.name == "nd1"]
    assert hosts_without_gpu(made) == frozenset({first.id})
    only(CHECK, made, "gpu-lost", hosts=["nd1"], devices=["GPU 3"])
    symptoms = judge(BACKEND, made)
    assert {(found.code, found.explained_by) for found in symptoms} == {
        ("gpu-unhealthy", "gpu-lost")
    }


def test_a_fabric_that_cuda_complains_of_is_said_once() -> None:
    down = {"state": "NOT_STARTED", "status": 0, "degraded": None}
    error = {"code": 802, "name": "CUDA_ERROR_SYSTEM_NOT_READY", "text": "not yet initialized"}
    made = cluster_of(every(0, fabric=down))
    only(CHECK, made, "fabric-manager-down", hosts=["nd0"],
         devices=[f"GPU-0-{index}" for index in range(8)])  # fmt: skip
    made = with_backend(made, torch_sees(1, devices=[], driver_error=error))
    assert judge(CHECK, made) == []
    assert {found.code for found in judge(BACKEND, made)} == {"fabric-manager-down"}


def test_a_fabric_that_cuda_does_without_is_a_warning() -> None:
    alone = {"state": "IN_PROGRESS", "status": 0, "degraded": None}
    made = with_backend(cluster_of(every(0, fabric=alone)), torch_sees(1))
    (found,) = judge(CHECK, made)
    assert (found.code, found.level) == ("fabric-manager-down", Severity.WARN)
    assert "in progress; CUDA still starts" in found.message


def test_a_wedged_library_is_said_once() -> None:
    def hung(step: str, **details: Any) -> Outcome:
        crumb = {"step": step, "at_s": 0.1, **details}
        return Outcome(OutcomeStatus.HUNG, breadcrumbs=(crumb,), state="D")

    made = cluster_of(state(0), hung(STEP, call="nvmlInit"))
    found = only(CHECK, made, "gpu-unhealthy", hosts=["nd1"])
    assert found.message == "nvmlInit did not return, process state D"
    cuda = {rank: hung("starting the GPU driver", call="cuInit", gpus=8) for rank in range(8, 16)}
    assert judge(CHECK, with_backend(made, cuda)) == []
    # Not the driver's doing.
    assert judge(CHECK, cluster_of(state(0), hung("reading the kernel log"))) == []


def test_an_unreadable_gpu_that_is_not_ours_is_no_fault() -> None:
    other = {"index": 1, "lost": False, "refused": {"NO_PERMISSION": ["handle"]}}
    assert judge(CHECK, cluster_of(state(0, [gpu(0, 0), other]))) == []
    broken = {"index": 1, "lost": False, "refused": {"UNKNOWN": ["handle"]}}
    only(CHECK, cluster_of(state(0, [gpu(0, 0), broken])), "gpu-unhealthy",
         hosts=["nd0"], devices=["GPU 1"])  # fmt: skip
