"""DeepSpeed over NCCL on a real GPU: whether it binds is as the table of versions says.

One rank, and four on one GPU, in processes of their own: this one must not start the driver.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.toolkit.groups.binding import binds
from tests.gpu.one_gpu import WORLD, examine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("nccl_gpu"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

OBSERVE = """
import importlib, json, os, sys, tempfile, time
import torch
if not torch.cuda.is_available():
    print(json.dumps(None))
    sys.exit()
from nccl_doctor.api import Context, Job, Launch
from torch.distributed import HashStore
check = importlib.import_module("nccl_doctor.checks.deepspeed_groups").DeepspeedGroups()

class Alone:
    def post(self, tag, value): ...
    def collect(self, tag, timeout_s, of=None): return {}
    def store(self): return HashStore()

out = check.observe(Context(
    launch=Launch(rank=0, local_rank=0, world_size=1, local_world_size=1),
    env=dict(os.environ), backend="nccl", deadline=time.monotonic() + 100, job=Job(deepspeed=True),
    round=sys.argv[1], group=(0,), seat=0, params={"groups": {"evens": [0], "odds": []}},
    peers=Alone(),
))
print(json.dumps(out))
"""


def observe(round_name: str, **env: str) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-c", OBSERVE, round_name],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
        env={**os.environ, **env},
    )
    seen: dict[str, Any] | None = json.loads(child.stdout.splitlines()[-1])
    if seen is None:
        pytest.skip("no CUDA device")
    return seen


def is_bound_as_told(seen: dict[str, Any], deepspeed: str | None) -> bool:
    told = binds(
        deepspeed, seen["torch"], "nccl", seen["accelerator"], 1, use_nccl2=seen["use_nccl2"]
    )
    return told.binds in (None, seen["bound_device_id"] is not None)


def test_a_group_of_its_own_is_bound_as_the_table_says() -> None:
    seen = observe("own")
    assert seen["accelerator"] == "cuda"
    assert is_bound_as_told(seen, seen["deepspeed"])
    assert seen["wrong"] == []


def test_a_group_of_torchs_is_kept_as_it_was() -> None:
    seen = observe("wraps")
    assert (seen["kept"], seen["backend_kept"]) == (True, True)
    assert is_bound_as_told(seen, None)
    assert seen["wrong"] == []


def test_the_old_process_group_binds_nothing_by_itself() -> None:
    assert observe("wraps", TORCH_DIST_USE_NCCL2="0")["bound_device_id"] is None


def test_groups_of_four_ranks_work_beside_either_default_group(tmp_path: Path) -> None:
    report = examine(tmp_path, 0, "--select", "deepspeed_groups", "--groups", "many")
    assert [f["code"] for f in report["findings"] if f["severity"] == "fail"] == []
    assert len(report["ranks"]) == WORLD
    for rank in report["ranks"]:
        rounds = rank["facts"]["deepspeed_groups"]
        for name in ("wraps", "own"):
            assert rounds[name]["status"] == "ok", rounds[name]
            assert rounds[name]["facts"]["size"] == WORLD
            assert rounds[name]["facts"]["wrong"] == []
