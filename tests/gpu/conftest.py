"""What tests on a real GPU share. This process must not start the driver: children look."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LOOK = "import torch; print(torch.cuda.is_available() and torch.distributed.is_nccl_available())"


@pytest.fixture(scope="session")
def nccl_gpu() -> None:
    """Skip where there is no GPU that torch can use with NCCL."""
    seen = subprocess.run(
        [sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=120, check=True
    )
    if seen.stdout.split()[-1] != "True":
        pytest.skip("no GPU that torch can use with NCCL")
