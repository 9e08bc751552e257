"""Python for the start of a process that runs under a limit of the kernel, as after `ulimit`."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

_PR_SET_KEEPCAPS = 8
_VERSION_3 = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2
"""Rights of root: to open every file, and to read it."""


def few_files(number: int) -> str:
    """Code that does what `ulimit -n NUMBER` does."""
    return f"from tests.support import limited; limited.limit_files({number})"


def few_processes(number: int, user: int) -> str:
    """Code that does what `ulimit -u NUMBER` does for a user who has no process yet; needs root."""
    return f"from tests.support import limited; limited.limit_processes({number}, {user})"


def limit_files(number: int) -> None:
    """Limit the open files of this process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def limit_processes(number: int, user: int) -> None:
    """Limit the processes and threads of a user, and become that user: root has no such limit.

    Files of root can still be read, as this Python may be one of them.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    keep_rights(DAC_OVERRIDE, DAC_READ_SEARCH)
    resource.setrlimit(resource.RLIMIT_NPROC, (number, number))


def keep_rights(*numbers: int) -> None:
    """Give up all rights of root but these; capset(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    rights = sum(1 << number for number in numbers)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(rights, rights, 0, 0, 0, 0)
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")


def tasks_of(user: int) -> list[int]:
    """Processes of a user, at this moment."""
    return [
        int(each.name)
        for each in Path("/proc").iterdir()
        if each.name.isdigit() and each.exists() and each.stat().st_uid == user
    ]
