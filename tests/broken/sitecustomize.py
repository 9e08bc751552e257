"""Break torch in one rank of a test's job, from outside.

This folder goes on the PYTHONPATH of a rank, and TEST_BREAK names the fault. The rank's supervisor
stays whole; every child that it forks to look at something meets a broken torch, as it would meet a
broken driver or library.
"""

from __future__ import annotations

import os
import sys
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


FAULTS = {fault.__name__: fault for fault in (wrong_result,)}


def _break() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None:
        FAULTS[os.environ["TEST_BREAK"]](dist)


if "TEST_BREAK" in os.environ:
    os.register_at_fork(after_in_child=_break)
