"""The local ranks that this host forks by itself, and what they are sent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nccl_doctor.gather.run import ranks_here
from nccl_doctor.launch.detect import detect
from nccl_doctor.launch.ranks import NoGpu, host_flags, num_local_ranks
from nccl_doctor.model.options import Flags
from nccl_doctor.system import forks
from tests.support import disks
from tests.support.launches import KUBEFLOW_2

START_S = 10.0  # of an interpreter, on a busy machine

_HOST = """
import os, signal, sys, time
from nccl_doctor.model.layout import HostPlace
from nccl_doctor.launch.ranks import run_host

sent = []
really = os.kill
os.kill = lambda pid, number: (sent.append(number), really(pid, number))
host = os.getpid()

def first(start_siblings):
    start_siblings(HostPlace(node_rank=0, first_rank=0, nproc=3, world_size=3), ("127.0.0.1", 1))
    return 4

def sibling(place, meeting, local):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # as a watchdog does
    if local == 1:
        return 0
    time.sleep(0.5)  # the others have left, and were reaped
    really(host, signal.SIGTERM)
    time.sleep(20)

print(run_host(3, first, sibling, time.monotonic() + 30), sent)
"""


def test_who_was_reaped_is_sent_no_signal() -> None:
    """Its process id may be somebody else's by then."""
    done = subprocess.run(
        [sys.executable, "-c", _HOST], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "4 [15]\n", done


_TAKEN_OVER = """
import os, select, signal, time
from nccl_doctor.system.watchdog import Watchdog

wake = Watchdog(time.monotonic() + 30, lambda reason: 3).hand_over()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.3)
print(list(os.read(wake, 256)) if select.select([wake], [], [], 0)[0] else "somebody read it")
"""


def test_a_watchdog_leaves_the_signals_to_who_took_over() -> None:
    """Else the process that forks the ranks would wait for ever for what its own thread has read:
    the end of a rank is a signal too.
    """
    done = subprocess.run(
        [sys.executable, "-c", _TAKEN_OVER], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "[15]\n", done


_KILLED = """
import os, time
from nccl_doctor.launch.ranks import run_host

print(run_host(1, lambda start: os.kill(os.getpid(), NUMBER), None, time.monotonic() + 30))
"""


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "signal 40")])
def test_a_first_rank_that_is_killed_is_told(number: int, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED.replace("NUMBER", str(number))],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout == "3\n"
    assert done.stderr == (
        f"nccl-doctor: local rank 0 was killed by {name}: its report, if any, is incomplete\n"
    )


_NO_MESSENGER = """
import errno, os, signal, time
from nccl_doctor.model.layout import HostPlace
from nccl_doctor.launch.ranks import run_host

def first(start_siblings):
    start_siblings(HostPlace(node_rank=0, first_rank=0, nproc=2, world_size=2), ("127.0.0.1", 1))
    time.sleep(0.5)
    return 4

def sibling(place, meeting, local):
    os.kill(os.getpid(), signal.SIGKILL)

def died(*_):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")

print(run_host(2, first, sibling, time.monotonic() + 30, died=died))
"""


def test_where_nobody_can_be_sent_to_tell_of_a_killed_rank_the_host_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NO_MESSENGER],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("4\n", "")


_WAITING = """
import resource, time
from nccl_doctor.launch.ranks import run_host

def first(start):
    time.sleep(1.5)
    return 5

print(run_host(1, first, None, time.monotonic() + 30))
print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw)
"""


def test_the_host_sleeps_while_its_ranks_work() -> None:
    """A run may last for minutes, beside the work of others."""
    done = subprocess.run(
        [sys.executable, "-c", _WAITING], capture_output=True, text=True, timeout=30, check=False
    )
    code, waits = map(int, done.stdout.split())
    assert code == 5, done
    assert waits < 60  # 150 looks in 1.5 s would be too many; the start takes some, too


_STOPPED = """
import os, signal, time
from nccl_doctor.launch.ranks import run_host

def first(start):
    os.kill(os.getpid(), signal.SIGSTOP)
    return 0

began = time.monotonic()
print(run_host(1, first, None, began + 0.5), time.monotonic() - began < 0.5 + 2)
"""


def test_a_rank_that_is_stopped_costs_no_more_than_the_deadline() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STOPPED], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "3 True\n"
    assert "local rank 0 was stopped (state T), and killed at the deadline" in done.stderr


_STUCK = """
import sys, time
from pathlib import Path

import pytest
from nccl_doctor.launch import ranks
from nccl_doctor.model.layout import HostPlace

ranks._GRACE_S = 0.5

def first(start_siblings):
    start_siblings(HostPlace(node_rank=0, first_rank=0, nproc=2, world_size=2), ("127.0.0.1", 1))
    Path(sys.argv[1], "file").write_text("x")
    return 0

print(ranks.run_host(2, first, lambda place, meeting, local: 0, time.monotonic() + 1))
"""


def test_one_that_cannot_be_killed_is_not_awaited(tmp_path: Path) -> None:
    with disks.frozen(tmp_path) as disk:
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", _STUCK, str(disk)],
            stdout=(tmp_path / "out").open("w"),
            stderr=(tmp_path / "err").open("w"),
            timeout=30,
            check=False,
        )
        assert time.monotonic() - started < 1 + 0.5 + forks.REAP_WAIT_S + START_S
    assert (done.returncode, (tmp_path / "out").read_text()) == (0, "3\n")
    assert "waits in the kernel and cannot be killed" in (tmp_path / "err").read_text()


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_ranks_on_processors_are_as_many_as_torch_counts() -> None:
    """In a process that may use one processor only, as under taskset or Slurm's binding."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert num_local_ranks("cpu", {}) == 1
        assert num_local_ranks("auto", NO_GPU, of_torchrun=True) == 1
        assert num_local_ranks("auto", NO_GPU) == 2
    finally:
        os.sched_setaffinity(0, before)
    assert num_local_ranks("cpu", {}) == len(before)


def test_a_pod_starts_as_many_ranks_as_torchrun_would() -> None:
    """Without a line of torchrun, its variable alone tells the number."""

    def here(word: str, **own: str) -> int:
        pod = {**KUBEFLOW_2, **NO_GPU, "PET_NPROC_PER_NODE": word}
        return ranks_here(Flags(**own), host_flags(detect(pod), pod), pod)

    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert [here("auto"), here("cpu"), here("auto", nproc_per_node="auto")] == [1, 1, 1]
    finally:
        os.sched_setaffinity(0, before)
    assert [here("8"), here("8", nproc_per_node="auto")] == [8, 8]
    assert here("auto", nproc_per_node="3") == 3
    assert here("xpu") == here("") == 2  # no word that counts something here
    with pytest.raises(NoGpu, match=r"^PET_NPROC_PER_NODE gpu: this host has no visible GPU"):
        here("gpu")
