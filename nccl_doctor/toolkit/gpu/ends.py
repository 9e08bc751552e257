"""Certainty that a GPU, or its driver, kept a process from returning from a call. Pure.

A process in a call to the driver ends, or stands still, for many other reasons: it was killed for
lack of memory, by a scheduler or by a person; it was stopped or frozen; a disk, a file server or a
busy CPU held it up. Only what the kernel or the processor did to it inside the call counts as
certain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.model.findings import Confidence
from nccl_doctor.toolkit.kernel_waits import GPU_DRIVER, cause_of

DRIVER_STEP = "starting the GPU driver"
"""The step of a check that starts CUDA."""

_FAULTS = frozenset(("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP"))
"""Signals for what a process did itself; all others come from outside, or from its limits."""
_STOPPED = ("T", "t")
_FROZEN = ("__refrigerator", "do_freezer_trap", "ptrace_stop", "do_signal_stop")
"""Functions in which a paused container, or a process that somebody traces, waits."""
_MEMORY_OR_DISK = re.compile(
    r"mem_cgroup|shrink_|throttle_|balance_dirty|__?folio|folio_|lock_page|__lock_page|wait_on_page"
    r"|filemap_|swap_|read_swap|io_schedule|blk_|submit_bio|jbd2_|ext4_|xfs_|btrfs_"
)
"""Functions in which a process waits for memory, or for a page of a library from a disk."""


def certainty(
    *, hung: bool, state: str = "", wchan: str = "", signal: str | None = None
) -> Confidence | None:
    """Certainty that the GPU or its driver is the reason; None if nothing is known of them.

    Certain: uninterruptible sleep (state D) that is not for memory, a disk or a file server; or a
    fault signal. Nothing is known after any other signal (SIGKILL, as for lack of memory; SIGTERM;
    the limit on CPU time), and of a process that was stopped or frozen. Everything else is only
    likely: a process that sleeps or runs may be slow.

    Args:
        hung: it missed its deadline; else it died.
        state: of one that hung, as in /proc/PID/stat.
        wchan: the kernel function that it waited in.
        signal: name of the signal that one died of; None for an exit code.
    """
    if not hung:
        if signal is None:
            return Confidence.LIKELY
        return Confidence.CERTAIN if signal in _FAULTS else None
    if waits_for(state, wchan):
        return None
    return Confidence.CERTAIN if state == "D" else Confidence.LIKELY


def waits_for(state: str, wchan: str) -> str:
    """Words for what a process that hung waits for, if not for a GPU; empty if not known."""
    if state in _STOPPED:
        return "stopped"
    if wchan in _FROZEN:
        return "frozen"
    if state != "D":
        return ""
    cause = cause_of("", wchan)
    if cause is not None:
        return "" if cause is GPU_DRIVER else f"waits for {cause.words}"
    return "waits for memory or a disk" if _MEMORY_OR_DISK.match(wchan) else ""


def certainty_of(end: Outcome) -> Confidence | None:
    """The same of the child of a check; None also for one that neither hung nor died."""
    if end.status not in (OutcomeStatus.HUNG, OutcomeStatus.DIED):
        return None
    hung = end.status is OutcomeStatus.HUNG
    return certainty(hung=hung, state=end.state, wchan=end.wchan, signal=end.signal)


def certainty_of_reader(stuck: Mapping[str, Any]) -> Confidence | None:
    """The same of the process that read one GPU: `wedged` of the facts of `gpu_state`.

    Where the process that waited for it was itself stopped meanwhile, its time does not count.
    """
    how = str(stuck["how"])
    signal = how.partition("killed the process, ")[2] or None
    hung = how.startswith("did not return")
    state, wchan = str(stuck.get("state") or ""), str(stuck.get("wchan") or "")
    found = certainty(hung=hung, state=state, wchan=wchan, signal=signal)
    if hung and stuck.get("stopped_s"):
        return Confidence.LIKELY if found is Confidence.CERTAIN else None
    return found


def is_gone(gpu: Mapping[str, Any]) -> bool:
    """True if one of the `gpus` of `gpu_state` does not answer, though its reader was neither
    stopped nor killed from outside.
    """
    stuck = gpu.get("wedged")
    return bool(gpu["lost"] or (stuck and certainty_of_reader(stuck) is not None))
