"""What tests on a real GPU share. This process must not start the driver: children look.

Without a GPU they are skipped; where GPU_REQUIRED is set to anything but 0, they fail. What the
machine is goes into the JUnit report, from which `scripts/gpu_validation.py` makes a page.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

_LOOK = """
import importlib.metadata, json
import torch
import torch.distributed as dist

found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "nccl": ""}
found |= {"mig": False, "driver": "unknown", "deepspeed": "not installed"}
found["has_nccl"] = dist.is_available() and dist.is_nccl_available()
if torch.cuda.is_available():
    found["gpus"] = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    if found["has_nccl"]:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
try:
    found["deepspeed"] = importlib.metadata.version("deepspeed")
except importlib.metadata.PackageNotFoundError:
    pass
try:
    import pynvml

    pynvml.nvmlInit()
    found["driver"] = pynvml.nvmlSystemGetDriverVersion()
    for at in range(pynvml.nvmlDeviceGetCount()):
        try:
            mode = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(at))
            found["mig"] |= mode[0] == 1
        except pynvml.NVMLError:
            pass
except Exception:
    pass
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def machine(record_testsuite_property: Callable[[str, object], None]) -> dict[str, Any]:
    """Versions, `gpus` (names of those that torch can use), `has_nccl`, `mig` (one is in parts)."""
    found = _found()
    names = found["gpus"]
    record_testsuite_property("gpu", f"{len(names)} x {names[0]}" if names else "none")
    for name in ("driver", "cuda", "torch", "nccl", "deepspeed"):
        record_testsuite_property(name, found[name] or "none")
    return found


def _found() -> dict[str, Any]:
    version = importlib.metadata.version("torch")
    if version.endswith("+cpu"):  # nothing to look for, which would take seconds
        nothing = dict.fromkeys(("driver", "cuda", "nccl", "deepspeed"), "")
        return {**nothing, "torch": version, "gpus": [], "has_nccl": False, "mig": False}
    look = subprocess.run(
        [sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=120, check=True
    )
    found: dict[str, Any] = json.loads(look.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="session", autouse=True)
def gpu(machine: dict[str, Any]) -> None:
    """A GPU that torch can use."""
    if machine["gpus"]:
        return
    words = f"no GPU that torch {machine['torch']} can use"
    if os.environ.get("GPU_REQUIRED", "0") not in ("", "0"):
        pytest.fail(f"{words}, and GPU_REQUIRED says that there must be one")
    pytest.skip(words)


@pytest.fixture(scope="session")
def nccl_gpu(machine: dict[str, Any]) -> None:
    """Skip where torch cannot use it with NCCL."""
    if not machine["has_nccl"]:
        pytest.skip("no GPU that torch can use with NCCL")
