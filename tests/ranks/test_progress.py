"""Progress is for somebody who watches: a board on a terminal, lines of long waits elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from tests.ranks.ranks import free_port, rank_env
from tests.support.forkserver import quick_python_path
from tests.support.screen import Screen

# One rank of two, alone: what is awaited must be said.
OPTIONS = ["-m", "nccl_doctor", "run", "--join-timeout=2", "--timeout=30"]


def watched(
    folder: Path, *options: str, env: dict[str, str] | None = None, columns: int = 80
) -> tuple[str, str]:
    """stdout (a pipe) and stderr (a terminal) of a run in which rank 1 never comes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [quick_python_path(), *OPTIONS, *options],
        env={**rank_env(0, 2, free_port(), TERM="xterm"), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        cwd=folder,
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


@pytest.mark.parametrize("columns", [80, 40])
def test_the_board_says_what_runs_and_who_is_awaited_and_goes(tmp_path: Path, columns: int) -> None:
    stdout, stderr = watched(tmp_path, "--select=ranks", columns=columns)
    assert "[2/7] examining this h" in stderr
    assert re.search(r"\[3/7\] waiting for rank 1 \([01] of 2 s\)", stderr)
    assert "here\x1b[K" in stderr
    assert "rank 1" in stderr
    assert "not here yet" in stderr
    screen = Screen(columns)
    screen.feed(stderr)
    assert screen.tallest <= 12
    assert screen.widest < columns
    assert "".join(screen.lines) == ""  # nothing is left behind
    assert "[3/7]" not in stdout
    assert "\x1b" not in stdout  # no colour into a pipe


def test_quiet_or_a_dumb_terminal_shows_none(tmp_path: Path) -> None:
    for options, env in ((("--quiet",), {}), ((), {"TERM": "dumb"})):
        _, stderr = watched(tmp_path, "--select=ranks", *options, env=env)
        assert "/7]" not in stderr
        assert "\x1b" not in stderr


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


def test_a_host_without_the_report_says_how_it_ended_and_where_to_read(tmp_path: Path) -> None:
    port = free_port()
    own = [*OPTIONS[:3], "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    own += [f"--master-port={port}", "--select=ranks,seeds", "--timeout=60"]
    launched = ("RANK", "WORLD", "MASTER")
    env = rank_env(0, 2, port)
    env = {key: value for key, value in env.items() if not any(name in key for name in launched)}
    nodes = [
        subprocess.Popen(
            [quick_python_path(), *own, f"--node-rank={node}", "--", "echo", "started"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for node in (0, 1)
    ]
    (out, problem), (silent, err) = (process.communicate(timeout=60) for process in nodes)
    assert out.startswith("nccl-doctor: PASS"), problem
    assert f"nccl-doctor: PASS, see node 0 ({os.uname().nodename})\n" in err
    assert silent == "started\n"
