"""Completion: what a shell is told for a line that is not finished."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nccl_doctor import registry
from nccl_doctor.cli.completion import SHELLS
from tests.cli.program import program


def told(line: str) -> list[str]:
    """Words that bash would offer for the last one of a line; `file` stands for its files."""
    words = line.split(" ")
    env = {"_NCCL_DOCTOR_COMPLETE": "bash_complete", "COMP_WORDS": line}
    done = program(env={**env, "COMP_CWORD": str(len(words) - 1)})
    assert done.stderr == ""
    found = [answer.partition(",") for answer in done.stdout.split()]
    return [value if kind == "plain" else kind for kind, _, value in found]


def test_commands_options_and_their_values() -> None:
    assert told("nccl-doctor exp") == ["explain"]
    assert told("nccl-doctor report iss") == ["issue"]
    assert told("nccl-doctor run --with") == ["--with-dcgm"]
    assert told("nccl-doctor run --level ") == ["quick", "standard", "full"]


def test_codes_and_checks() -> None:
    codes = told("nccl-doctor explain peer-")
    assert codes == sorted(code for code in registry.load().kinds if code.startswith("peer-"))
    assert told("nccl-doctor explain device_m") == ["device_mesh"]
    assert told("nccl-doctor run --select ranks,peer-o") == ["ranks,peer-one-way"]


@pytest.mark.parametrize(
    "line",
    [
        "nccl-doctor report show re",
        "nccl-doctor report diff old.json ",
        "nccl-doctor report merge a.json b",
        "nccl-doctor report show --html ",
        "nccl-doctor run --baseline ",
        "nccl-doctor run --json x -- torchrun tr",
    ],
)
def test_files(line: str) -> None:
    assert told(line) == ["file"]


@pytest.mark.parametrize(
    "line", ["nccl-doctor run --rdzv_id 3 ", "nccl-doctor frobnicate ", "nccl-doctor run 'x"]
)
def test_a_line_that_is_wrong_so_far_prints_no_error(line: str) -> None:
    told(line)


def test_variables_that_are_missing_print_no_error() -> None:
    done = program(env={"_NCCL_DOCTOR_COMPLETE": "bash_complete"})
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_taken_by_its_shell(shell: str, tmp_path: Path) -> None:
    done = program("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_NCCL_DOCTOR_COMPLETE" in done.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    script = tmp_path / "script"
    script.write_text(done.stdout)
    read = subprocess.run([shell, "-n", script], capture_output=True, timeout=20, check=False)
    assert (read.returncode, read.stderr) == (0, b"")


def test_bash_offers_what_the_program_tells_it(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed here")
    script = tmp_path / "script"
    script.write_text(program("completion", "bash").stdout)
    doctor = tmp_path / "nccl-doctor"
    doctor.write_text(f'#!/bin/sh\nexec {sys.executable} -m nccl_doctor "$@"\n')
    doctor.chmod(0o755)
    line = (
        f"source {script}; COMP_WORDS=(nccl-doctor explain peer-one); COMP_CWORD=2\n"
        f'_nccl_doctor_completion {doctor}; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        [bash, "--norc", "-c", line], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "peer-one-way\n", done.stderr
