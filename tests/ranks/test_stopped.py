"""A run that is stopped while it waits for others: unknown, and nobody is blamed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.ranks import BASE, MAIN, descendants, free_port, signed_in
from tests.support.forkserver import Forked

pytestmark = pytest.mark.xdist_group("torch")

WAIT_S = 60.0


IGNORING = "from signal import *; [signal(n, SIG_IGN) for n in (SIGHUP, SIGINT)]"


def run(folder: Path, port: int, *options: str, under: str = "") -> Forked:
    """Node 0 of two, and node 1 never comes. `under`: Python that runs first."""
    own = ("--nnodes=2", "--node-rank=0", "--nproc-per-node=2", "--master-addr=127.0.0.1")
    arguments = ["run", *own, f"--master-port={port}", "--select=ranks", *options]
    return Forked(
        [*arguments, f"--json={folder / 'report.json'}"],
        {**os.environ, **BASE},
        folder=folder,
        out=folder / "out",
        err=folder / "err",
        code=f"{under}\n{MAIN}" if under else "",
    )


def check(folder: Path, code: int) -> dict[str, Any]:
    """The root cause of a report that blames nobody."""
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert (report["verdict"], report["exit_code"], code) == ("unknown", 3, 3)
    (found,) = report["findings"]
    assert found["code"] == "run-interrupted"
    assert not any(found["where"].values())
    assert "node 1 had not signed in yet" in found["message"]
    assert found["message"] in report["summary"]
    assert "1 of 2 hosts" in (folder / "out").read_text()
    assert "no sign-in within" not in json.dumps(report)
    root: dict[str, Any] = found
    return root


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_node_is_awaited(tmp_path: Path, number: signal.Signals) -> None:
    process = run(tmp_path, port := free_port())
    try:
        signed_in(port, 0)
        process.send_signal(number)
        code = process.wait(WAIT_S)
    finally:
        process.kill()
    found = check(tmp_path, code)
    assert found["message"].startswith("stopped after ")
    assert f" s by {number.name}; " in found["message"]


def test_what_was_ignored_at_the_start_stays_so_and_sigterm_ends_it(tmp_path: Path) -> None:
    """As under `nohup`, and in the background of a script."""
    process = run(tmp_path, port := free_port(), under=IGNORING)
    try:
        signed_in(port, 0)
        for number in (signal.SIGHUP, signal.SIGINT):
            for pid in (process.pid, *descendants(process.pid)):
                os.kill(pid, number)
        process.send_signal(signal.SIGTERM)
        code = process.wait(WAIT_S)
    finally:
        process.kill()
    assert " s by SIGTERM; " in check(tmp_path, code)["message"]


def test_what_ignores_signals_ends_at_its_time_limit(tmp_path: Path) -> None:
    process = run(tmp_path, port := free_port(), "--timeout=10", under=IGNORING)
    try:
        signed_in(port, 0)
        process.send_signal(signal.SIGINT)
        code = process.wait(WAIT_S)
    finally:
        process.kill()
    assert " s by the time limit of 10 s (--timeout); " in check(tmp_path, code)["message"]


def test_a_time_limit_shorter_than_the_join_timeout(tmp_path: Path) -> None:
    process = run(tmp_path, free_port(), "--timeout=10")
    try:
        code = process.wait(WAIT_S)
    finally:
        process.kill()
    found = check(tmp_path, code)
    assert " s by the time limit of 10 s (--timeout); " in found["message"]
    assert "rank 1" not in (tmp_path / "err").read_text()  # it was not started to end at once
