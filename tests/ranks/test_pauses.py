"""A process that stood still says so first, and blames nobody who did not answer meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.system.pauses import LEAST_S, TICK_S
from tests.broken import broken
from tests.ranks.ranks import descendants, free_port, node, signed_in
from tests.support.forkserver import Forked
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("torch")

WAIT_S = 60.0
PAUSE_S = LEAST_S + 2 * TICK_S + 1


def stand_still(process: Forked) -> None:
    """Stop a process and all below it, and let it go on after a while, as a suspended machine."""
    everybody = [process.pid, *descendants(process.pid)]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)  # the time itself is tested
    for pid in reversed(everybody):
        os.kill(pid, signal.SIGCONT)


@contextmanager
def ended(*nodes: Forked) -> Iterator[None]:
    try:
        yield
    finally:
        for each in nodes:
            each.kill()


def read(folder: Path, name: str = "report.json") -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / name).read_text())
    return report


def test_who_stood_still_in_the_sign_in_calls_nobody_absent(tmp_path: Path) -> None:
    first = node(tmp_path, 0, port := free_port(), "--select=ranks", "--join-timeout=5")
    with ended(first):
        signed_in(port, 0)
        stand_still(first)
        assert first.wait(WAIT_S) == 3
    report = read(tmp_path)
    assert report["verdict"] == "unknown"
    (found,) = report["root_causes"]
    assert found["code"] == "run-interrupted"
    assert "this process stood still for " in found["message"]
    assert "node 1 had not signed in, which may come of that" in found["message"]
    assert not {"host-absent", "rank-absent"} & {each["code"] for each in report["findings"]}


def test_who_comes_after_the_pause_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    first = node(tmp_path, 0, port, "--select=ranks", "--join-timeout=6")
    second = None
    try:
        signed_in(port, 0)
        stand_still(first)
        second = node(tmp_path, 1, port, "--select=ranks", "--join-timeout=20")
        assert [first.wait(WAIT_S), second.wait(WAIT_S)] == [0, 0]
    finally:
        for each in filter(None, (first, second)):
            each.kill()
    assert read(tmp_path)["verdict"] == "pass"


def test_nothing_hung_while_all_stood_still(tmp_path: Path) -> None:
    """As where the machine of both was suspended: no group is called broken for it."""
    waiting = tmp_path / "waiting"
    waiting.mkdir()
    env = {**broken("waits_in_all_reduce"), "TEST_WAITS": str(waiting)}
    options = ("--select=ranks,collectives", "--collective-timeout=6")
    port = free_port()
    nodes = [node(tmp_path, number, port, *options, **env) for number in (0, 1)]
    with ended(*nodes):
        until(lambda: len(os.listdir(waiting)) == 2)
        everybody = [pid for each in nodes for pid in (each.pid, *descendants(each.pid))]
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)  # the time itself is tested
        for pid in reversed(everybody):
            os.kill(pid, signal.SIGCONT)
        assert [each.wait(WAIT_S) for each in nodes] == [3, 3]
    report = read(tmp_path)
    assert report["verdict"] == "unknown"
    assert [each for each in report["findings"] if each["severity"] == "fail"] == []
    (collectives,) = [each for each in report["checks"] if each["name"] == "collectives"]
    assert "stood still for " in collectives["reason"]
