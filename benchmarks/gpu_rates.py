"""Rates of one GPU as the doctor measures them, beside a plain loop. Needs a GPU.

    python benchmarks/gpu_rates.py [--seconds 5] [--device 0]

The two take turns, three times each, so that temperature and clocks are the same for both. Prints
one line per measure and leaves with 1 where they differ by more than 5 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from nccl_doctor.checks.gpu_work.work import DeviceWork

TURNS = 3
ALLOWED = 0.05
FULL_S = 20.0
"""What the full stress of one GPU may take: two measurements, a pause, and the exact products."""


def plain(torch: Any, device: Any, seconds: float) -> dict[str, float]:
    """What a person would write: fill the queue, wait, and look at the clock."""
    size = 8192
    left = torch.randn(size, size, device=device).bfloat16()
    right = torch.randn(size, size, device=device).bfloat16()
    source = torch.ones(1 << 28, device=device)
    target = torch.empty_like(source)
    return {
        "half": 2 * size**3 * _per_second(torch, lambda: left @ right, seconds / 2),
        "copy": 2 * 4 * (1 << 28) * _per_second(torch, lambda: target.copy_(source), seconds / 4),
    }


def _per_second(torch: Any, work: Callable[[], Any], seconds: float) -> float:
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    started, times = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        for _ in range(20):
            work()
        torch.cuda.synchronize()
        times += 20
    return times / (time.perf_counter() - started)


def main() -> int:
    """Measure by turns and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--device", type=int, default=0)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no GPU that torch can use")
        return 2
    device = torch.device("cuda", args.device)
    work = DeviceWork(lambda step, **details: None, device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    print(f"context: {work.context():.2f} s")
    doctor, loop = [], []
    for _ in range(TURNS):
        doctor.append(work.measure(args.seconds))
        loop.append(plain(torch, device, args.seconds))
    bad = 0
    for measure, scale, unit in (("half", 1e12, "TFLOP/s"), ("copy", 1e9, "GB/s")):
        mine = statistics.median(one[measure] for one in doctor) / scale
        theirs = statistics.median(one[measure] for one in loop) / scale
        off = mine / theirs - 1
        bad += abs(off) > ALLOWED
        print(f"{measure}: doctor {mine:.1f}, plain loop {theirs:.1f} {unit} ({off:+.1%})")
    for measure in ("to_device", "to_host"):
        print(f"{measure}: doctor {doctor[-1][measure] / 1e9:.1f} GB/s")
    started = time.monotonic()
    wrong = work.products() + work.copies()
    work.measure(5.0)
    time.sleep(1.0)
    work.measure(5.0)
    wrong += work.products()
    took = time.monotonic() - started
    print(f"full stress: {took:.1f} s (at most {FULL_S:.0f}), wrong: {wrong or 'nothing'}")
    return int(bool(bad or wrong or took > FULL_S))


if __name__ == "__main__":
    sys.exit(main())
