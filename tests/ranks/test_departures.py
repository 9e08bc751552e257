"""A rank that a signal ended before the run did: no report of the run says pass."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from nccl_doctor.gather.control_store import ControlStore, StoreLost
from nccl_doctor.gather.envelope import OPEN
from nccl_doctor.gather.opening import MEETING, opened, prefix_of
from tests.ranks.ranks import Ranks

pytestmark = pytest.mark.xdist_group("torch")

WAIT_S = 60.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_left_while_others_were_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    ranks = Ranks(
        tmp_path, 3, ("--level", "quick", "--join-timeout=30", "--timeout=50"), start=[0, 1]
    )
    try:
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            try:
                box = ControlStore("127.0.0.1", ranks.port, timeout_s=5, prefix=MEETING)
                break
            except StoreLost:
                time.sleep(0.1)
        box.beside(prefix_of(opened(box, WAIT_S)), OPEN).get("seat/1", WAIT_S)
        ranks.processes[1].send_signal(number)
        assert ranks.processes[1].wait(WAIT_S) == 3
        ranks.start([2])
        ended = ranks.wait(WAIT_S)
    finally:
        ranks.kill()
    report = ranks.report()
    assert report["verdict"] == "unknown"
    (root,) = report["root_causes"]
    assert root["code"] == "run-interrupted"
    assert root["message"] == f"received {number.name} and left before the end"
    assert root["where"]["ranks"] == [1]
    assert root["where"]["hosts"] == []
    assert [ended[rank].code for rank in (0, 2)] == [3, 3]
