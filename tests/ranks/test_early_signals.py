"""A signal at any moment of a run in front of a command: the command never starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.broken import broken
from tests.ranks.ranks import BASE, descendants, free_port, gone, supervisor
from tests.support.forkserver import Forked
from tests.support.waiting import until

LEAVE_S = 10.0  # on a machine that starts interpreters for others at the same time

# Seconds after the program has forked, as the first thing that it does: then it is a program of
# its own, which reads its options; or seconds after the start of one that is forked from a process
# that has imported torch, which forks ranks, they sign in, and they meet.
FRESH = ((0.0, signal.SIGINT), (0.1, signal.SIGTERM), (0.4, signal.SIGHUP))
FORKED = (
    (0.01, signal.SIGTERM),
    (0.1, signal.SIGHUP),
    (0.2, signal.SIGINT),
    (0.35, signal.SIGINT),
    (None, signal.SIGTERM),
)
"""None: once both ranks are in a round. None of them ever ends, so no moment is too late."""


def line(folder: Path) -> list[str]:
    own = ["--nproc-per-node=2", "--backend=gloo", f"--master-port={free_port()}"]
    json_to = f"--json={folder / 'report.json'}"
    return ["run", "--timeout=60", *own, json_to, "--", "touch", str(folder / "started")]


def environment(folder: Path) -> dict[str, str]:
    waiting = folder / "waiting"
    waiting.mkdir()
    return {**os.environ, **BASE, **broken("waits_in_all_reduce"), "TEST_WAITS": str(waiting)}


def strike(
    process: Forked | subprocess.Popen[str], folder: Path, after_s: float | None, number: int
) -> list[int]:
    """Send a signal; returns the processes that were below at that moment."""
    if after_s is None:
        until(lambda: len(os.listdir(folder / "waiting")) == 2)
    else:
        time.sleep(after_s)  # any moment of the start will do, and many are tried
    below = descendants(process.pid)
    process.send_signal(number)
    return below


def check(folder: Path, code: int, number: int, stderr: str, below: list[int]) -> None:
    assert not (folder / "started").exists()
    # Before the first line of the program runs, a signal is what it is to any Python.
    assert code in ((3, -number) if not stderr else (3,)), stderr
    assert gone(below)
    report = folder / "report.json"
    if report.exists():
        found = json.loads(report.read_text())["findings"]
        loud = {each["code"] for each in found if each["severity"] != "info"}
        assert loud <= {"run-interrupted"}, loud


@pytest.mark.parametrize(("after_s", "number"), FORKED)
def test_a_signal_while_the_ranks_start(
    tmp_path: Path, after_s: float | None, number: signal.Signals
) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    process = Forked(line(tmp_path), environment(tmp_path), folder=tmp_path, out=out, err=err)
    below = strike(process, tmp_path, after_s, number)
    try:
        code = process.wait(LEAVE_S)
    finally:
        process.kill()
    check(tmp_path, code, number, err.read_text(), below)


@pytest.mark.parametrize(("after_s", "number"), FRESH)
def test_a_signal_while_the_program_starts(
    tmp_path: Path, after_s: float, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "nccl_doctor", *line(tmp_path)],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        supervisor(process.pid)  # until then, a signal meets a bare interpreter
        below = strike(process, tmp_path, after_s, number)
        _, stderr = process.communicate(timeout=LEAVE_S)
    check(tmp_path, process.returncode, number, stderr, below)
