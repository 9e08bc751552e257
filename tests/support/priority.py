"""Programs whose speed is tested run before whatever else the machine does, where they may."""

from __future__ import annotations

import os
from contextlib import suppress

_NAME = "TEST_GOES_FIRST"
FIRST = {_NAME: "1"}
"""Environment of a forked program that goes first, with all that it starts."""


def may_go_first() -> bool:
    """Return whether this process may run before others."""
    if not hasattr(os, "sched_setscheduler"):  # not Linux
        return False
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        _go_first()
    except PermissionError:
        return False
    os.sched_setscheduler(0, policy, param)
    return True


def go_first_if_asked() -> None:
    """Run before others from now on, if the environment says so."""
    if _NAME in os.environ:
        with suppress(PermissionError):
            _go_first()


def _go_first() -> None:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
