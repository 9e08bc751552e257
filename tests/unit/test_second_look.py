"""Hosts that look again after a loss, and the hosts that they call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from nccl_doctor import registry
from nccl_doctor.api import AFTER_LOSS
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.messages import SignIn
from nccl_doctor.gather.rounds import WITNESSES, call_after_loss
from nccl_doctor.model.launch import Launch
from tests.support.clusters import make_cluster

ROOT = Path(__file__).resolve().parents[2]
THREE = ("nd0", "nd1", "nd2")


def test_nobody_looks_again_where_nobody_was_lost() -> None:
    assert call_after_loss(make_cluster(THREE), set(), 0) is None
    assert call_after_loss(make_cluster(("nd0",)), {1}, 0) is None


def test_who_is_left_calls_who_was_lost_and_each_other() -> None:
    round_ = call_after_loss(make_cluster(THREE), {2, 3}, 0)
    assert round_ is not None
    assert (round_.name, round_.groups) == (AFTER_LOSS, ((0,), (4,)))
    assert round_.params == {
        "hosts": {f"nd{node}": [f"192.168.77.{node + 1}"] for node in (1, 0, 2)}
    }


def test_a_host_whose_other_ranks_were_not_asked_since_may_be_lost() -> None:
    round_ = call_after_loss(make_cluster(THREE), {2}, 0)
    assert round_ is not None
    assert round_.groups == ((0,), (3,), (4,))
    assert list(round_.params["hosts"]) == ["nd1", "nd0", "nd2"]


def test_a_silent_rank_beside_the_coordinator_is_no_loss_of_a_host() -> None:
    round_ = call_after_loss(make_cluster(THREE), {1}, 0)
    assert round_ is not None
    assert (round_.groups, round_.params) == (((0,),), {"hosts": {}})


def test_hosts_that_never_came_cannot_be_called() -> None:
    round_ = call_after_loss(make_cluster(THREE, absent_nodes=[1]), set(), 0)
    assert round_ is not None
    assert (round_.groups, round_.params) == (((0,),), {"hosts": {}})


def test_hosts_that_hung_together_call_each_other() -> None:
    """Nobody is silent where the path between two of them is cut: each still reaches rank 0."""
    round_ = call_after_loss(make_cluster(THREE), set(), 0, {2, 3, 4})
    assert round_ is not None
    assert round_.groups == ((2,), (4,))
    assert round_.params == {"hosts": {f"nd{n}": [f"192.168.77.{n + 1}"] for n in (1, 2)}}


def test_a_hang_within_a_host_is_not_of_the_network() -> None:
    assert call_after_loss(make_cluster(THREE), set(), 0, {2, 3}) is None


def test_in_a_large_cluster_few_look_and_few_are_called() -> None:
    cluster = make_cluster([f"nd{node}" for node in range(200)], 1)
    round_ = call_after_loss(cluster, set(range(100, 200)), 0)
    assert round_ is not None
    assert len(round_.groups) == WITNESSES
    assert round_.groups[0] == (0,)
    assert len(round_.params["hosts"]) <= 3 * WITNESSES


def test_everybody_is_told_a_few_hosts_those_that_came_first() -> None:
    log = EvidenceLog(Launch(rank=0, world_size=12, nnodes=6), {}, {})
    assert log.some_hosts(4) == {}
    for seat in range(12):
        name = f"nd{seat // 2}"
        more: dict[str, Any] = {"addresses": (f"192.168.77.{seat // 2 + 1}",)}
        who = SignIn(str(seat), 1, Launch(rank=seat), name, f"key of {name}", **more)
        log.sign_in(seat, who, 0.0)
    told = log.some_hosts(WITNESSES)
    assert told == {f"nd{node}": [f"192.168.77.{node + 1}"] for node in range(WITNESSES)}


def test_only_checks_that_observe_alone_look_again() -> None:
    again = [check for check in registry.load().checks if check.looks_again]
    assert [check.name for check in again] == ["uplink", "master_firewall"]
    assert not any(check.together for check in again)


STOPPED_MEANWHILE = """
import json
from dataclasses import replace
from nccl_doctor.api import Finding, Where
from nccl_doctor.gather.rank import Participant
from nccl_doctor.model.kinds import COORDINATOR_LOST
from nccl_doctor.model.launch import Launch
from tests.unit.test_start_time import run

said = []
one = replace(run(60.0), launch=Launch(rank=1, world_size=2, local_rank=0), backend="gloo")
participant = Participant(one, lambda result: said.append(result.report) or 3)
participant._lost = [Finding(COORDINATOR_LOST, "lost", Where(links=(("nd1", "nd0"),)))]
participant._last_words("the deadline has passed")
participant._watchdog.stand_down()
print(json.dumps({each.code: each.explained_by for each in said[0].findings}))
"""


def test_who_is_stopped_while_it_looks_again_still_says_whom_it_lost() -> None:
    """In a process of its own: a participant takes the signals."""
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED_MEANWHILE],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = {"coordinator-lost": None, "run-interrupted": "coordinator-lost"}
    assert json.loads(ended.stdout) == found
