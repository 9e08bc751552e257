"""`which`: whether a line could be started at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nccl_doctor.launch.command_line.program import which
from tests.support.rows import each_row


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "more").mkdir()
    for name, mode in (("torchrun", 0o755), ("env", 0o755), ("nice", 0o755), ("plain", 0o644)):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(mode)
    (tmp_path / "more" / "plain").write_text("#!/bin/sh\n")
    (tmp_path / "more" / "plain").chmod(0o755)
    (tmp_path / "here.sh").touch(0o755)
    (tmp_path / "train.py").touch(0o644)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "torchrun t.py",
        "bin/torchrun",
        "./here.sh",
        "env A=1 torchrun",
        "nice -n 5 env B=1 ./here.sh",
        "env -C bin ./torchrun",
        "env PATH=more plain",
    ],
)
def test_what_can_be_started(line: str, cwd: Path):
    assert which(line.split(), {"PATH": f"{cwd}/absent:{cwd}/bin"}, cwd) is None


def test_a_folder_of_the_path_that_is_relative_counts_from_here(cwd: Path):
    assert which(["torchrun"], {"PATH": "bin"}, cwd) is None


def test_a_file_that_cannot_run_is_passed_over(cwd: Path):
    assert which(["plain"], {"PATH": f"{cwd}/bin:{cwd}/more"}, cwd) is None


@each_row(
    ("line", "words"),
    [
        ("", "no command after --"),
        ("trochrun t.py", 'trochrun: no such program in PATH; did you mean "torchrun"?'),
        ("/nowhere/torchrun", "/nowhere/torchrun: no such file"),
        ("plain", "bin/plain: not executable; chmod +x it"),
        ("./train.py", "not executable; chmod +x it, or write `python ./train.py`"),
        ("bin/", "bin/: a folder, not a program"),
        ("here.sh", "write ./here.sh"),
        ("exec torchrun", "exec: a word of the shell"),
        (
            "A=1 torchrun",
            "A=1: a variable, not a program; write it before nccl-doctor",
        ),
        ("env A=1 trochrun", 'did you mean "torchrun"?'),
        ("nice env -C more ./torchrun", "./torchrun: no such file"),
        ("env", "no program after env"),
        ("env PATH=more torchrun", "torchrun: no such program in PATH"),
        ("env -i torchrun", "torchrun: no such program in PATH"),
    ],
)
def test_what_cannot(line: str, words: str, cwd: Path):
    problem = which(line.split(), {"PATH": f"{cwd}/bin"}, cwd)
    assert problem is not None
    assert words in problem
    assert "\n" not in problem


def test_reading_a_line_needs_no_launcher():
    code = (
        "import sys, nccl_doctor.launch.command_line;"
        "sys.exit(bool({'torch', 'deepspeed'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
