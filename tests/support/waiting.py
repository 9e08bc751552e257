"""Waiting for what a program shows, and never for a number of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0
"""What comes within a second on a quiet machine has come by then on a busy one."""
_LOOK_S = 0.02


def comes(look: Callable[[], T], within_s: float = PATIENCE_S, *, every_s: float = _LOOK_S) -> T:
    """Look again and again until there is something, for `within_s` seconds at most.

    Returns: what the last look returned.
    """
    end = time.monotonic() + within_s
    while not (found := look()) and time.monotonic() < end:
        time.sleep(every_s)
    return found


def until(
    look: Callable[[], T],
    within_s: float = PATIENCE_S,
    *,
    every_s: float = _LOOK_S,
    said: Callable[[], object] = lambda: "",
) -> T:
    """Look again and again until there is something, and return it.

    Raises:
        AssertionError: there was nothing within `within_s` seconds; with what `said` returns.
    """
    found = comes(look, within_s, every_s=every_s)
    assert found, f"nothing within {within_s:g} s; {said()}"
    return found
