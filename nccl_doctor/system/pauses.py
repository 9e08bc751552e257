"""Times in which this process stood still: a signal stopped it, or its machine was suspended.

When it goes on, every deadline is over. Who did not answer meanwhile may have answered in vain, or
have given up waiting for this process: that blames nobody.
"""

from __future__ import annotations

import time

TICK_S = 1.0
"""Time between two ticks of a process that runs."""
LEAST_S = 5.0
"""Shorter ones are those of a busy machine, or of a library that is loaded."""


class Pauses:
    """Pauses of one process, by a thread of it that calls `tick` once a second.

    Times are of CLOCK_BOOTTIME, which goes on while a machine is suspended.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._pauses: list[tuple[float, float]] = []

    @staticmethod
    def now() -> float:
        """Second of the clock that pauses are measured by."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def tick(self) -> None:
        """Note that this process runs."""
        now = self.now()
        if self._last is not None and now - self._last - TICK_S > LEAST_S:
            self._pauses.append((self._last, now))
        self._last = now

    def since(self, began: float) -> float:
        """Seconds of pauses that ended after a second of `now`; 0 where no thread ticks."""
        pauses = list(self._pauses)
        if self._last is not None and self.now() - self._last - TICK_S > LEAST_S:
            pauses.append((self._last, self.now()))  # the thread has not come to it yet
        return sum(end - max(start, began) for start, end in pauses if end > began)


def in_words(seconds: float) -> str:
    """Words for a pause, to follow the name of what stood still."""
    return f"stood still for {seconds:.0f} s (stopped by a signal, or its machine was suspended)"
