"""Work on a real GPU, in a child process: this one must not start the driver."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.support.clusters import make_cluster

pytestmark = pytest.mark.gpu

STRESS_S = 20.0
"""What the full stress of one GPU may take."""

OBSERVE = """
import importlib, json, os, sys, time
from nccl_doctor.api import Context, Launch, Level, Untested
module, name, level = sys.argv[1:]
check = getattr(importlib.import_module(f"nccl_doctor.checks.{module}"), name)()
steps = []
context = Context(
    launch=Launch(rank=0, local_rank=0, world_size=1, local_world_size=1), env=dict(os.environ),
    backend="nccl", level=Level(level), deadline=time.monotonic() + 45,
    breadcrumb=lambda step, **details: steps.append([step, time.monotonic()]),
)
import torch
if not torch.cuda.is_available():
    print(json.dumps(None))
    sys.exit()
started = time.monotonic()
facts = dict(check.observe(context))
print(json.dumps([facts, steps, time.monotonic() - started]))
"""


def observe(module: str, name: str, level: str = "standard") -> tuple[dict[str, Any], list[Any]]:
    child = subprocess.run(
        [sys.executable, "-c", OBSERVE, module, name, level],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    seen = json.loads(child.stdout.splitlines()[-1])
    if seen is None:
        pytest.skip("no CUDA device")
    facts, steps, seconds = seen
    return facts, [*steps, ["end", seconds]]


def judge(module: str, name: str, facts: dict[str, Any]) -> list[Any]:
    check = getattr(importlib.import_module(f"nccl_doctor.checks.{module}"), name)()
    made = make_cluster(["nd0"], 1, check=check.name, by_rank={0: facts}, backend="nccl")
    return list(check.judge(made))


def test_a_healthy_gpu_works_exactly() -> None:
    facts, steps = observe("gpu_work", "GpuWork")
    assert (facts["error"], facts["wrong"], facts["tries"]) == (None, [], [])
    assert facts["context_s"] > 0
    assert facts["peer"] is None  # one rank: nobody to copy to
    assert [step for step, _ in steps].count("copying to the host") == 1
    assert judge("gpu_work", "GpuWork", facts) == []


def test_the_full_stress_takes_its_time_and_gives_plausible_rates() -> None:
    started = time.monotonic()
    facts, steps = observe("gpu_work", "GpuWork", "full")
    assert steps[-1][1] < STRESS_S
    assert time.monotonic() - started < 3 * STRESS_S  # with importing torch
    assert len(facts["tries"]) == 2
    for one, other in zip(*(sorted(each.items()) for each in facts["tries"]), strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], rel=0.2)
    assert facts["tries"][0]["copy"] > facts["tries"][0]["to_device"] > 1e9
    assert len(facts["under_load"]) == 2
    for load in filter(None, facts["under_load"]):  # empty without nvidia-ml-py
        assert 0 < load["sm_clock_mhz"] <= load["max_sm_clock_mhz"]
        assert not load.get("throttle", 0) & 1, "it was idle when it was asked"
    assert judge("gpu_work", "GpuWork", facts) == []


def test_a_wrong_element_on_the_gpu_is_seen() -> None:
    code = """
import torch
from nccl_doctor.checks.gpu_work.work import differences, operands
if torch.cuda.is_available():
    left, right, product = operands(2048, torch.bfloat16)
    got = (left.cuda() @ right.cuda()).float()
    assert differences("product", got.cpu(), product) == []
    got[17, 4] += 1
    print(differences("product", got.cpu(), product)[0]["example"])
else:
    print("no CUDA device")
"""
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    said = child.stdout.splitlines()[-1]
    if said == "no CUDA device":
        pytest.skip(said)
    assert said.startswith("element (17, 4) is ")


def test_a_copy_to_the_next_gpu_arrives() -> None:
    code = """
import torch
from nccl_doctor.checks.gpu_work.work import DeviceWork
if torch.cuda.device_count() > 1:
    work = DeviceWork(lambda *_, **__: None, torch.device("cuda", 0))
    work.context()
    print(work.peer_copy(torch.device("cuda", 1), None))
else:
    print("no second CUDA device")
"""
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    said = child.stdout.splitlines()[-1]
    if said == "no second CUDA device":
        pytest.skip(said)
    assert said == "[]"


def test_the_place_of_the_gpu_is_found() -> None:
    facts, _ = observe("gpu_affinity", "GpuAffinity", "quick")
    assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.0", facts["places"]["rows"][0][0])
    assert facts["cpus"]
