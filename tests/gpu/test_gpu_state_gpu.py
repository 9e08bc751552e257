"""The state of real GPUs, read in a child process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from nccl_doctor.checks.gpu_state import GpuState
from tests.clusters import make_cluster

pytestmark = pytest.mark.gpu

OBSERVE = """
import json
from nccl_doctor.api import Context, Launch, Skip
from nccl_doctor.checks.gpu_state import GpuState
try:
    print(json.dumps(GpuState().observe(Context(launch=Launch(), env={}))))
except Skip as reason:
    print(json.dumps({"skip": str(reason)}))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-c", OBSERVE], capture_output=True, text=True, timeout=120, check=True
    )
    seen: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    if "skip" in seen:
        pytest.skip(seen["skip"])
    return seen


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
        assert gpu["set_sm_clock_mhz"] == gpu["default_sm_clock_mhz"]
        assert not (gpu["throttle"] or 0) & 2, gpu
    assert facts["fabric_manager"]["misfit"] is None


def test_a_healthy_host_gives_no_failure(facts: dict[str, Any]) -> None:
    cluster = make_cluster(["nd0"], 1, check=GpuState.name, by_host={"nd0": facts}, backend="nccl")
    assert not [found for found in GpuState().judge(cluster) if found.level.value == "fail"]
