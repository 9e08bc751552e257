"""Errors that a limit of this host causes, in words: no process, thread or file is to be had."""

from __future__ import annotations

import errno
import resource
from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Shortage:
    """Resource that cannot be had, with its limit; and what to type."""

    words: str
    fix: str


def shortage_of(error: BaseException) -> Shortage | None:
    """Shortage that made an error; None if it has another cause."""
    number = error.errno if isinstance(error, OSError) else None
    thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    if number == errno.EAGAIN or thread:
        from nccl_doctor.toolkit.privileges import privileges  # the guardian starts without them
        from nccl_doctor.toolkit.raise_limits import MORE_PROCESSES_OR_TASKS

        return Shortage(
            f"no process or thread can be started: {limits_of_tasks(privileges())}",
            MORE_PROCESSES_OR_TASKS,
        )
    if number == errno.EMFILE:
        words = f"no file can be opened: {_limit('RLIMIT_NOFILE', resource.RLIMIT_NOFILE)}"
        from nccl_doctor.toolkit.raise_limits import more_files

        return Shortage(words, more_files(65536))
    if number == errno.ENFILE:
        from nccl_doctor.model.fixes import Fix, look

        fix = Fix(look("sysctl fs.file-max", "the limit"), look("cat /proc/sys/fs/file-nr"))
        return Shortage("no file can be opened on this host (fs.file-max)", fix)
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return Shortage("no memory is left", "free memory on this host, or raise its limit")
    return None


def limits_of_tasks(capable: Set[str]) -> str:
    """Words for the limits that may stop a new process or thread.

    RLIMIT_NPROC does not hold for root and for two capabilities (`copy_process`, kernel/fork.c).

    Args:
        capable: from `privileges`.
    """
    if capable & {"root", "sys_admin", "sys_resource"}:
        return "pids.max of the control group, or kernel.threads-max or kernel.pid_max of this host"
    return f"{_limit('RLIMIT_NPROC', resource.RLIMIT_NPROC)}, or pids.max of the control group"


def _limit(name: str, kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return f"{name} is {'unlimited' if soft == resource.RLIM_INFINITY else soft}"
