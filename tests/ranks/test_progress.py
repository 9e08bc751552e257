"""Progress is for somebody who watches: on a terminal, on stderr, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

from tests.ranks.ranks import free_port, rank_env
from tests.support.forkserver import quick_python_path

# One rank of two, alone: what is awaited must be said.
OPTIONS = ["-m", "nccl_doctor", "run", "--join-timeout=2", "--timeout=30"]


def watched(tmp_path: Path, *options: str) -> tuple[str, str]:
    """stdout (a pipe) and stderr (a terminal) of a run in which rank 1 never comes."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [quick_python_path(), *OPTIONS, *options],
        env=rank_env(0, 2, free_port(), TERM="xterm"),
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        cwd=tmp_path,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data
    stdout, _ = process.communicate(timeout=30)
    os.close(ours)
    return stdout, seen.decode()


def test_terminal_shows_what_runs_who_is_awaited_and_the_time_left(tmp_path: Path) -> None:
    stdout, stderr = watched(tmp_path)
    assert "examining this host" in stderr
    assert "waiting for ranks 1" in stderr
    assert "s left" in stderr
    assert stderr.endswith("\r\x1b[2K")  # the line is taken away
    assert "s left" not in stdout
    assert "\x1b" not in stdout  # no colour into a pipe


def test_quiet_shows_none(tmp_path: Path) -> None:
    _, stderr = watched(tmp_path, "--quiet")
    assert "s left" not in stderr


def test_pipe_shows_none(tmp_path: Path) -> None:
    done = subprocess.run(
        [quick_python_path(), *OPTIONS],
        env=rank_env(0, 2, free_port()),
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
        cwd=tmp_path,
    )
    assert done.stderr == ""
    assert "rank-absent" in done.stdout or "host-absent" in done.stdout
