"""A rank that a signal ended before the run did: no report of the run says pass."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.broken import broken
from tests.ranks.ranks import Ranks, free_port, node, signed_in
from tests.support.waiting import until

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


@pytest.mark.parametrize("moment", ["sign-in", "round"])
def test_all_say_that_node_0_was_stopped(tmp_path: Path, moment: str) -> None:
    """And not merely that they have lost it; its own report is there too."""
    nnodes, select, env, port = 3, "--select=ranks", dict[str, str](), free_port()
    waiting = tmp_path / "waiting"
    waiting.mkdir()
    if moment == "round":
        nnodes, select = 2, "--select=ranks,collectives"
        env = {**broken("waits_in_all_reduce"), "TEST_WAITS": str(waiting)}
    nodes = [node(tmp_path, number, port, select, nnodes=nnodes, **env) for number in (0, 1)]
    try:
        signed_in(port, 1)
        if moment == "round":
            until(lambda: len(os.listdir(waiting)) == 2)
        nodes[0].send_signal(signal.SIGTERM)
        assert [each.wait(WAIT_S) for each in nodes] == [3, 3]
    finally:
        for each in nodes:
            each.kill()
    mine = json.loads((tmp_path / "report.json").read_text())
    assert [found["code"] for found in mine["root_causes"]] == ["run-interrupted"]
    assert " s by SIGTERM" in mine["root_causes"][0]["message"]
    theirs = json.loads((tmp_path / "report.node1.json").read_text())
    (root,) = theirs["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("run-interrupted", [0])
    assert root["message"] == "received SIGTERM and left before the end"
    assert theirs["verdict"] == "unknown"
