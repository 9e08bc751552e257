"""Input that never comes, as from a file server that does not answer: one line, exit 2, in time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nccl_doctor.system.helpers import PATIENCE_S
from tests.cli.program import calls_in_one, error_of
from tests.support.forkserver import quick_python_path

COMMANDS = (
    "run --config PIPE",
    "run --baseline PIPE",
    "run --deepspeed-config PIPE",
    "run --hostfile PIPE",
    "run --topology PIPE",
    "run --redact --redact-key PIPE",
    "report show PIPE",
    "report judge PIPE",
    "report diff PIPE -",
)
START_S = 20.0  # of so many processes at once


def test_every_input_that_never_comes_is_given_up(tmp_path: Path) -> None:
    pipe = tmp_path / "silent"
    os.mkfifo(pipe)
    python = quick_python_path()
    started = time.monotonic()
    running = {
        command: subprocess.Popen(
            [python, "-m", "nccl_doctor", *command.replace("PIPE", str(pipe)).split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in COMMANDS
    }
    for command, process in running.items():
        stdout, stderr = process.communicate(timeout=30)
        assert (process.returncode, stdout) == (2, ""), command
        assert f"{pipe}: " in stderr, command
        assert "no answer within 5.0 s" in stderr, command
    assert time.monotonic() - started < PATIENCE_S + START_S


def test_a_configuration_from_another_program(tmp_path: Path) -> None:
    """As of `--deepspeed-config <(make-config)`."""
    ours, theirs = os.pipe()
    os.write(theirs, b'{"train_batch_size": "many"')
    os.close(theirs)
    done = subprocess.run(
        [sys.executable, "-m", "nccl_doctor", "run", f"--deepspeed-config=/dev/fd/{ours}"],
        pass_fds=[ours],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    os.close(ours)
    assert done.returncode == 2
    assert f"/dev/fd/{ours} is not JSON" in done.stderr


ONE_LINE = {
    "run --config FILE": "cannot read FILE: ",
    "env --config FILE": "cannot read FILE: ",
    "run --baseline FILE": "--baseline: ",
    "run --deepspeed-config FILE": "--deepspeed-config: cannot read FILE: ",
    "run --hostfile FILE": "--hostfile FILE: cannot be read: ",
    "run --topology FILE": "--topology: cannot read FILE: ",
    "run --redact --redact-key FILE": "--redact-key: cannot read FILE: ",
    "run --key FILE": "cannot use FILE for --key, ",
    "report show FILE": "cannot read FILE: ",
    "report judge FILE": "cannot read FILE: ",
    "report merge FILE": "cannot read FILE: ",
    "report diff FILE FILE": "cannot read FILE: ",
}
"""Option, and how its error begins."""
MIB = 1 << 20


@pytest.mark.parametrize("kind", ["a file of 10 GB", "without end", "a folder"])
def test_every_input_that_is_too_large_or_no_file_is_one_line(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "input"
    if kind == "a folder":
        file.mkdir()
    elif kind == "without end":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as opened:
            opened.truncate(10_000 * MIB)
        file.chmod(0o600)
    commands = dict(ONE_LINE)
    if kind == "without end":  # a gigabyte is read: test_cli_bad_input has it, with less
        commands = {each: start for each, start in ONE_LINE.items() if "report" not in each}
    elif kind == "a folder":  # of reports, of which there are none
        del commands["run --baseline FILE"]
    calls = [command.replace("FILE", str(file)).split() for command in commands]
    done = calls_in_one(calls, [tmp_path] * len(calls))
    for (command, start), ended in zip(commands.items(), done, strict=True):
        said = error_of(ended)
        if not (kind == "a folder" and "--key" in command):  # closed to others, it is no file
            assert said.startswith(start.replace("FILE", str(file))), command
        assert str(file) in said, command
        assert len(said) < 400, command
