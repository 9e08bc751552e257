"""A host of which the store hears nothing any more, over a real store and real connections."""

from __future__ import annotations

import socket
import time

import pytest

from nccl_doctor.gather.ends import Heartbeats
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.examine import below_round
from nccl_doctor.gather.messages import SignIn
from nccl_doctor.gather.peers import RoundPeers
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.model.findings import Round
from nccl_doctor.model.launch import Launch
from tests.support.checks import CHECKS
from tests.support.waiting import comes

pytestmark = pytest.mark.xdist_group("torch")

FIREWALL = CHECKS["firewall"]
MATRIX = Round("matrix", ((0, 1, 2),), 48.0)
OTHER, UNKNOWN = "127.0.0.2", "127.0.0.3"
QUIET_S = 2.0


@pytest.fixture
def box(store_port: int) -> ControlStore:
    """The store as rank 0 has it, on its own host."""
    return ControlStore("127.0.0.1", store_port, timeout_s=5, prefix="run/")


def connected(box: ControlStore) -> socket.socket:
    return socket.create_connection(("127.0.0.1", box.port), source_address=(OTHER, 0))


def watching(box: ControlStore) -> Heartbeats:
    """What rank 0 has at the beginning of a round with two other hosts."""
    evidence = EvidenceLog(Launch(rank=0, world_size=3), {}, {})
    for seat, address in ((1, OTHER), (2, UNKNOWN)):
        launch = Launch(rank=seat, world_size=3)
        who = SignIn(f"token {seat}", 7, launch, f"nd{seat}", f"host {seat}", (address,))
        evidence.sign_in(seat, who, 0.0)
    quiet = Heartbeats(box, evidence, QUIET_S)
    assert not quiet.look()
    quiet.begin(FIREWALL, MATRIX)
    return quiet


def news_of(quiet: Heartbeats, limit_s: float = 6.0) -> bool:
    return comes(quiet.look, limit_s)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_host_of_which_nothing_comes_is_not_waited_for(box: ControlStore, how: str) -> None:
    with connected(box) as other:
        quiet = watching(box)
        began = time.monotonic()
        if how == "killed":
            other.close()
        assert news_of(quiet)
        assert time.monotonic() - began > QUIET_S
        assert quiet.seats == {1}  # the other one was never heard: it may be behind a translation
        assert not quiet.look()
        prefix = f"run/{below_round(FIREWALL, MATRIX, MATRIX.groups[0])}"
        peers = RoundPeers("127.0.0.1", box.port, prefix, MATRIX.groups[0], 0)
        asked = time.monotonic()
        assert peers.collect("done", 20.0, [1]) == {}
        assert time.monotonic() - asked < 5.0


def test_a_host_that_is_heard_again_is_waited_for_again(box: ControlStore) -> None:
    with connected(box):
        quiet = watching(box)
        assert news_of(quiet)
        with connected(box):
            assert not news_of(quiet, 1.2)
            assert quiet.seats == frozenset()


def test_the_silence_before_a_round_does_not_count(box: ControlStore) -> None:
    with connected(box):
        quiet = watching(box)
        assert news_of(quiet)
        quiet.begin(FIREWALL, MATRIX)
        assert quiet.seats == frozenset()
        assert not news_of(quiet, QUIET_S * 0.9)
