"""Time that a participant spends until it has a seat, phase by phase."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from nccl_doctor.toolkit.cpu_wait import CpuWatch


class Joining:
    """Stopwatch of one participant; `seconds` holds the phases that are over, as `Rank.joining`."""

    def __init__(self) -> None:
        """Nothing has begun."""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take the time of a phase; one that is entered again is added up."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._add(name, time.monotonic() - began)

    @contextmanager
    def watched(self, name: str) -> Iterator[None]:
        """The same, with what the threads of this process waited for a CPU meanwhile, and the load
        of the machine for each of its CPUs at the end.
        """
        watch = CpuWatch(process=True)
        try:
            with self.phase(name):
                yield
        finally:
            with suppress(OSError):  # few open files are allowed, and the store took the last one
                self._add("cpu_waited_s", max(0.0, watch.report()["waited_s"] or 0.0))
                self.seconds["load"] = round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)
