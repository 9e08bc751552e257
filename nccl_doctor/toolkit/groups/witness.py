"""Last report of a probe child about its own collectives, shortly before it misses its deadline.

The participant sees a stuck child from outside: its stack, its /proc state, its output. Only the
child itself can report what torch and NCCL keep in its memory, and only from another thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from nccl_doctor.model.check import Context
from nccl_doctor.toolkit.groups.recorder import recorded
from nccl_doctor.toolkit.nccl.ras import ADDRESS, ask_ras_twice

RECORDER, RAS = "recorder", "ras"
"""Names of the reports in `Outcome.witness`."""
LEAD_S, RAS_LEAD_S = 1.0, 2.5
"""Seconds before the deadline, if there is so much time; where RAS is asked, which takes seconds if
a process does not answer."""
_RECORDER_S = 0.3
THREAD = "nccl-doctor-witness"
_ASKERS = 4
"""Number of members of a group that ask RAS: all would get the same answer."""


def watch(ctx: Context) -> None:
    """Start the thread that reports, shortly before `ctx.deadline`, what this child is stuck in.

    A child that finishes in time is not affected: the thread sleeps, and a child ends without
    waiting for it. Without a deadline nothing is started.
    """
    if ctx.deadline == float("inf") or any(t.name == THREAD for t in threading.enumerate()):
        return
    lead_s = min(RAS_LEAD_S if ctx.backend == "nccl" and _asks(ctx) else LEAD_S, ctx.left() / 4)
    args = (ctx, ctx.left() - lead_s)
    threading.Thread(target=_testify, args=args, name=THREAD, daemon=True).start()


def _testify(ctx: Context, after_s: float) -> None:
    time.sleep(after_s)
    # RAS first: it takes no lock of torch's.
    if ctx.backend == "nccl" and _asks(ctx):
        _say(ctx, RAS, lambda: ask_ras_twice(os.environ.get(ADDRESS, ""), ctx.left() - _RECORDER_S))
    _say(ctx, RECORDER, lambda: recorded(ctx.backend))


def _say(ctx: Context, name: str, look: Callable[[], Mapping[str, Any]]) -> None:
    # A failure here must not harm the child's own answer.
    with contextlib.suppress(Exception):
        value = look()
        if value:
            ctx.witness(name, value)


def _asks(ctx: Context) -> bool:
    """True if this member asks RAS: a few do, spread over the group and its hosts."""
    return ctx.position % max(1, len(ctx.group) // _ASKERS) == 0
