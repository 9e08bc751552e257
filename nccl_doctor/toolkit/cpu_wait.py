"""CPU time that a measurement lacked: how long its threads were ready but did not run."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_THREAD = Path("/proc/thread-self")

_STARVED_SHARE = 0.1
_PREEMPTIONS_PER_S = 100


def waited_s(pid: int | None = None) -> float | None:
    """Seconds that the threads of a process, of this one without `pid`, were ready and did not run;
    None where the kernel does not count that, or the process is gone.

    It is the second number of /proc/PID/schedstat, in nanoseconds (Documentation/scheduler/
    sched-stats.rst in the kernel).
    """
    return _waited_s(Path("/proc", "self" if pid is None else str(pid), "task").glob("*"))


def _waited_s(threads: Iterable[Path]) -> float | None:
    try:
        return sum(int((each / "schedstat").read_text().split()[1]) for each in threads) / 1e9
    except (OSError, IndexError, ValueError):
        return None


class CpuWatch:
    """Watches the calling thread, or all of this process, from its creation on."""

    def __init__(self, *, process: bool = False) -> None:
        self._process = process
        self._started = self._read()

    def report(self) -> dict[str, Any]:
        """`wall_s`, `cpu_s`, `waited_s` and `preempted` (involuntary) since then, or None."""
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

    def _read(self) -> tuple[float, float, float | None, int | None]:
        waited = waited_s() if self._process else _waited_s([_THREAD])
        who = resource.RUSAGE_SELF if self._process else resource.RUSAGE_THREAD
        spent = time.process_time() if self._process else time.thread_time()
        try:
            preempted = resource.getrusage(who).ru_nivcsw
        except OSError:  # a sandbox refuses it
            preempted = None
        return time.monotonic(), spent, waited, preempted


def was_starved(report: Mapping[str, Any] | None) -> bool:
    """True if a thread lacked CPU time, so that its measurement cannot be trusted.

    Args:
        report: of a `CpuWatch`; None if the thread ended before it made one.
    """
    if not report or report["wall_s"] <= 0:
        return True
    if report["waited_s"] is not None:
        return bool(report["waited_s"] > _STARVED_SHARE * report["wall_s"])
    if report["preempted"] is None:
        return True
    return bool(report["preempted"] > _PREEMPTIONS_PER_S * report["wall_s"])


def ran_share(report: Mapping[str, Any] | None) -> float:
    """Share of the time, 0 to 1, in which a thread did not wait for its CPU.

    Where the kernel does not count how long it waited: 0 if it lacked CPU time, else 1.

    Args:
        report: of a `CpuWatch`; None if the thread ended before it made one.
    """
    if not report or report["wall_s"] <= 0 or report["waited_s"] is None:
        return 0.0 if was_starved(report) else 1.0
    return float(max(0.0, 1 - report["waited_s"] / report["wall_s"]))
