"""Run the program as a user would: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A launcher's variables around the tests would be taken for the job's.
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(
        ("GITHUB_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "PET_", "NCCL_", "GLOO_")
    )
    and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NO_COLOR")
}
CLEAN["RES_OPTIONS"] = "timeout:1 attempts:1"


def program(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nccl_doctor", *arguments],
        cwd=cwd,
        env={**CLEAN, **(env or {})},
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
        **more,
    )


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a usage error; asserts that it is one, alone, on stderr, with exit 2."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    prefix = "nccl-doctor: error: "
    assert line.startswith(prefix)
    return line.removeprefix(prefix)
