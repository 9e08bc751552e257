"""Orderly end of a child: its groups are destroyed, and NCCL's files in /dev/shm removed.

NCCL 2.18 to 2.30.7 keeps the file of its proxy's pool, and of the buffers between two ranks of a
host, until the last rank of the host has taken its reference off, or destroys the communicator
(src/misc/shmutils.cc, since 2.30.3 src/os/linux.cc; src/proxy.cc ncclProxyShmUnlink). A process
that just ends leaves them: about 33 MB for each rank and communicator, until the next boot. A file
that is unlinked stays whole for those that have it open.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

MOST_S = 5.0
"""Seconds to end groups in order: where it takes longer, a peer has a fault, or the driver."""
_MARGIN_S = 0.2
"""Time that is left before the deadline, at which whoever forked this process kills it."""
_FILE = re.compile(r"/dev/shm/nccl-[^/ ]+")
"""Files of NCCL and RCCL; neither makes folders there."""

_tasks: list[Callable[[], object]] = []


def at_end(task: Callable[[], object]) -> None:
    """Have `leave` of this process call `task`, once."""
    if task not in _tasks:
        _tasks.append(task)


def leave(code: int, deadline: float, *, orderly: bool) -> NoReturn:
    """End this process, which has said all that it had to say.

    Args:
        code: exit code.
        deadline: `time.monotonic()` second at which it is killed. It ends before that, and
            `MOST_S` from now, whatever blocks.
        orderly: all went well so far. Else a peer may be gone, and an end in order would wait for
            it, while others learn of this one's error by its end.
    """
    # Before they are closed, which does not remove all of them.
    files = shared_files(os.getpid(), mapped=bool(_tasks))
    limit_s = min(MOST_S, deadline - _MARGIN_S - time.monotonic())

    def end() -> NoReturn:
        remove(files)
        os._exit(code)

    try:
        if _tasks and orderly and limit_s > 0:
            timer = threading.Timer(limit_s, end)
            timer.daemon = True
            timer.start()
            for task in _tasks:
                with contextlib.suppress(Exception):  # its result is sent; this is the last call
                    task()
    finally:
        end()


def give_back(pid: int) -> None:
    """Remove the files that a process, which is about to be killed, has open or mapped."""
    remove(shared_files(pid))


def remove(files: set[str]) -> None:
    """Unlink files that may be gone."""
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)


def give_back_below(pid: int) -> None:
    """The same for all that a process has started, which is to die with it."""
    for _, child in started_below(pid):
        give_back(child)


def started_below(pid: int) -> Iterator[tuple[int, int]]:
    """Parent and child, by process id, of all that a process has started, parents first."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                for child in map(int, file.read().split()):
                    yield pid, child
                    yield from started_below(child)


def shared_files(pid: int, *, mapped: bool = True) -> set[str]:
    """NCCL's files in /dev/shm that a process has open or mapped; what cannot be read has none.

    It never waits for the process: the kernel reads `maps` under a lock that a thread in state D
    may hold, so for such a process only the open files are read. NCCL keeps its files open.
    `mapped`: read `maps` at all, which takes most of the time.
    """
    folder = f"/proc/{pid}"
    found = set()
    with contextlib.suppress(OSError):
        for number in os.listdir(f"{folder}/fd"):
            with contextlib.suppress(OSError):  # closed by now
                found.add(os.readlink(f"{folder}/fd/{number}"))
    with contextlib.suppress(OSError):
        if mapped and not _has_thread_in_d(folder):
            with open(f"{folder}/maps", encoding="utf-8", errors="replace") as file:
                found |= {line.rstrip("\n").split(maxsplit=5)[-1] for line in file}
    # A file that is unlinked ends with " (deleted)".
    return {path for path in found if _FILE.fullmatch(path)}


def _has_thread_in_d(folder: str) -> bool:
    for thread in os.listdir(f"{folder}/task"):
        with open(f"{folder}/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
            if file.read().rpartition(")")[2].split()[:1] == ["D"]:
                return True
    return False
