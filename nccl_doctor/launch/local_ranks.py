"""Start the local ranks of this host by forking, where no launcher has done it.

torch's elastic launcher stops every rank as soon as one fails; a doctor goes on without the rank
that died. So the ranks are forked here, from a process that has imported torch once for all.
Forking is safe: that process has no thread but a guardian that waits.
"""

from __future__ import annotations

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
from nccl_doctor.toolkit.terminal import complain

CPU_RANKS = 2
"""Ranks on a host without a GPU: the smallest group."""
_GRACE_S = 10.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class NoGpu(ValueError):
    """GPU ranks were asked for on a host that has no visible GPU."""


class TooManyRanks(ValueError):
    """More ranks were asked for than are examined."""


def num_local_ranks(wanted: str, environ: Mapping[str, str]) -> int:
    """Number of ranks to start: `auto`, `gpu`, `cpu` or a number.

    Raises:
        NoGpu: `gpu` on a host without one.
    """
    gpus = identity.num_gpus(environ)
    if wanted == "auto":
        return gpus or CPU_RANKS
    if wanted == "gpu":
        if not gpus:
            raise NoGpu("--nproc-per-node gpu: this host has no visible GPU")
        return gpus
    return (os.cpu_count() or 1) if wanted == "cpu" else int(wanted)


def run_host(
    nproc: int,
    first: Callable[[Callable[[HostPlace, Address], None]], int],
    sibling: Callable[[HostPlace, Address, int], int],
    deadline: float,
) -> int:
    """Run the ranks of this host, one process each, and wait for all.

    The first one signs in for the host; the others are forked when it has been given its place, and
    never if the host does not get in.

    Args:
        nproc: number of ranks.
        first: body of local rank 0, which calls what it is given once it has its place, with that
            and the address of the store; returns its exit code.
        sibling: body of another local rank, given both and its local rank.
        deadline: `time.monotonic()` second by which the ranks leave by themselves; what is still
            there some seconds later is killed.

    Returns: the exit code of local rank 0, whose report it is; 3 if it was killed.
    """
    word, word_end = os.pipe()

    def start_siblings(place: HostPlace, meeting: Address) -> None:
        os.write(word_end, json.dumps([vars(place), meeting]).encode())

    running = {forks.fork_child(partial(first, start_siblings)): 0}
    os.close(word_end)
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: _forward(running, number))
    codes: dict[int, int] = {}
    waiting, killed = True, False
    while running:
        if waiting and select.select([word], [], [], 0)[0]:
            waiting = False
            if message := os.read(word, 4096):
                place, (host, port) = json.loads(message)
                body = partial(sibling, HostPlace(**place), (host, port))
                for local in range(1, nproc):
                    running[forks.fork_child(partial(body, local))] = local
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline + _GRACE_S + forks.REAP_WAIT_S:
            break  # what SIGKILL does not end either waits in the kernel, maybe for ever
        elif time.monotonic() > deadline + _GRACE_S and not killed:
            killed = True
            _forward(running, signal.SIGKILL)
        elif not pid:
            time.sleep(0.01)
    os.close(word)
    if 0 not in codes:
        how = "waits in the kernel and cannot be killed"
    elif codes[0] < 0:
        how = f"was killed by {forks.signal_name(-codes[0])}"
    else:
        return codes[0]
    complain(f"local rank 0 {how}: its report, if any, is incomplete")
    return 3


def _forward(pids: Mapping[int, int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
