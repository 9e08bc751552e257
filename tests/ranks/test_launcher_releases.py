"""Lines and files of older releases of DeepSpeed and accelerate, read as their own launcher does.

The tests that hold our readers against the installed release run again with each of these in its
place.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.wheels import installed
from tests.torches.forms import run

DEEPSPEED = ("0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.9")
ACCELERATE = ("1.8.1", "1.12.0")
ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/unit/test_command_line_truth.py"

pytestmark = pytest.mark.wide


@pytest.mark.parametrize(
    ("launcher", "release"),
    [
        *(("deepspeed", release) for release in DEEPSPEED),
        *(("accelerate", release) for release in ACCELERATE),
    ],
)
def test_its_lines_are_read_as_it_reads_them(
    launcher: str, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_BUILD_OPS", "0")
    options = ("--no-deps", "--no-build-isolation", "--upgrade", "--target")
    folder = installed(f"{launcher}=={release}", *options)
    paths = os.pathsep.join([str(ROOT), str(folder)])
    asks = f"import {launcher}; print({launcher}.__version__)"
    _, told = run([sys.executable, "-c", asks], more={"PYTHONPATH": paths})
    assert release in told.splitlines()[-1]
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "0", TESTS, "-k", launcher]
    code, told = run(argv, more={"PYTHONPATH": paths})
    assert code == 0, told
    assert "skipped" not in told.splitlines()[-1]
