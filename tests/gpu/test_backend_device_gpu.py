"""The facts of a real GPU, observed in a child process: this one must not start the driver."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.support.clusters import make_cluster

pytestmark = pytest.mark.gpu

OBSERVE = """
import importlib, json, os
from nccl_doctor.api import Context, Launch
check = importlib.import_module("nccl_doctor.checks.backend_device").BackendDevice()
launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)
print(json.dumps(check.observe(Context(launch=launch, env=dict(os.environ), backend="nccl"))))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-c", OBSERVE], capture_output=True, text=True, timeout=120, check=True
    )
    seen: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    if not seen["devices"]:
        pytest.skip("no CUDA device: " + str(seen["driver_error"] or "torch sees none"))
    return seen


def test_the_gpu_is_described(facts: dict[str, Any]) -> None:
    mine = facts["devices"][facts["device"]]
    assert re.fullmatch(r"(GPU|MIG)-[0-9a-f-]{36}", mine["uuid"])
    assert mine["memory_bytes"] > 1 << 30
    assert facts["driver_error"] is None
    assert facts["arch_list"]


def test_one_rank_on_a_healthy_gpu_gives_no_finding(facts: dict[str, Any]) -> None:
    check = importlib.import_module("nccl_doctor.checks.backend_device").BackendDevice()
    cluster = make_cluster(["nd0"], 1, check=check.name, by_rank={0: facts}, backend="nccl")
    assert list(check.judge(cluster)) == []
