"""Builds the stand-in for libnvidia-ml.so.1, describes machines to it, and observes them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor import probe
from nccl_doctor.cluster import Outcome

SOURCE = Path(__file__).with_name("libnvidia-ml.c")
NAME = "libnvidia-ml.so.1"
Machine = dict[str, dict[str, Any]]
"""GPU (`"-"`: the machine) → call → answer, as `libnvidia-ml.c` says."""


def build(folder: Path, *flags: str) -> Path:
    """The library, in a folder of its own."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc) to build the stand-in for NVML")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    library = folder / NAME
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wno-comment"]
    command += [*flags, f"-Wl,-soname,{NAME}", "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return library


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-0000-0000-000000000000"


def h100s(count: int = 8) -> Machine:
    """A healthy machine with NVSwitch."""
    machine: Machine = {
        "-": {
            "nvmlSystemGetDriverVersion": "580.95.05",
            "nvmlSystemGetNVMLVersion": "13.580.95.05",
            "nvmlSystemGetCudaDriverVersion": 13000,
            "nvmlDeviceGetCount_v2": count,
        }
    }
    for index in range(count):
        gpu: dict[str, Any] = {
            "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetUUID": uuid(index),
            "nvmlDeviceGetPciInfo_v3": f"00000000:{0x18 + index:02X}:00.0",
            "nvmlDeviceGetVbiosVersion": "96.00.99.00.01",
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetComputeMode": 0,
            "nvmlDeviceGetPerformanceState": 0,
            "nvmlDeviceGetTemperature.0": 30 + index,
            "nvmlDeviceGetTemperatureThreshold.1": 92,
            "nvmlDeviceGetPowerUsage": 70000,
            "nvmlDeviceGetPowerManagementLimit": 700000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700000,
            "nvmlDeviceGetClockInfo.1": 1980,
            "nvmlDeviceGetMaxClockInfo.1": 1980,
            "nvmlDeviceGetMaxClockInfo.2": 2619,
            "nvmlDeviceGetApplicationsClock.1": 1980,
            "nvmlDeviceGetApplicationsClock.2": 2619,
            "nvmlDeviceGetDefaultApplicationsClock.1": 1980,
            "nvmlDeviceGetDefaultApplicationsClock.2": 2619,
            "nvmlDeviceGetVirtualizationMode": 0,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetPcieReplayCounter": 0,
            "nvmlDeviceGetEccMode": "1 1",
            "nvmlDeviceGetMigMode": "0 0",
            "nvmlDeviceGetTotalEccErrors.0.0": 0,
            "nvmlDeviceGetTotalEccErrors.1.0": 0,
            "nvmlDeviceGetTotalEccErrors.1.1": 0,
            "nvmlDeviceGetRemappedRows": "0 0 0 0",
            "nvmlDeviceGetMemoryInfo": f"{80 << 30} {79 << 30} {1 << 30}",
            "nvmlDeviceGetFieldValues.230": 0,
            "processes": "",
            "throttle": 1,
            "fabric": "3 0 0",
        }
        for link in range(18):
            gpu[f"nvmlDeviceGetNvLinkState.{link}"] = 1
            for counter in range(3):
                gpu[f"nvmlDeviceGetNvLinkErrorCounter.{link}.{counter}"] = 0
        for other in range(index + 1, count):
            gpu[f"nvmlDeviceGetP2PStatus.{other}.0"] = 0
            gpu[f"nvmlDeviceGetTopologyCommonAncestor.{other}"] = 50
        machine[str(index)] = gpu
    return machine


def write(machine: Mapping[str, Mapping[str, Any]], file: Path) -> Path:
    lines = [
        f"{gpu} {key} {value}" for gpu, calls in machine.items() for key, value in calls.items()
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def observe(
    library: Path,
    description: Path,
    look: Callable[[Callable[..., None]], Mapping[str, Any]],
    deadline_s: float = 20.0,
) -> Outcome:
    """`look`, with a child's breadcrumb, in a real probe child that has the stand-in loaded."""

    def work(line: probe.Line) -> Mapping[str, Any]:
        # Loaded by its path first: the same soname then leads to it.
        ctypes.CDLL(str(library))
        os.environ["NVML_STAND_IN"] = str(description)
        return look(line.breadcrumb)

    (outcome,) = probe.run([probe.Job("gpu_state", work, time.monotonic() + deadline_s)])
    return Outcome.from_json(outcome.to_json())
