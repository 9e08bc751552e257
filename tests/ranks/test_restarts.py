"""Ranks that their agents start again meet in the store of before, whatever lies there.

The test serves the store, as torchrun's agent does, whose store outlives its workers.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nccl_doctor.gather import server
from nccl_doctor.gather.envelope import OPEN
from nccl_doctor.gather.messages import Roster
from nccl_doctor.gather.opening import MEETING, open_run, opened, prefix_of
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.model.codec import encode
from tests.ranks.ranks import BASE, Ended, Ranks, descendants, free_port, gone
from tests.support.forkserver import quick_python_path
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("torch")

JOIN_S = 25.0
OPTIONS = (f"--join-timeout={JOIN_S:g}", "--timeout=60", "--select=ranks,launch_record")
WAIT_S = 50


class Agents:
    """Ranks, each of an agent that counts its own restarts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = 0
        self._all: list[Ranks] = []
        self._door = server.serve(self.ranks(0, 0).port)
        assert self._door.error is None
        self.meeting = ControlStore("127.0.0.1", self.port, timeout_s=5, prefix=MEETING)

    def ranks(self, *restarts: int) -> Ranks:
        """The ranks, not yet started, after so many restarts of each."""
        changes = {
            rank: {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "job7",
                "TORCHELASTIC_RESTART_COUNT": str(count),
            }
            for rank, count in enumerate(restarts)
        }
        made = Ranks(self._folder, len(restarts), OPTIONS, start=[], changes=changes)
        made.port = self.port = self.port or made.port
        self._all.append(made)
        return made

    def run(self) -> ControlStore:
        """The store, for messages of the run that is open."""
        return self.meeting.beside(prefix_of(opened(self.meeting, WAIT_S)), OPEN)

    def end(self) -> None:
        for ranks in self._all:
            ranks.kill()
        self._door.close()


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    importlib.import_module("torch.distributed")  # takes seconds, before any time limit
    made = Agents(tmp_path)
    yield made
    made.end()


def check_passed(ranks: Ranks, ended: dict[int, Ended]) -> None:
    assert [each.code for each in ended.values()] == [0] * len(ended), ended
    assert ranks.report()["verdict"] == "pass"
    assert max(each.seconds for each in ended.values()) < JOIN_S


def test_agents_that_counted_different_restarts_meet(agents: Agents) -> None:
    ranks = agents.ranks(0, 1)
    ranks.start([0, 1])
    check_passed(ranks, ranks.wait(WAIT_S))


def test_ranks_that_were_killed_leave_nothing_that_counts(agents: Agents) -> None:
    """Rank 1 comes first, and meets what the killed rank 0 left."""
    first = agents.ranks(0, 0)
    first.start([0])
    agents.run().get("seat/0", WAIT_S)
    process = first.processes[0]
    pids = descendants(process.pid)
    process.kill()
    process.wait()
    assert gone(pids)
    old = agents.run()
    again = agents.ranks(0, 0)  # a host that joined: no agent counts that as a restart of its own
    again.start([1])
    old.get("seat/1", WAIT_S)  # it believes the old rank 0 so far
    again.start([0])
    check_passed(again, again.wait(WAIT_S))
    assert agents.meeting.add("doubts", 0) == 0, "rank 0 waited for an answer of the dead one"
    assert not agents.meeting.wait(["opening", "coordinator/0", "coordinator/1"], 0.0)


def test_a_rank_that_was_killed_and_comes_again_makes_no_second_claim(agents: Agents) -> None:
    """Its agent was started again too, as in a pod, and has counted no restart."""
    ranks = agents.ranks(0, 0, 0)
    ranks.start([0, 1])
    for seat in (0, 1):
        agents.run().get(f"seat/{seat}", WAIT_S)
    killed = ranks.processes[1]
    pids = descendants(killed.pid)
    killed.kill()
    killed.wait()
    assert gone(pids)
    ranks.start([1])
    agents.run().get("seat/2", WAIT_S)
    ranks.start([2])
    check_passed(ranks, ranks.wait(WAIT_S))


def test_an_earlier_run_that_had_ended_sends_nobody_home(agents: Agents) -> None:
    open_run(agents.meeting, "earlier")
    old = agents.run()
    old.add("seats", 2)
    old.put("roster", encode(Roster({0: "a", 1: "b"}, "earlier", "gloo", next_s=15.0)))
    old.put("order/0", {"finish": 0})
    ranks = agents.ranks(1, 1)
    ranks.start([1])
    old.get("seat/2", WAIT_S)
    ranks.start([0])
    check_passed(ranks, ranks.wait(WAIT_S))


def test_real_agents_of_which_one_restarted_its_ranks_meet(tmp_path: Path) -> None:
    """torchrun with c10d: after a crash on one host, one agent counts 1 restart, the other 0."""
    report, marks = tmp_path / "report.json", "$GROUP_RANK.$TORCHELASTIC_RESTART_COUNT"
    script = tmp_path / "rank.sh"
    doctor = f"{quick_python_path()} -m nccl_doctor run --json {report} {' '.join(OPTIONS)}"
    script.write_text(
        f"#!/bin/sh\ntouch start.{marks}\n"
        f"[ $GROUP_RANK.$TORCHELASTIC_RESTART_COUNT = 1.0 ] && mkdir crash && exit 1\n"
        f"exec {doctor}\n"
    )
    script.chmod(0o755)
    endpoint = f"127.0.0.1:{free_port()}"
    line = [
        *(quick_python_path(), "-m", "torch.distributed.run", "--nnodes=2", "--max-restarts=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=restarts"),
        *("--local-addr=127.0.0.1", "--no-python", str(script)),
    ]
    env = {**os.environ, **BASE}
    agents = [
        subprocess.Popen(
            line,
            env=env,
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=120)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    started = {path.name for path in tmp_path.glob("start.*")}
    assert {"start.0.0", "start.1.0", "start.1.1"} <= started, started
    assert json.loads(report.read_text())["verdict"] == "pass"


_UNTIL_ALONE = """
import datetime, os, time
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
if os.environ["WORLD_SIZE"] == "2":
    open("both." + os.environ["GROUP_RANK"], "w").close()
    while True:
        dist.barrier()
        time.sleep(0.05)
"""


@pytest.mark.wide  # it shows what torchrun does, on which `elastic-without-restarts` rests
@pytest.mark.parametrize(("restarts", "code"), [(0, 1), (1, 0)])
def test_an_elastic_job_outlives_a_host_only_with_restarts(
    tmp_path: Path, restarts: int, code: int
) -> None:
    (tmp_path / "job.py").write_text(_UNTIL_ALONE)
    line = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"),
        *(f"--max-restarts={restarts}", "--rdzv-backend=c10d", "--rdzv-id=elastic"),
        *(f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"),
    ]
    conf = "--rdzv-conf=last_call_timeout=20,keep_alive_interval=1,is_host="
    hosts = []
    try:
        for node in range(2):
            words = [*line, f"{conf}{1 - node}", "job.py"]  # the one that stays serves
            hosts.append(subprocess.Popen(words, env={**os.environ, **BASE}, cwd=tmp_path))
        until(lambda: len(list(tmp_path.glob("both.*"))) == 2)
        lost = [hosts[1].pid, *descendants(hosts[1].pid)]
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        assert hosts[0].wait(2 * WAIT_S) == code
    finally:
        below = [pid for host in hosts for pid in descendants(host.pid)]
        for host in hosts:
            host.kill()
            host.wait()
        for pid in below:  # the workers of an agent outlive it
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_rank_that_comes_when_all_have_begun_is_told_so(agents: Agents) -> None:
    """By rank 0, in the run that it signed in for: that is none of an earlier start."""
    open_run(agents.meeting, "this")
    box = agents.run()
    box.put("roster", encode(Roster({0: "a"}, "this", "gloo", next_s=15.0)))
    ranks = agents.ranks(0, 0)
    ranks.start([1])
    box.get("seat/0", WAIT_S)
    box.put("late/0", True)
    (ended,) = ranks.wait(WAIT_S).values()
    assert ended.code == 3
    assert ended.seconds < JOIN_S
    assert "signed in too late" in " ".join(ended.stderr.split())
