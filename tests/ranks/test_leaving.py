"""Real children that hold files in /dev/shm as NCCL does: however one ends, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.observe import probe
from nccl_doctor.system import forks, leaving
from tests.broken import broken
from tests.ranks.ranks import Ranks
from tests.support.nccl_files import FOLDER, KEPT, left, nccl_file
from tests.support.waiting import until

DEADLINE_S = 1.0
SLACK_S = 2.5  # examining a stuck child, killing it, and a busy machine


@pytest.fixture
def tag() -> Iterator[str]:
    name = f"test{uuid.uuid4().hex[:8]}"
    yield name
    for path in FOLDER.glob(f"nccl-{name}*"):
        path.unlink()


def outcome_of(work: Callable[[Any], Any], deadline_s: float = 20.0) -> Outcome:
    (outcome,) = probe.run([probe.ProbeJob("test", work, time.monotonic() + deadline_s)])
    return outcome


def fine() -> dict[str, Any]:
    return {"fine": True}


def fails() -> dict[str, Any]:
    raise RuntimeError("NCCL error")


def sleeps() -> dict[str, Any]:
    time.sleep(600)
    return {}


def is_stopped() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSTOP)
    return {}


@pytest.mark.parametrize("keep_open", [True, False], ids=["open", "mapped"])
@pytest.mark.parametrize(
    ("end", "status"),
    [
        (fine, OutcomeStatus.OK),
        (fails, OutcomeStatus.RAISED),
        (sleeps, OutcomeStatus.HUNG),
        (is_stopped, OutcomeStatus.HUNG),
    ],
)
def test_files_of_a_child_are_removed_however_it_ends(
    tag: str, end: Callable[[], dict[str, Any]], status: OutcomeStatus, keep_open: bool
) -> None:
    def work(line: Any) -> dict[str, Any]:
        leaving.at_end(lambda: None)  # it has groups
        nccl_file(tag, keep_open=keep_open)
        nccl_file(tag, keep_open=keep_open)
        assert len(left(tag)) == 2
        return end()

    outcome = outcome_of(work, DEADLINE_S if status is OutcomeStatus.HUNG else 20.0)
    assert outcome.status is status
    assert left(tag) == []


def test_files_of_others_stay(tag: str) -> None:
    nccl_file(tag)  # of a job that runs now
    try:
        with subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        ) as other:
            forks.kill(other.pid)
        assert len(left(tag)) == 1
    finally:
        handle, memory = KEPT.pop()
        memory.close()
        os.close(handle)
    outcome = outcome_of(lambda line: fine())
    assert outcome.status is OutcomeStatus.OK
    assert len(left(tag)) == 1


def test_groups_end_in_order_and_what_their_end_leaves_is_removed(tag: str) -> None:
    """As NCCL does where another rank of the host still has its reference: closed, not unlinked."""
    ended = FOLDER / f"nccl-{tag}-ended"

    def end_groups() -> None:
        handle, memory = KEPT.pop()
        memory.close()
        os.close(handle)
        ended.touch()

    def work(line: Any) -> dict[str, Any]:
        nccl_file(tag)
        leaving.at_end(end_groups)
        return fine()

    assert outcome_of(work).facts == fine()
    assert left(tag) == [ended.name]


def test_an_end_that_blocks_costs_no_result_and_little_time(
    tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "MOST_S", 1.0)

    def work(line: Any) -> dict[str, Any]:
        nccl_file(tag)
        leaving.at_end(threading.Event().wait)
        return fine()

    began = time.monotonic()
    outcome = outcome_of(work, deadline_s=60.0)
    assert outcome.facts == fine()
    assert time.monotonic() - began < 1.0 + SLACK_S
    assert left(tag) == []


def test_an_end_that_blocks_is_over_by_the_deadline(tag: str) -> None:
    def work(line: Any) -> dict[str, Any]:
        nccl_file(tag)
        leaving.at_end(threading.Event().wait)
        return fine()

    began = time.monotonic()
    outcome = outcome_of(work, DEADLINE_S)
    assert (outcome.status, outcome.facts) == (OutcomeStatus.OK, fine())
    assert time.monotonic() - began < DEADLINE_S + SLACK_S
    assert left(tag) == []


def test_a_child_whose_group_failed_does_not_wait_for_its_peers(tag: str) -> None:
    def work(line: Any) -> dict[str, Any]:
        nccl_file(tag)
        leaving.at_end(threading.Event().wait)
        return fails()

    began = time.monotonic()
    assert outcome_of(work, deadline_s=60.0).status is OutcomeStatus.RAISED
    assert time.monotonic() - began < leaving.MOST_S / 2
    assert left(tag) == []


def test_the_last_resort_removes_the_files_of_every_child(tag: str) -> None:
    def serve() -> None:
        nccl_file(tag, keep_open=False)
        time.sleep(600)

    pid = forks.fork_service("test", serve)
    assert len(until(lambda: left(tag))) == 1
    forks.kill_living()
    forks.stop_service(pid)
    assert left(tag) == []


def test_nothing_is_left_of_a_program_that_its_supervisor_ends(tag: str, tmp_path: Path) -> None:
    """The program is stopped, and so never ends its own child."""
    script = tmp_path / "program.py"
    script.write_text(
        f"""
import os, signal, sys, time
from nccl_doctor.system import forks, supervisor
from tests.support.nccl_files import left, nccl_file
from tests.support.waiting import until

def program():
    forks.fork_child(lambda: (nccl_file({tag!r}), time.sleep(600)) and 0)
    until(lambda: left({tag!r}))
    supervisor.set_deadline(time.monotonic())
    os.kill(os.getpid(), signal.SIGSTOP)

supervisor.GRACE_S = 0.2
sys.exit(supervisor.watch(program, supervisor.Terms(limit_s=60)))
"""
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, script], env=environ, timeout=60, capture_output=True, check=False
    )
    assert ended.returncode == 3
    assert left(tag) == []


def test_ranks_end_their_groups_and_leave_no_file_of_nccl(tag: str, tmp_path: Path) -> None:
    """With a stand-in for NCCL whose groups map files, and destroyed leave some of them."""
    change = {**broken("maps_files"), "TEST_FILES": str(FOLDER / f"nccl-{tag}")}
    change["TEST_ENDED"] = str(tmp_path / "ended")
    ranks = Ranks(
        tmp_path,
        2,
        ["--backend", "nccl", "--select", "collectives", "--collective-timeout", "8"],
        changes=dict.fromkeys(range(2), change),
    )
    ended = ranks.wait(60)
    assert {each.code for each in ended.values()} == {0}, ended
    assert ranks.report()["findings"] == []
    words = (tmp_path / "ended").read_text().split()
    assert words.count("formed") == words.count("destroyed") > 0
    assert left(tag) == []
