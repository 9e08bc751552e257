"""Start the local ranks of this host by forking, where no launcher has done it.

torch's elastic launcher stops every rank as soon as one fails; a doctor goes on without the rank
that died. So the ranks are forked here, from a process that has imported torch once for all.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

from nccl_doctor import identity, probe

DEFAULT_PORT = 29500
"""torchrun's."""
CPU_RANKS = 2
"""Ranks on a host without a GPU: the fewest that have to meet."""
_GRACE_S = 10.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class NoGpu(ValueError):
    """GPU ranks were asked for on a host that has no visible GPU."""


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


def rank_environment(local_rank: int, nproc: int, address: str, port: int) -> dict[str, str]:
    """Variables of one rank of a one-host job, as torchrun would set them."""
    return {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def run_local(nproc: int, rank: Callable[[int], int], deadline: float) -> int:
    """Run `rank(local_rank)` in one process each, and wait for all.

    Args:
        nproc: number of ranks.
        rank: body of one rank; returns its exit code.
        deadline: `time.monotonic()` second by which the ranks leave by themselves; what is still
            there some seconds later is killed.

    Returns: the exit code of rank 0, whose report it is; 3 if it was killed.
    """
    pids = {probe.fork_child(partial(rank, local)): local for local in range(nproc)}
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: _forward(pids, number))
    codes: dict[int, int] = {}
    killed = False
    while len(codes) < nproc:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pids[pid]] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline + _GRACE_S and not killed:
            killed = True
            _forward(pids, signal.SIGKILL)
        elif not pid:
            time.sleep(0.01)
    if codes[0] < 0:
        name = signal.Signals(-codes[0]).name
        sys.stderr.write(f"nccl-doctor: rank 0 was killed by {name}: there is no report\n")
        return 3
    return codes[0]


def _forward(pids: Mapping[int, int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
