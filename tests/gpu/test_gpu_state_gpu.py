"""The state of real GPUs, read in a child process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from nccl_doctor.checks.gpu_state import GpuState
from tests.support.clusters import make_cluster
from tests.support.gpu_states import with_backend

pytestmark = pytest.mark.gpu

OBSERVE = """
import json
from nccl_doctor.api import Context, Launch, Skip
from nccl_doctor.checks.backend_device import BackendDevice
from nccl_doctor.checks.gpu_state import GpuState
try:
    state = dict(GpuState().observe(Context(launch=Launch(), env={})))
except Skip as reason:
    state = {"skip": str(reason)}
launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)
torch_sees = BackendDevice().observe(Context(launch=launch, env={}, backend="nccl"))
print(json.dumps([state, dict(torch_sees)]))
"""


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """What `gpu_state` and what `backend_device` observe."""
    child = subprocess.run(
        [sys.executable, "-c", OBSERVE], capture_output=True, text=True, timeout=120, check=True
    )
    both: list[dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    if "skip" in both[0]:
        pytest.skip(both[0]["skip"])
    return both


@pytest.fixture
def facts(seen: list[dict[str, Any]]) -> dict[str, Any]:
    return seen[0]


def test_every_gpu_is_described(facts: dict[str, Any]) -> None:
    assert facts["error"] is None
    assert re.fullmatch(r"\d+(\.\d+)+", facts["driver"])
    assert facts["count"] == len(facts["gpus"]) > 0
    for gpu in facts["gpus"]:
        assert not gpu["lost"]
        assert re.fullmatch(r"GPU-[0-9a-f-]{36}", gpu["uuid"])
        assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", gpu["bus_id"])
        assert gpu["memory"]["total"] > 1 << 30
        assert 0 < gpu["temperature"] < 120
        assert 0 < gpu["pcie_width"] <= gpu["max_pcie_width"]
        assert not {"BAD_ANSWER", "INVALID_ARGUMENT"} & set(gpu["refused"]), gpu["refused"]


def test_nobody_limited_the_clocks_of_a_healthy_gpu(facts: dict[str, Any]) -> None:
    for gpu in facts["gpus"]:
        silent = {name for names in gpu["refused"].values() for name in names}
        if not {"set_sm_clock_mhz", "default_sm_clock_mhz"} & silent:  # drivers from CUDA 14 on
            assert gpu["set_sm_clock_mhz"] == gpu["default_sm_clock_mhz"] > 0
        assert not (gpu["throttle"] or 0) & 2, gpu
    assert facts["fabric_manager"]["misfit"] is None


def test_a_healthy_host_gives_no_failure(seen: list[dict[str, Any]]) -> None:
    """Also a guest whose NVSwitches the host keeps: CUDA starts, so the fabric is no failure."""
    facts, torch_sees = seen
    cluster = make_cluster(["nd0"], 1, check=GpuState.name, by_host={"nd0": facts}, backend="nccl")
    cluster = with_backend(cluster, {0: torch_sees})
    assert not [found for found in GpuState().judge(cluster) if found.level.value == "fail"]
