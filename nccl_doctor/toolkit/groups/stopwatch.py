"""Times of collectives and of some computing on this rank.

Runs in a probe child, on a default group that is formed. Computing and network are timed
separately, and never added into one number.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nccl_doctor.toolkit.cpu_wait import CpuWatch

_LEAST, _MOST = 3, 50
"""Timed repetitions of the largest size, and of any."""
_BULK = 1 << 16
"""The time of fewer bytes is latency, and does not predict the time of a larger size."""
_SMALLER = 0.25
"""Share of the time of the largest size for each smaller one, by which nothing is compared: one
repetition does.
"""
_MATRIX = {"cpu": 384, "cuda": 4096}
_MULTIPLICATIONS = 5


class Stopwatch:
    """Times the work of this rank on one device."""

    def __init__(self, breadcrumb: Callable[..., None], device: Any, budget_s: float) -> None:
        """`device` is that of the backend (`torch.device`); the largest size takes `budget_s`."""
        self._breadcrumb = breadcrumb
        self._device = device
        self._budget_s = budget_s

    def computing(self) -> dict[str, Any]:
        """Multiply square float32 matrices, on one thread if the device is the CPU.

        Returns: `what`, `seconds` of the fastest of a few, and `cpu`: as `CpuWatch.report`.
        """
        import torch

        size = _MATRIX[self._device.type]
        self._breadcrumb("compute", size=size)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        left = torch.ones(size, size, device=self._device)
        watch = CpuWatch(process=True)
        times = []
        for _ in range(_MULTIPLICATIONS):
            self._settle()
            started = time.perf_counter()
            left @ left
            self._settle()
            times.append(time.perf_counter() - started)
        torch.set_num_threads(threads)
        what = f"float32 matrices of {size} multiplied on {self._device.type}"
        return {"what": what, "seconds": min(times[1:]), "cpu": watch.report()}

    def all_reduce(self, name: str, sizes: Sequence[int], left_s: float) -> list[dict[str, Any]]:
        """Sum float32 tensors of some sizes, in bytes, over the default group.

        Returns: for each size `bytes`, `seconds` (the median of the repetitions here), `times`
        (their number) and `cpu`: as `CpuWatch.report`. Sizes that would take longer than about
        `left_s` in all are left out.
        """
        import torch
        import torch.distributed as dist

        end = time.monotonic() + left_s
        found: list[dict[str, Any]] = []
        for size, larger in zip(sizes, [*sizes[1:], None], strict=True):
            data = torch.zeros(max(1, size // 4), device=self._device)
            self._breadcrumb("all_reduce (timed)", group=name, bytes=size)
            dist.all_reduce(data)  # the first one may open connections
            watch = CpuWatch(process=True)
            seconds = [self._time(partial(dist.all_reduce, data))]
            # All ranks must repeat it equally often, and stop after the same size: decided by the
            # slowest rank, and by the one with the least time left.
            # In whole nanoseconds: NVLink SHARP has no maximum of floats.
            mine = [int(each * 1e9) for each in (seconds[0], time.monotonic() - end)]
            said = torch.tensor(mine, dtype=torch.int64, device=self._device)
            dist.all_reduce(said, op=dist.ReduceOp.MAX)
            once, left = max(int(said[0]) / 1e9, 1e-6), -int(said[1]) / 1e9
            budget_s = self._budget_s * (_SMALLER if larger else 1.0)
            times = int(min(_MOST, max(1 if larger else _LEAST, budget_s / once)))
            times = min(times, max(0, int(left / 2 / once)))
            seconds += [self._time(partial(dist.all_reduce, data)) for _ in range(times)]
            found.append(
                {
                    "bytes": data.numel() * 4,
                    "seconds": statistics.median(seconds),
                    "times": len(seconds),
                    "cpu": watch.report(),
                }
            )
            needed = (_LEAST + 2) * once * larger / size if larger and size >= _BULK else 0.0
            if needed > left - times * once:
                break
        return found

    def _time(self, work: Callable[[], Any]) -> float:
        self._settle()
        started = time.perf_counter()
        work()
        self._settle()
        return time.perf_counter() - started

    def _settle(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
