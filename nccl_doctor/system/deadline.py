"""Seconds by which a time limit is put off, known to every process of a host that waits for it.

Each of them reads the same memory, so the one that watches a stopped process knows of it, too.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

from nccl_doctor.model.codec import MOST_MORE_S


class MoreTime:
    """Seconds more, whole ones, at most `MOST_MORE_S`, for this process and what it forks later.

    There is one byte for each second, and the last one that is set counts. So it never gets less,
    whoever writes at the same time, and there is nothing to lock.
    """

    def __init__(self, tell: Callable[[int], None] = lambda seconds: None) -> None:
        """No second more. `tell` is called with the seconds in all whenever they get more."""
        self._seconds = mmap.mmap(-1, MOST_MORE_S)
        self._tell = tell

    def __call__(self) -> int:
        """Seconds more."""
        return self._seconds.rfind(b"\1", 0, MOST_MORE_S) + 1

    def give(self, seconds: int) -> None:
        """Make it so many in all, if that is more than before."""
        seconds = min(seconds, MOST_MORE_S)
        if seconds > self():
            self._seconds[seconds - 1] = 1
            self._tell(seconds)


def no_more() -> int:
    """Seconds more of a time limit that stays as it is: none."""
    return 0
