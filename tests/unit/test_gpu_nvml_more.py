"""What newer drivers say, and what one that answers late or not at all: against the stand-in."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Outcome, OutcomeStatus, Severity
from nccl_doctor.checks.gpu_state import GpuState
from tests.nvml.stand_in import Machine, build, gathered, h100s, uuid, write
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only

CHECK = GpuState()
SLACK_S = 3.0  # starting a child, killing it, and a busy machine


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "dev").mkdir(parents=True)
    (made / "dev/kmsg").write_text("")
    return made


See = Callable[..., Outcome]


@pytest.fixture
def see(library: Path, root: Path, tmp_path: Path) -> See:
    def seen(machine: Machine, deadline_s: float = 30.0) -> Outcome:
        return gathered(library, write(machine, tmp_path / "machine"), root, deadline_s)

    return seen


def one_host(outcome: Outcome) -> Cluster:
    assert outcome.status is OutcomeStatus.OK, outcome
    return make_cluster(["nd0"], 2, check="gpu_state", by_host={"nd0": outcome}, backend="nccl")


def test_what_newer_drivers_say_of_one_gpu(see: See) -> None:
    machine = h100s(2)
    machine["1"] |= {
        "nvmlDeviceGetMarginTemperature": -3,
        "nvmlDeviceGetTemperatureThreshold.2": 95,
        "nvmlDeviceGetFieldValues.82": 96,
        "nvmlDeviceGetRowRemapperHistogram": "638 0 0 0 2",
        "nvmlDeviceGetSramEccErrorStatus": 1,
        "fabric": f"3 0 {1 << 4 | 2}",
    }
    outcome = see(machine)
    gpu = outcome.facts["gpus"][1]
    assert (gpu["margin_temperature"], gpu["memory_temperature"]) == (-3, 96)
    assert (gpu["memory_max_temperature"], gpu["banks_without_spare"]) == (95, 2)
    assert (gpu["sram_threshold_exceeded"], gpu["fabric"]["health_mask"]) == (1, 18)
    found = judge(CHECK, one_host(outcome))
    assert [(one.code, one.level, one.where.devices) for one in found] == [
        ("gpu-unhealthy", Severity.INFO, (uuid(1),)),
        ("gpu-unhealthy", Severity.WARN, (uuid(1),)),
        ("nvlink-down", Severity.WARN, (uuid(1),)),
        ("gpu-throttled", Severity.WARN, (uuid(1),)),
    ]
    assert found[3].message == (
        "the GPU is 3 °C above its limit; its memory is too hot (96 °C, limit 95 °C)"
    )


def test_what_only_root_is_told_is_no_fault(see: See) -> None:
    machine = h100s(2)
    for index in "01":
        machine[index]["nvmlDeviceGetSramEccErrorStatus"] = "!4"
    outcome = see(machine)
    gpu = outcome.facts["gpus"][0]
    assert (gpu["sram_threshold_exceeded"], gpu["refused"]["NO_PERMISSION"]) == (
        None,
        ["sram_threshold_exceeded"],
    )
    assert judge(CHECK, one_host(outcome)) == []


def test_calls_that_a_newer_driver_has_no_more(see: See) -> None:
    machine = h100s(2)
    gone = ("nvmlDeviceGetApplicationsClock", "nvmlDeviceGetDefaultApplicationsClock")
    for index in "01":
        for kind in "12":
            machine[index] |= {f"{name}.{kind}": "!26" for name in gone}
        machine[index] |= {"nvmlDeviceGetTemperature.0": "!26", "nvmlDeviceGetTemperatureV.0": 41}
        machine[index]["nvmlDeviceGetTemperatureThreshold.1"] = "!26"
    outcome = see(machine)
    gpu = outcome.facts["gpus"][0]
    assert gpu["temperature"] == 41
    assert "set_sm_clock_mhz" in gpu["refused"]["DEPRECATED"]
    assert judge(CHECK, one_host(outcome)) == []


def test_pairs_that_are_asked_for_slowly_are_not_lost(see: See) -> None:
    machine = h100s(2)
    machine["0"]["nvmlDeviceGetP2PStatus.1.0"] = "!slow 0"
    outcome = see(machine)
    assert (outcome.facts["p2p"], outcome.facts["pairs_error"]) == ({"OK": [[0, 1]]}, None)


def test_pairs_that_the_driver_never_answers_for_are_said_in_time(see: See) -> None:
    machine = h100s(2)
    machine["0"]["nvmlDeviceGetP2PStatus.1.0"] = "!wedge"
    started = time.monotonic()
    outcome = see(machine, 8.0)
    assert time.monotonic() - started < 8.0 + SLACK_S
    assert (outcome.facts["p2p"], outcome.facts["nearest"]) == ({}, {})
    found = only(CHECK, one_host(outcome), "gpu-state-unread", hosts=["nd0"])
    assert "memory (nvmlDeviceGetP2PStatus: did not return within" in found.message


def test_pairs_that_the_driver_refuses_are_counted(see: See) -> None:
    machine = h100s(4)
    machine["1"]["nvmlDeviceGetP2PStatus.2.0"] = "!999"
    machine["1"]["nvmlDeviceGetTopologyCommonAncestor.2"] = "!3"
    outcome = see(machine)
    assert outcome.facts["pairs_refused"] == {
        "p2p": {"UNKNOWN": 1},
        "nearest": {"NOT_SUPPORTED": 1},
    }
    found = only(CHECK, one_host(outcome), "gpu-state-unread", hosts=["nd0"])
    assert found.message == "not read: which GPUs reach each other's memory (1 pair: UNKNOWN)"


def test_a_kernel_log_that_is_not_there_is_said(see: See, root: Path) -> None:
    (root / "dev/kmsg").unlink()
    outcome = see(h100s(2))
    found = only(CHECK, one_host(outcome), "gpu-state-unread", hosts=["nd0"])
    assert "/dev/kmsg: No such file or directory" in found.message


def test_an_xid_of_a_mig_instance_reaches_the_report(see: See, root: Path) -> None:
    line = "NVRM: Xid (PCI:0000:19:00 GPU-I:05): 95, pid=7, name=python, Uncontained"
    (root / "dev/kmsg").write_text(f"4,901,77000000,-;{line}\n")
    machine = h100s(2)
    found: Any = only(CHECK, one_host(see(machine)), "gpu-unhealthy", hosts=["nd0"],
                      devices=[uuid(1)])  # fmt: skip
    assert "Xid 95" in found.message
    assert found.evidence["gpus"][0]["xids"][0]["text"].startswith("GPU-I:05")
