"""Break torch in one rank of a test's job, from outside.

This folder goes on the PYTHONPATH of a rank, and TEST_BREAK names the fault. The rank's supervisor
stays whole; every child that it forks to look at something meets a broken torch, as it would meet a
broken driver or library.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def wrong_result(dist: Any) -> None:
    """Every all-reduce of this rank gives it 1 too much in the first element."""
    real = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        work = real(tensor, *args, **kwargs)
        if work is None:
            tensor.view(-1)[0] += 1
        return work

    dist.all_reduce = all_reduce


def _among_neighbours(dist: Any, act: Callable[[], Any]) -> None:
    """Act before each all-reduce of neighbouring ranks that are not all ranks."""
    real = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        members = dist.get_process_group_ranks(group) if group is not None else []
        few = 1 < len(members) < dist.get_world_size()
        if few and members[-1] - members[0] == len(members) - 1:
            act()
        return real(tensor, *args, group=group, **kwargs)

    dist.all_reduce = all_reduce


def stops_among_neighbours(dist: Any) -> None:
    """As under a debugger, but only in the innermost dimension of a mesh."""
    _among_neighbours(dist, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def waits_among_neighbours(dist: Any) -> None:
    """For ever, so that it looks like one that waits for another."""
    _among_neighbours(dist, lambda: time.sleep(3600))


def no_device_mesh(dist: Any) -> None:
    """A torch before 2.2."""
    sys.modules["torch.distributed.device_mesh"] = None  # type: ignore[assignment]


FAULTS = {
    fault.__name__: fault
    for fault in (
        wrong_result,
        stops_among_neighbours,
        waits_among_neighbours,
        no_device_mesh,
    )
}


def _break() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None:
        FAULTS[os.environ["TEST_BREAK"]](dist)


if "TEST_BREAK" in os.environ:
    os.register_at_fork(after_in_child=_break)
