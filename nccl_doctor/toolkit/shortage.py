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
        from nccl_doctor.toolkit.privileges import privileges  # the guardian starts without it

        return Shortage(
            f"no process or thread can be started: {limits_of_tasks(privileges())}",
            "ulimit -u unlimited; docker run --pids-limit=-1; systemd: TasksMax=infinity",
        )
    if number == errno.EMFILE:
        words = f"no file can be opened: {_limit('RLIMIT_NOFILE', resource.RLIMIT_NOFILE)}"
        fix = "ulimit -n 65536; docker run --ulimit nofile=65536; systemd: LimitNOFILE=65536"
        return Shortage(words, fix)
    if number == errno.ENFILE:
        return Shortage("no file can be opened on this host (fs.file-max)", "sysctl fs.file-max")
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
