"""A job that dies or hangs in a way that its arguments say: FAULT, the rank it strikes, the step.

Run by a launcher, or by itself with RANK and its kin; gloo. Collectives have a time-out of
TIMEOUT_S, and the start has as much as a busy machine needs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import psutil

TIMEOUT_S = 3.0
STEPS = 6


def main() -> None:
    """Train for some steps, until the fault strikes."""
    import torch
    import torch.distributed as dist

    fault, struck, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    if fault == "raises-before-init" and rank == struck:
        raise FileNotFoundError("/data/tokenizer.json")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    world, limit = dist.get_world_size(), timedelta(seconds=TIMEOUT_S)
    group = dist.new_group(timeout=limit)
    odd = dist.new_group([each for each in range(world) if each % 2], timeout=limit)
    dist.barrier()
    values = torch.ones(8)
    for step in range(STEPS):
        here = rank == struck and step == at
        if here:
            strike(fault)
        if fault == "barrier" and step == at:
            dist.monitored_barrier(group, timeout=limit)
        elif fault == "other-operation" and here:
            dist.broadcast(values, 0, group=group)
        elif fault == "other-size" and here:
            dist.all_reduce(torch.ones(8 * 1024), group=group)
        elif fault == "crossed" and step == at and rank % 2:
            dist.all_reduce(values, group=odd)
            dist.barrier(group)
        elif not (fault == "skips" and here):
            dist.all_reduce(values, group=group)
        if rank == 0:
            print(f"step {step} loss {1 / (step + 1):.3f}", flush=True)
    dist.destroy_process_group()


def strike(fault: str) -> None:
    """Strike this rank; return where the fault is in its next calls.

    Sleeps are the fault itself: a rank that is alive and does not come.
    """
    import torch

    if fault == "raises":
        {"text": 1}["labels"]
    elif fault == "asserts":
        raise AssertionError("loss is nan")
    elif fault == "memory":
        torch.empty(1 << 56, dtype=torch.uint8)
    elif fault == "exits":
        sys.exit(3)
    elif fault == "exits-at-once":
        os._exit(7)
    elif fault == "exits-with-text":
        sys.exit("no licence for this dataset")
    elif fault == "ends-early":
        sys.exit(0)
    elif fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])
        time.sleep(60)
    elif fault in ("sleeps", "barrier"):
        time.sleep(60)
    elif fault == "thread":
        threading.Thread(target=lambda: {}["batch"]).start()
        time.sleep(60)
    elif fault == "disk-full":
        torch.save(torch.ones(1 << 20), "/dev/full")
    elif fault == "host-lost":
        stop_host()
    elif fault == "launcher-terminated":
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)


def stop_host() -> None:
    """Stop the launcher and all its ranks, this one last: nothing closes a connection."""
    launcher = psutil.Process(os.getppid())
    ranks = [each for each in launcher.children(recursive=True) if each.pid != os.getpid()]
    for each in (launcher, *ranks, psutil.Process()):
        each.suspend()


SIGNALS = {
    "killed": signal.SIGKILL,
    "crashes": signal.SIGSEGV,
    "aborts": signal.SIGABRT,
    "terminated": signal.SIGTERM,
    "interrupted": signal.SIGINT,
    "stopped": signal.SIGSTOP,
}
"""Faults that are a signal to the rank itself."""

if __name__ == "__main__":
    main()
