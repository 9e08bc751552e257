"""A plug-in that behaves when it is tried, and misbehaves when it is imported for good."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import nccl_doctor
from tests.cli.program import CLEAN
from tests.support.forkserver import quick_python_path
from tests.support.waiting import until
from tests.support.ways import SAVED

START_S = 20.0
ONCE_GOOD = """
import os, pathlib, time
from nccl_doctor.api import *

mark = pathlib.Path(os.environ["MARK"])
if mark.exists():
    mark.with_name("again").touch()
    {then}
mark.touch()

class Moon(Check):
    name = "moon"
    layer = Layer.HOST
    kinds = (Kind("moon-down", Layer.HOST, "title", "why", "fix"),)
    def observe(self, ctx): return {{}}
    def judge(self, cluster): return ()
"""


def doctor(folder: Path, then: str, *arguments: str) -> subprocess.Popen[str]:
    info = folder / "moon-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moon\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nccl_doctor.checks]\nmoon = moon_check\n")
    (folder / "moon_check.py").write_text(ONCE_GOOD.format(then=then))
    root = Path(nccl_doctor.__file__).parents[1]
    return subprocess.Popen(
        [quick_python_path(), "-m", "nccl_doctor", *arguments],
        env={**CLEAN, "PYTHONPATH": f"{folder}{os.pathsep}{root}", "MARK": str(folder / "mark")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


@pytest.mark.parametrize("arguments", ["env", "checks", "report judge saved.json"])
def test_nobody_ends_with_success_but_the_program_itself(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "saved.json").write_text(SAVED)
    process = doctor(tmp_path, "os._exit(0)", *arguments.split())
    stdout, stderr = process.communicate(timeout=START_S)
    assert (process.returncode, stdout) == (3, "")
    assert "which did the work, ended with 0 before its answer" in stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 3), (signal.SIGINT, 3), (signal.SIGHUP, 3)]
)
def test_a_signal_ends_env_whatever_blocks(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = doctor(tmp_path, "time.sleep(600)", "env")
    until((tmp_path / "again").exists)
    process.send_signal(number)
    signalled = time.monotonic()
    _, stderr = process.communicate(timeout=START_S)
    assert time.monotonic() - signalled < 5.0
    assert process.returncode == code
    assert f"received {number.name}" in stderr


def test_a_deadline_ends_a_run_whatever_blocks(tmp_path: Path) -> None:
    began = time.monotonic()
    process = doctor(tmp_path, "time.sleep(600)", "run", "--select", "moon", "--timeout", "5",
                     "--join-timeout", "2", "--collective-timeout", "2")  # fmt: skip
    _, stderr = process.communicate(timeout=START_S + 5)
    assert time.monotonic() - began < 5 + 2.0 + START_S
    assert process.returncode == 3
    assert "the deadline has passed (5 s)" in stderr
