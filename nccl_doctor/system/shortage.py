"""Errors that a limit of this host causes, in words, and the privileges that lift such limits."""

from __future__ import annotations

import errno
import mmap
import resource
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

# Privileges of this process that lift limits, as the kernel sees them.
#
# Sources: user_namespaces(7), capabilities(7); `capable` in the kernel's kernel/capability.c.


NET_BIND_SERVICE, SYS_ADMIN = 10, 21
_BITS = {"ipc_lock": 14, "sys_admin": SYS_ADMIN, "sys_resource": 24}
_EVERY_USER = ["0", "0", "4294967295"]
"""Content of /proc/self/uid_map in the first user namespace."""


def in_user_namespace(root: Path = Path("/")) -> bool:
    """True if this process is in a user namespace of a container, such as Podman's without root."""
    try:
        words = (root / "proc/self/uid_map").read_text(encoding="ascii").split()
    except OSError:  # a kernel without them
        return False
    return words != _EVERY_USER


def privileges(root: Path = Path("/")) -> frozenset[str]:
    """Privileges of this process that lift a limit: the capabilities that it has of `ipc_lock`,
    `sys_admin`, `sys_resource`, and `root` if that is its real user.

    Empty in a user namespace: `CapEff` is full there, but `capable()`, which checks the first
    namespace, denies them.
    """
    if in_user_namespace(root):
        return frozenset()
    found = {name for name, bit in _BITS.items() if has_capability(bit, root)}
    return frozenset(found | ({"root"} if _status(root, "Uid").split()[:1] == ["0"] else set()))


def has_capability(number: int, root: Path = Path("/")) -> bool:
    """True if this process has a capability in its own user namespace, by its number in
    include/uapi/linux/capability.h.
    """
    return bool(int(_status(root, "CapEff").strip() or "0", 16) >> number & 1)


def _status(root: Path, name: str) -> str:
    try:
        text = (root / "proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return dict(line.partition(":")[::2] for line in text.splitlines()).get(name, "")


_STACK = 2 << 20
"""Stack of a thread where RLIMIT_STACK is unlimited, pthread_create(3)."""
NO_MEMORY = "no memory is left"
_OF_MEMORY = (
    NO_MEMORY,
    "Cannot allocate memory",
    "failed to map segment",
    "MemoryError",
    "bad_alloc",
)


@dataclass(frozen=True)
class Shortage:
    """Resource that cannot be had, with its limit; and what to type."""

    words: str
    fix: str


def shortage_of(error: BaseException) -> Shortage | None:
    """Shortage that made an error; None if it has another cause."""
    number = error.errno if isinstance(error, OSError) else None
    thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    if thread and not _has_room_for_a_stack():
        return _no_memory()
    if number == errno.EAGAIN or thread:
        pass  # the supervisor starts without them
        from nccl_doctor.system.limits import MORE_PROCESSES_OR_TASKS

        return Shortage(
            f"no process or thread can be started: {limits_of_tasks(privileges())}",
            MORE_PROCESSES_OR_TASKS,
        )
    if number == errno.EMFILE:
        words = f"no file can be opened: {_limit('RLIMIT_NOFILE', resource.RLIMIT_NOFILE)}"
        from nccl_doctor.system.limits import more_files

        return Shortage(words, more_files(65536))
    if number == errno.ENFILE:
        from nccl_doctor.model.commands import shell
        from nccl_doctor.model.fixes import Fix, look

        fix = Fix(
            look(shell("sysctl fs.file-max"), "the limit"), look(shell("cat /proc/sys/fs/file-nr"))
        )
        return Shortage("no file can be opened on this host (fs.file-max)", fix)
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return _no_memory()
    if isinstance(error, SyntaxError) and soft_limit(resource.RLIMIT_AS) is not None:
        return _no_memory()  # so says the parser of Python 3.11 of good files, where it has none
    return None


def soft_limit(kind: int) -> int | None:
    """A limit of this process, by `resource.RLIMIT_…`; None for unlimited, or where a sandbox
    refuses to say it.
    """
    try:
        soft, _ = resource.getrlimit(kind)
    except (OSError, ValueError):  # ValueError: EPERM
        return None
    return None if soft == resource.RLIM_INFINITY else soft


def is_of_memory(words: str) -> bool:
    """True if an error of others, in words, says that no memory or no addresses were left."""
    return any(each in words for each in _OF_MEMORY)


def _no_memory() -> Shortage:
    limit = soft_limit(resource.RLIMIT_AS)
    if limit is None:
        return Shortage(NO_MEMORY, "free memory on this host, or raise its limit")
    from nccl_doctor.system.limits import MORE_ADDRESSES

    return Shortage(f"{NO_MEMORY}: RLIMIT_AS is {limit >> 20} MiB", MORE_ADDRESSES)


def _has_room_for_a_stack() -> bool:
    """True if this process may have as many more addresses as a thread needs: pthread_create says
    the same without them as at the limit of threads.
    """
    try:
        mmap.mmap(-1, soft_limit(resource.RLIMIT_STACK) or _STACK).close()
    except (OSError, ValueError):
        return False
    return True


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
    soft = soft_limit(kind)
    return f"{name} is {'unlimited' if soft is None else soft}"
