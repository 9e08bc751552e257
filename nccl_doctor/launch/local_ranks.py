"""Start the local ranks of this host by forking, where no launcher has done it.

torch's elastic launcher stops every rank as soon as one fails; a doctor goes on without the rank
that died. So the ranks are forked here, from a process that has imported torch once for all.
Forking is safe: that process has no thread but a guardian that waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial

from nccl_doctor.launch import identity
from nccl_doctor.model.layout import Address, HostPlace
from nccl_doctor.toolkit import forks
from nccl_doctor.toolkit.more_time import no_more
from nccl_doctor.toolkit.shortage import shortage_of
from nccl_doctor.toolkit.terminal import complain

CPU_RANKS = 2
"""Ranks on a host without a GPU: the smallest group."""
_GRACE_S = 1.3
"""Time for the ranks to leave after the deadline, and after a signal, by themselves."""
_LEAVE_S = 6.0
_TICK_S = 0.01
_CALM_S = 1.0
"""Longest wait for the end of a rank: should its signal be lost, it is seen all the same."""


class NoGpu(ValueError):
    """GPU ranks were asked for on a host that has no visible GPU."""


class TooManyRanks(ValueError):
    """More ranks were asked for than are examined."""


def num_local_ranks(
    wanted: str,
    environ: Mapping[str, str],
    *,
    of_torchrun: bool = False,
    source: str = "--nproc-per-node",
) -> int:
    """Number of ranks to start: `auto`, `gpu`, `cpu` or a number.

    Args:
        wanted: the word or number.
        environ: the environment.
        of_torchrun: the word is one of torchrun's; to it, `auto` without a GPU is `cpu`
            (determine_local_world_size in torch/distributed/run.py).
        source: who said the word.

    Raises:
        NoGpu: `gpu` on a host without one.
    """
    gpus = identity.num_gpus(environ)
    if wanted == "auto" and (gpus or not of_torchrun):
        return gpus or CPU_RANKS
    if wanted == "gpu":
        if not gpus:
            raise NoGpu(f"{source} gpu: this host has no visible GPU")
        return gpus
    # As torch's cpu_count: the processors that this process may use, not those of the machine. A
    # container with a limit of CPU time may use all of them, and gets as many ranks.
    return len(os.sched_getaffinity(0)) if wanted in ("auto", "cpu") else int(wanted)


Died = Callable[[int, int, str, HostPlace, Address], int]
"""Given local rank, process id and signal of a rank that was killed, the place of its host and the
address of the store: starts a process that tells the coordinator, and returns its process id."""


def run_host(
    nproc: int,
    first: Callable[[Callable[[HostPlace, Address], None]], int],
    sibling: Callable[[HostPlace, Address, int], int],
    deadline: float,
    *,
    wake: int | None = None,
    died: Died | None = None,
    more: Callable[[], float] = no_more,
) -> int:
    """Run the ranks of this host, one process each, and wait for all.

    The first one signs in for the host; the others are forked when it has been given its place, and
    never if the host does not get in, or if a signal came before.

    Args:
        nproc: number of ranks.
        first: body of local rank 0, which calls what it is given once it has its place, with that
            and the address of the store; returns its exit code.
        sibling: body of another local rank, given both and its local rank.
        deadline: `time.monotonic()` second by which the ranks leave by themselves; what is still
            there a moment later is killed.
        wake: descriptor from which the numbers of signals are read, if they are caught already.
        died: see `Died`.
        more: seconds by which the deadline is put off meanwhile.

    Returns: the exit code of local rank 0, whose report it is; 3 if it was killed.
    """
    return _Host(nproc, first, sibling, deadline, died, more=more).run(
        _listen() if wake is None else wake
    )


class _Host:
    """The ranks of this host, as the process that forks them sees them."""

    def __init__(
        self,
        nproc: int,
        first: Callable[[Callable[[HostPlace, Address], None]], int],
        sibling: Callable[[HostPlace, Address, int], int],
        deadline: float,
        died: Died | None,
        *,
        more: Callable[[], float],
    ) -> None:
        self._nproc = nproc
        self._first = first
        self._sibling = sibling
        self._first_deadline, self._more = deadline, more
        self._died = died
        self._running: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._messengers: set[int] = set()
        self._place: tuple[HostPlace, Address] | None = None
        self._stopped = ""
        self._interrupted = False
        self._killed = False

    def run(self, wake: int) -> int:
        """Fork them, and wait for all; `wake` as for `run_host`."""
        word, word_end = os.pipe()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # its number comes by `wake`, too

        def start_siblings(place: HostPlace, meeting: Address) -> None:
            os.write(word_end, json.dumps([vars(place), meeting]).encode())

        with contextlib.suppress(BlockingIOError):
            self._running[forks.fork_child(partial(self._first, start_siblings))] = 0
        if not self._running:  # no process is to be had: its report says so
            return self._first(start_siblings)
        os.close(word_end)
        listening = [word] if wake < 0 else [word, wake]
        while self._running or self._messengers:
            readable, _, _ = select.select(listening, [], [], self._calm_s())
            for number in os.read(wake, 256) if wake in readable else b"":
                if number != signal.SIGCHLD:
                    self._pass_on(number)
            if word in readable:
                listening.remove(word)
                if (message := os.read(word, 4096)) and not self._interrupted:
                    self._start_siblings(message)
            while (self._running or self._messengers) and self._reap():
                pass
            if not self._ends_late():
                break
        os.close(word)
        if 0 not in self._codes:
            how = "waits in the kernel and cannot be killed"
        elif self._stopped:
            how = f"was stopped (state {self._stopped}), and killed at the deadline"
        elif self._codes[0] < 0:
            how = f"was killed by {forks.signal_name(-self._codes[0])}"
        else:
            return self._codes[0]
        complain(f"local rank 0 {how}: its report, if any, is incomplete")
        return 3

    def _start_siblings(self, message: bytes) -> None:
        place, (host, port) = json.loads(message)
        self._place = HostPlace(**place), (host, port)
        for local in range(1, self._nproc):
            try:
                pid = forks.fork_child(partial(self._sibling, *self._place, local))
            except OSError as error:
                scarce = shortage_of(error)
                complain(f"local rank {local} is not started: {scarce.words if scarce else error}")
                continue
            self._running[pid] = local

    def _pass_on(self, number: int) -> None:
        self._interrupted = True
        self._first_deadline = min(self._deadline, time.monotonic() + _LEAVE_S)
        self._more = no_more
        self._forward(number)

    def _reap(self) -> bool:
        """Take note of a process that has ended. Returns whether there was one."""
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return False
        self._messengers.discard(pid)
        forks.living.discard(pid)
        if pid in self._running:
            local, code = self._running.pop(pid), os.waitstatus_to_exitcode(status)
            self._codes[local] = code
            if code < 0 and self._place and self._died and not (self._killed or self._interrupted):
                name = forks.signal_name(-code)
                with contextlib.suppress(OSError):  # no process is to be had: nobody is told
                    self._messengers.add(self._died(local, pid, name, *self._place))
        return True

    @property
    def _deadline(self) -> float:
        return self._first_deadline + self._more()

    def _calm_s(self) -> float:
        """Seconds in which nothing is to be done, unless a signal, a rank or its end wakes us."""
        left = self._deadline + _GRACE_S - time.monotonic()
        return min(max(left, _TICK_S), _CALM_S)

    def _ends_late(self) -> bool:
        """Kill who is late. Returns False where that does not end them either: they wait in the
        kernel, maybe for ever.
        """
        late_s = time.monotonic() - self._deadline - _GRACE_S
        if late_s > forks.REAP_WAIT_S:
            return False
        if late_s > 0 and not self._killed:
            self._killed = True
            first = [pid for pid, local in self._running.items() if local == 0]
            state = forks.look_at(first[0])[0] if first else ""
            self._stopped = state if state in ("T", "t") else ""
            self._forward(signal.SIGKILL)
        return True

    def _forward(self, number: int) -> None:
        for pid in self._running:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def _listen() -> int:
    """Catch the signals. Returns: the descriptor from which their numbers are read."""
    wake, wake_end = forks.wake_pipe()
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    for number in forks.to_catch():
        signal.signal(number, lambda *_: None)
    return wake
