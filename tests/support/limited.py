"""Python for the start of a process that runs under a limit of the kernel, as after `ulimit`."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PR_SET_KEEPCAPS = 8
_NO_NEW_PRIVS, _SECCOMP, _AF_NETLINK = 38, 22, 16
_ERROR, _ALLOW = 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _GIVE = 0x20, 0x15, 0x06
_NUMBERS = {
    "socket": (41, 198),
    "setsockopt": (54, 208),
    "getrusage": (98, 165),
    "prlimit64": (302, 261),
    "memfd_create": (319, 279),
}
"""Of x86-64 and arm64."""
HAS_NETLINK_FILTER = os.uname().machine in ("x86_64", "aarch64")
NO_NETLINK = "from tests.support import limited; limited.forbid_netlink()"
"""Code that forbids netlink to a process and all that it starts."""
_VERSION_3 = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2
"""Rights of root: to open every file, and to read it."""


def few_files(number: int) -> str:
    """Code that does what `ulimit -n NUMBER` does."""
    return f"from tests.support import limited; limited.limit_files({number})"


def few_processes(number: int, user: int) -> str:
    """Code that does what `ulimit -u NUMBER` does for a user who has no process yet; needs root."""
    return f"from tests.support import limited; limited.limit_processes({number}, {user})"


def group(folder: Path) -> str:
    """Code that puts a process, and all that it starts, into a control group."""
    return f"import pathlib; pathlib.Path({str(folder)!r}, 'cgroup.procs').write_text('0')"


@contextmanager
def little_cpu_time(percent: int) -> Iterator[Path]:
    """A control group of so many hundredths of the time of one CPU.

    Raises:
        OSError: this user, or this machine, can make none.
    """
    old = (_CGROUPS / "cpu/cpu.cfs_quota_us").exists()
    folder = _CGROUPS / ("cpu" if old else "") / f"nccl-doctor-test-{os.getpid()}"
    folder.mkdir()
    try:
        if old:
            (folder / "cpu.cfs_quota_us").write_text(str(percent * 1000))
        else:  # the file is there if the groups below the root have the controller
            with (folder / "cpu.max").open("r+") as file:
                file.write(f"{percent * 1000} 100000")
        yield folder
    finally:
        end = time.monotonic() + 5
        while folder.exists() and time.monotonic() < end:  # until nothing is in it any more
            with suppress(OSError):
                folder.rmdir()
            time.sleep(0.02)


def forbid_netlink() -> None:
    """Let no socket of netlink be made from now on, as security modules and sandboxes may: EACCES.

    For x86-64 and arm64, whose numbers of the call `socket` it has.
    """
    family = ((_LOAD, 0, 0, 16), (_EQUAL, 0, 1, _AF_NETLINK))
    _filter(_number("socket"), errno.EACCES, family)


def refuse(call: str, error: int) -> None:
    """Let a system call fail with an error from now on, as sandboxes may."""
    _filter(_number(call), error)


def refused(call: str, error: int) -> str:
    """Code that does so."""
    return f"from tests.support import limited; limited.refuse({call!r}, {error})"


def _number(call: str) -> int:
    return _NUMBERS[call][("x86_64", "aarch64").index(os.uname().machine)]


def _filter(number: int, error: int, more: Sequence[tuple[int, int, int, int]] = ()) -> None:
    steps = [
        *((_LOAD, 0, 0, 0), (_EQUAL, 0, len(more) + 1, number), *more),
        *((_GIVE, 0, 0, _ERROR | error), (_GIVE, 0, 0, _ALLOW)),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_SECCOMP, 2, program):
        raise OSError(ctypes.get_errno(), "prctl")


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
