"""Run the program as a user would: in a process of its own.

One that needs nothing special of its environment is forked from a process that has imported all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import many_calls
from tests.support.forkserver import Forked, quick_python_path, read_early

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
    code: str = "",
    **more: Any,
) -> subprocess.CompletedProcess[str]:
    """`code`: Python to run in place of the program, where all is imported; `more`: for
    `subprocess.run`.
    """
    fresh = read_early(env or {})
    if code or not (more or fresh):
        return _forked(arguments, {**CLEAN, **(env or {})}, cwd or Path.cwd(), timeout_s, code)
    python = quick_python_path() if more.keys() <= {"input"} and not fresh else sys.executable
    return subprocess.run(
        [python, "-m", "nccl_doctor", *arguments],
        cwd=cwd,
        env={**CLEAN, **(env or {})},
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
        **more,
    )


def _forked(
    arguments: Sequence[str], env: Mapping[str, str], folder: Path, timeout_s: float, inside: str
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as outputs:
        out, err = Path(outputs, "out"), Path(outputs, "err")
        process = Forked(arguments, env, folder=folder, out=out, err=err, code=inside)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


def calls_in_one(
    lists: Sequence[Sequence[str]], folders: Sequence[Path]
) -> list[subprocess.CompletedProcess[str]]:
    """Calls of the program, each in its folder, one after the other in one process and without the
    supervisor: for many that end before anything begins.
    """
    orders = [(str(folder), words) for folder, words in zip(folders, lists, strict=True)]
    done = program(json.dumps(orders), code=many_calls.in_one(), timeout_s=120.0)
    return many_calls.ended(lists, done)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a usage error, which the usage line may follow; asserts that nothing else is
    printed, and exit 2.
    """
    assert done.returncode == 2, done
    assert done.stdout == ""
    line, *more = done.stderr.splitlines()
    assert not more or (len(more) == 1 and more[0].startswith("nccl-doctor: usage: "))
    prefix = "nccl-doctor: error: "
    assert line.startswith(prefix)
    return line.removeprefix(prefix)
