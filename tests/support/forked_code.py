"""Python code in a process that has torch imported, and nothing that tests have done."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.forkserver import Forked


def run_code(
    code: str, folder: Path, *arguments: str, env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run it, with these words in `sys.argv[1:]`, and with `env` beside the environment."""
    out, err = folder / "stdout", folder / "stderr"
    process = Forked(arguments, {**os.environ, **env}, folder=folder, out=out, err=err, code=code)
    try:
        returncode = process.wait(timeout_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, returncode, out.read_text(), err.read_text())
