"""Input that never comes, as from a file server that does not answer: one line, exit 2, in time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from nccl_doctor.toolkit.errands import PATIENCE_S

COMMANDS = (
    "run --config PIPE",
    "run --baseline PIPE",
    "run --deepspeed-config PIPE",
    "run --hostfile PIPE",
    "run --redact --redact-key PIPE",
    "report show PIPE",
    "report judge PIPE",
    "report diff PIPE -",
)
START_S = 20.0  # of so many interpreters at once


def test_every_input_that_never_comes_is_given_up(tmp_path: Path) -> None:
    pipe = tmp_path / "silent"
    os.mkfifo(pipe)
    started = time.monotonic()
    running = {
        command: subprocess.Popen(
            [sys.executable, "-m", "nccl_doctor", *command.replace("PIPE", str(pipe)).split()],
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
