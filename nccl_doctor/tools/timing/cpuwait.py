"""Whether a measurement had the CPU that it needed: how long its thread was ready and not run."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SCHEDSTAT = Path("/proc/thread-self/schedstat")

_STARVED_SHARE = 0.1
_PREEMPTIONS_PER_S = 100


class CpuWatch:
    """Watches the calling thread from when it was made.

    The time spent waiting for a CPU is the second number of /proc/PID/schedstat, nanoseconds (see
    Documentation/scheduler/sched-stats.rst in the kernel); None where the kernel does not count it.
    """

    def __init__(self) -> None:
        self._started = self._read()

    def report(self) -> dict[str, Any]:
        """Since then: `wall_s`, `cpu_s`, `waited_s` (or None), `preempted` (involuntary)."""
        now = self._read()
        wall, cpu, waited, preempted = (
            None if new is None or old is None else new - old
            for new, old in zip(now, self._started, strict=True)
        )
        return {
            "wall_s": round(wall or 0.0, 4),
            "cpu_s": round(cpu or 0.0, 4),
            "waited_s": None if waited is None else round(waited, 4),
            "preempted": preempted,
        }

    @staticmethod
    def _read() -> tuple[float, float, float | None, int]:
        try:
            waited = int(_SCHEDSTAT.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            waited = None
        preempted = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        return time.monotonic(), time.thread_time(), waited, preempted


def load_average() -> float | None:
    """Of the last minute, as /proc/loadavg has it; None where there is none."""
    try:
        return float(Path("/proc/loadavg").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None


def was_starved(report: Mapping[str, Any] | None) -> bool:
    """Whether what a thread measured says more of its own CPU than of what it measured.

    Args:
        report: of a `CpuWatch`; None where the thread did not live to make one.
    """
    if not report or report["wall_s"] <= 0:
        return True
    if report["waited_s"] is not None:
        return bool(report["waited_s"] > _STARVED_SHARE * report["wall_s"])
    return bool(report["preempted"] > _PREEMPTIONS_PER_S * report["wall_s"])
