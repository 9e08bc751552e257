"""Another job's store, or an earlier run's, on MASTER_PORT is recognised and never joined."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from nccl_doctor.gather import server
from nccl_doctor.gather.envelope import OPEN
from nccl_doctor.gather.messages import Roster
from nccl_doctor.gather.opening import MEETING, open_run, prefix_of
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.model.codec import encode
from tests.ranks.ranks import Ranks

pytestmark = pytest.mark.xdist_group("torch")

OPTIONS = ("--join-timeout=3", "--timeout=40", "--collective-timeout=3")
WAIT_S = 12 + 3 + 15 + 5  # start, join, the slack for a slow coordinator, leaving


def earlier_run(port: int, run_id: str) -> ControlStore:
    """The store, for messages of a run of that name, which is open."""
    meeting = ControlStore("127.0.0.1", port, timeout_s=5, prefix=MEETING)
    open_run(meeting, run_id)
    return meeting.beside(prefix_of(run_id), OPEN)


@pytest.fixture
def stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """A job of two ranks, not yet started, on whose port somebody else's store is served."""
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    ranks = Ranks(tmp_path, 2, OPTIONS, start=[])
    door = server.serve(ranks.port)
    assert door.error is None
    yield ranks
    ranks.kill()
    door.close()


def test_rank_0_says_that_the_port_is_taken(stale: Ranks) -> None:
    stale.start([0])
    ended = stale.wait(WAIT_S)
    assert ended[0].code == 1
    report = stale.report()
    (found,) = [f for f in report["root_causes"] if f["code"] == "port-in-use"]
    assert str(stale.port) in found["message"]


OLDER_TORCH = """
import torch.distributed as dist
real = dist.TCPStore
def store(*given, use_libuv=True, **more):
    if use_libuv and "master_listen_fd" in more:
        raise NotImplementedError("a socket that is open already")
    if REFUSES and "master_listen_fd" in more:
        raise NotImplementedError("the older server neither")
    return real(*given, use_libuv=use_libuv, **more)
dist.TCPStore = store
"""
"""torch before 2.8, whose default server takes no open socket."""


def test_the_older_server_of_torch_takes_an_open_socket(tmp_path: Path) -> None:
    before = {0: f"REFUSES = False\n{OLDER_TORCH}"}
    ranks = Ranks(tmp_path, 2, ("--select=port", *OPTIONS), before=before)
    assert {ended.code for ended in ranks.wait(WAIT_S).values()} == {0}


def test_a_store_that_cannot_be_served_is_no_fault_of_the_port(tmp_path: Path) -> None:
    before = {0: f"REFUSES = True\n{OLDER_TORCH}"}
    ranks = Ranks(tmp_path, 2, OPTIONS, start=[0], before=before)
    assert ranks.wait(WAIT_S)[0].code == 3
    report = ranks.report()
    assert not [each for each in report["findings"] if each["severity"] == "fail"]
    (found,) = (each for each in report["findings"] if each["code"] == "run-interrupted")
    assert "serves the store of this run has ended: NotImplementedError" in found["message"]


@pytest.mark.parametrize("more", [{}, {"next_s": 15.0}], ids=["another version", "this version"])
def test_earlier_run_of_the_doctor_is_not_joined(stale: Ranks, more: dict[str, float]) -> None:
    old = earlier_run(stale.port, "old")
    old.add("seats", 2)
    old.put("roster", {"nonce": "old", "backend": "gloo", "tokens": {"0": "a", "1": "b"}, **more})
    old.put("order/0", {"finish": 0})
    stale.start([1])
    ended = stale.wait(WAIT_S)
    assert ended[1].code != 0
    assert "belongs to another run" in " ".join(ended[1].stderr.split())
    assert not stale.report_path.exists()


def test_host_that_cannot_tell_whose_run_it_reached_blames_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    other = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1", "NNODES": "2"}
    options = (*OPTIONS, "--join-timeout=10")  # by which a busy machine has read the roster
    ranks = Ranks(tmp_path, 2, options, start=[], changes={1: other})
    door = server.serve(ranks.port)
    try:
        old = earlier_run(ranks.port, "nonce")
        old.put("roster", encode(Roster({0: "somebody"}, "nonce", "gloo", 15.0)))
        ranks.start([1])
        assert ranks.wait(WAIT_S)[1].code == 1  # another host cannot use a loopback address
    finally:
        ranks.kill()
        door.close()
    (path,) = tmp_path.glob("report.node1.json")
    findings = json.loads(path.read_text())["findings"]
    (found,) = (each for each in findings if each["code"] == "coordinator-lost")
    assert "belongs to another run" in found["message"]
    assert found["where"]["hosts"] == []
    assert [end for _, end in found["where"]["links"]] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({}, 'rank 0: order has no "round"'),
        ([], "rank 0: order is a list, not an object"),
        ({"finish": "0"}, "rank 0: order.finish is a text, not a whole number"),
    ],
)
def test_an_order_that_nobody_can_read_ends_the_run_of_this_rank(
    stale: Ranks, order: object, words: str
) -> None:
    rank_0 = earlier_run(stale.port, "nonce")
    stale.start([1])
    token = rank_0.get("seat/0", WAIT_S)["token"]
    rank_0.put("roster", encode(Roster({0: token}, "nonce", "gloo", 15.0)))
    rank_0.put("order/0", order)
    ended = stale.wait(WAIT_S)
    said = " ".join(ended[1].stderr.split())
    assert ended[1].code == 3
    assert words in said
    assert "Traceback" not in said


def test_store_of_another_job_is_waited_at_no_longer_than_for_a_late_rank_0(stale: Ranks) -> None:
    from torch.distributed import TCPStore

    other = TCPStore("127.0.0.1", stale.port, is_master=False, timeout=timedelta(seconds=5))
    other.set("their/key", "their value")
    stale.start([1])
    ended = stale.wait(WAIT_S)
    assert ended[1].code != 0
    assert "rank 0" in " ".join(ended[1].stderr.split())
    assert other.get("their/key") == b"their value"
