"""Time that a run without --timeout gets in addition: how much, for what, and who knows of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.gather.context import (
    OWN_RESERVE_S,
    RESERVE_S,
    Run,
    RunConfig,
    StartTime,
    in_words,
    more_s,
    time_limit,
)
from nccl_doctor.gather.messages import Order
from nccl_doctor.gather.progress import Progress
from nccl_doctor.model.check import Check
from nccl_doctor.model.codec import MOST_MORE_S
from nccl_doctor.model.findings import Round
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.options import Options
from nccl_doctor.registry import Registry
from nccl_doctor.system.deadline import MoreTime
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster
from tests.support.rows import each_row
from tests.unit.test_group_start import seen

LIMIT_S = 120.0
FORMS = CHECKS["collectives"]
CALLS = CHECKS["links"]


def run(left_s: float, backend: str = "nccl", *, grows: bool = True) -> Run:
    """Run on rank 0 that has so many seconds left for rounds."""
    options = Options(timeout_s=LIMIT_S, timeout_grows=grows)
    deadline = time.monotonic() + RESERVE_S + left_s
    progress = Progress(shown=False, deadline=deadline)
    config = RunConfig(
        Registry((), (), {}), options, deadline - LIMIT_S, deadline, "nccl-doctor run", "", progress
    )
    return Run(config, Launch(rank=0), {}, backend)


def given(of: Run, check: Check, deadline_s: float, needs_s: float, account: Any = None) -> int:
    """Seconds that the run has in addition, once room was made for a round."""
    starts = StartTime(of) if account is None else account
    starts.make_room(check, Round("r", ((0, 1),), deadline_s), needs_s)
    return of.more_s


@each_row(
    ("given_s", "lacks_s", "starts_s", "seconds"),
    [
        (0, 10.2, 60.0, 11),
        (0, 90.0, 60.0, 60),  # no more than starts account for
        (40, 10.0, 60.0, 50),
        (40, 10.0, 45.5, 45),
        (40, 10.0, 5.0, 40),  # never less than before
        (40, -100.0, 500.0, 40),
        (400, 300.0, 1e6, MOST_MORE_S),
        (0, 0.5, 0.0, 0),
    ],
)
def test_what_lacks_is_given_as_far_as_starts_account_for_it(
    given_s: int, lacks_s: float, starts_s: float, seconds: int
) -> None:
    assert more_s(given_s, lacks_s, starts_s) == seconds


def test_a_round_that_lacks_time_for_its_start_gets_it() -> None:
    short = run(30.0)
    assert given(short, FORMS, 81.0, 90.0) == 61  # of 81 s, 20 are the user's own
    assert short.left() == pytest.approx(91.0, abs=1.0)
    assert given(run(30.0), FORMS, 81.0, 60.0) in {30, 31}  # no more than it lacks


@each_row(
    ("of", "check", "deadline_s"),
    [
        (run(1e6), FORMS, 81.0),  # it lacks nothing
        (run(30.0, "gloo"), FORMS, 81.0),
        (run(30.0, grows=False), FORMS, 81.0),  # --timeout was given
        (run(30.0), CALLS, 81.0),  # it forms no group
        (run(10.0), FORMS, 20.0),  # nothing in it is for a start
    ],
)
def test_nobody_else_gets_more(of: Run, check: Check, deadline_s: float) -> None:
    before = of.deadline
    assert given(of, check, deadline_s, 90.0) == 0
    assert of.deadline == before


def test_starts_that_were_seen_count_too_and_nothing_else() -> None:
    slow = run(30.0)
    starts = StartTime(slow)
    starts.signed_in(seen(start_s=21.4))
    starts.note(FORMS, Round("first", ((0,),), 102.0), 55.0)
    starts.note(FORMS, Round("world", ((0, 1),), 22.0), 22.0)  # of a hang, only its start
    starts.note(CALLS, Round("pairs", ((0, 1),), 500.0), 400.0)
    assert given(slow, FORMS, 75.0, 1000.0, starts) == 22 + 55 + 2 + 55
    fast = run(5.0)
    starts = StartTime(fast)
    starts.signed_in(seen(start_s=0.4))
    for _ in range(8):
        starts.note(FORMS, Round("r", ((0, 1),), 21.0), 20.9)  # eight rounds hang
    assert given(fast, FORMS, 21.0, 30.0, starts) == 1 + 8 + 1


def test_a_start_that_was_not_measured_counts_nothing() -> None:
    fast = run(5.0)
    starts = StartTime(fast)
    starts.signed_in(make_cluster(backend="nccl"))
    assert given(fast, FORMS, 20.5, 90.0, starts) == 0


def test_the_end_is_bounded_whatever_is_slow() -> None:
    slow = run(30.0)
    starts = StartTime(slow)
    first = slow.deadline
    for _ in range(50):
        round_ = Round("r", ((0, 1),), 1000.0)
        starts.make_room(FORMS, round_, 1000.0)
        starts.note(FORMS, round_, 1000.0)
    assert slow.deadline == first + MOST_MORE_S


def test_who_follows_an_order_ends_as_late_and_no_later() -> None:
    follower, careful = run(0.0), run(0.0, grows=False)
    for seconds in (0, 43, 12, MOST_MORE_S):
        order = Order("c", Round("r", ((0, 1),), 5.0), 9.0, seconds)
        follower.put_off(order.more_s)
        careful.put_off(order.more_s)
        if seconds:
            assert follower.more_s == max(seconds, 43)  # never earlier again
        more = follower.more_s + RESERVE_S - OWN_RESERVE_S
        assert follower.left_to_follow() == pytest.approx(more, abs=0.5)
    assert careful.more_s == 0
    assert careful.left() == 0


def test_it_is_said_with_the_seconds_and_the_reason() -> None:
    assert in_words(120.0, 43) == (
        "time limit of the run: 163 s, 43 s more than the default, for the start of GPUs and "
        "communicators (--timeout sets another one)"
    )
    assert time_limit(120.0, 0) == {}
    assert time_limit(120.0, 43) == {
        "time_limit": {
            "seconds": 163.0,
            "default_s": 120.0,
            "why": "the start of GPUs and communicators",
        }
    }


def test_every_check_that_plans_by_the_start_of_groups_says_so() -> None:
    folder = Path(__file__).resolve().parents[2] / "checks"
    by_start = {
        path.relative_to(folder).parts[0].removesuffix(".py")
        for path in folder.rglob("*.py")
        if "attempt_deadline(" in path.read_text()
    }
    assert by_start == {check.name for check in CHECKS.values() if check.forms_groups}


# -- every process that waits for the end -------------------------------------------------------


def test_it_never_gets_less_and_all_forked_processes_read_it() -> None:
    more = MoreTime()
    assert more() == 0
    more.give(0)
    assert more() == 0
    pid = os.fork()
    if pid == 0:
        more.give(43)
        os._exit(0)
    os.waitpid(pid, 0)
    assert more() == 43
    more.give(12)
    assert more() == 43
    more.give(10_000)
    assert more() == MOST_MORE_S


def output_of(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


_WATCHDOG = """
import sys, time
from nccl_doctor.system.watchdog import Watchdog
from nccl_doctor.system.deadline import MoreTime
{before}
began, more = time.monotonic(), MoreTime()
def last_words(why):
    print(time.monotonic() - began >= 1.5, why.partition(" (")[0], flush=True)
    return 3
Watchdog(began + 0.5, last_words, more=more)
more.give(1)
while True:
    time.sleep(0.05)
"""


_NO_THREAD = """
import threading
def refuse(self): raise RuntimeError
threading.Thread.start = refuse
"""


@pytest.mark.parametrize("before", ["", _NO_THREAD])
def test_the_watchdog_waits_as_long(before: str) -> None:
    assert output_of(_WATCHDOG.format(before=before)) == "True the deadline passed\n"


_HOST = """
import os, signal, time
from nccl_doctor.launch.ranks import run_host
from nccl_doctor.system.deadline import MoreTime

began, more = time.monotonic(), MoreTime()

def first(start):
    more.give(2)
    time.sleep(2.2)  # longer than the first deadline and what is added to it
    os.kill(os.getpid(), signal.SIGSTOP)

print(run_host(1, first, None, began + 0.5, more=more), 3.5 < time.monotonic() - began < 6.5)
"""


def test_who_started_the_ranks_waits_as_long_and_then_no_more() -> None:
    assert output_of(_HOST).startswith("3 True\n")


_SUPERVISOR = """
import sys, time
from nccl_doctor.system import supervisor

supervisor.GRACE_S = 0.2
began = time.monotonic()

def program():
    supervisor.set_deadline(supervisor.began() + 0.5)
    supervisor.put_off(supervisor.began() + 2.0)
    supervisor.put_off(supervisor.began() + 1.0)
    time.sleep(60)

code = supervisor.watch(program, supervisor.Terms(limit_s=0.5))
print(code, 2.0 < time.monotonic() - began < 5.0, flush=True)
"""


def test_the_supervisor_waits_as_long_and_then_no_more() -> None:
    said = output_of(_SUPERVISOR)
    assert said.endswith("3 True\n") or said.startswith("3 True\n"), said
    assert "the deadline has passed (2 s)" in said


def test_many_ranks_wait_longer_for_the_next_order_than_few():
    few, many = run(60.0), run(60.0)
    few.launch, many.launch = Launch(rank=0, world_size=8), Launch(rank=0, world_size=16_384)
    assert few.between_orders() < 0.1
    assert 60 < many.between_orders() < 120
    assert run(60.0).between_orders() == 0.0
