"""A rank that a signal ended before the run did: no report of the run says pass."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.ranks.ranks import Ranks, signed_in

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
        signed_in(ranks.port, 1)
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
