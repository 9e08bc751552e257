"""A run that is stopped while it waits for others: unknown, and nobody is blamed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.gather.control_store import ControlStore, StoreLost
from nccl_doctor.gather.envelope import OPEN
from nccl_doctor.gather.opening import MEETING, opened, prefix_of
from tests.ranks.ranks import BASE, free_port
from tests.support.forkserver import Forked

pytestmark = pytest.mark.xdist_group("torch")

WAIT_S = 60.0


def run(folder: Path, port: int, *options: str) -> Forked:
    """Node 0 of two, and node 1 never comes."""
    own = ("--nnodes=2", "--node-rank=0", "--nproc-per-node=2", "--master-addr=127.0.0.1")
    arguments = ["run", *own, f"--master-port={port}", "--select=ranks", *options]
    return Forked(
        [*arguments, f"--json={folder / 'report.json'}"],
        {**os.environ, **BASE},
        folder=folder,
        out=folder / "out",
        err=folder / "err",
    )


def waits(port: int) -> None:
    """Return once node 0 waits for the others."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        try:
            box = ControlStore("127.0.0.1", port, timeout_s=5, prefix=MEETING)
            break
        except StoreLost:
            time.sleep(0.1)
    box.beside(prefix_of(opened(box, WAIT_S)), OPEN).get("seat/0", WAIT_S)


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
        waits(port)
        process.send_signal(number)
        code = process.wait(WAIT_S)
    finally:
        process.kill()
    found = check(tmp_path, code)
    assert found["message"].startswith("stopped after ")
    assert f" s by {number.name}; " in found["message"]


def test_a_time_limit_shorter_than_the_join_timeout(tmp_path: Path) -> None:
    process = run(tmp_path, free_port(), "--timeout=10")
    try:
        code = process.wait(WAIT_S)
    finally:
        process.kill()
    found = check(tmp_path, code)
    assert " s by the time limit of 10 s (--timeout); " in found["message"]
    assert "rank 1" not in (tmp_path / "err").read_text()  # it was not started to end at once
