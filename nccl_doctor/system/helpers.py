"""Work on files, each piece in its own process: a disk or file server may never answer.

Who asks such a disk waits in the kernel, and on some file systems not even SIGKILL ends that. So no
process that anybody waits for asks by itself. It sends a child, which it leaves behind where that
does not return in time; and a folder that did not answer once is not asked again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from nccl_doctor.system import forks
from nccl_doctor.system.shortage import shortage_of

PATIENCE_S = 5.0
"""Longest time without a sign of life; a busy file server takes a second or two."""
_REAP_S = 0.05
_PIPE = 1 << 20
"""Bytes that are said at a time, where it is much."""
_PIECE = 1 << 16
"""Bytes that are read at a time: a process at its limit of memory has no room for more."""
_SPARE = 2
"""Open files to write a report: the ends of a pipe, or a folder and a file."""
_ALIVE, _DONE, _REFUSED, _BROKE = b".", b"+", b"-", b"!"


@dataclass
class _Memory:
    """State of this process: silent disks, its own end, the number of waits, and descriptors that
    are kept for the end, with the process that has them.
    """

    silent: set[str] = field(default_factory=set)
    leave_by: float = float("inf")
    waits: int | None = None
    spare: tuple[int, list[int]] = (0, [])


_memory = _Memory()


def leave_by(deadline: float) -> None:
    """Set the end of this process: from now on, a third of the time left is the limit to wait for a
    sign of life, and half of it for a whole piece of work.

    Args:
        deadline: `time.monotonic()` second at which this process is gone, whatever it was told.
    """
    _memory.leave_by = deadline


def time_left() -> float:
    """Longest time to wait for a sign of life now, where the work has no limit of its own."""
    return max(0.0, _memory.leave_by - time.monotonic()) / 3


class _NoChild(Exception):
    """No process can be started, or no file opened for it; says why."""


def reserve() -> None:
    """Keep some descriptors, so that a report can be written where all others are taken."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        while len(found) < _SPARE:
            found.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    _memory.spare = os.getpid(), found


def release() -> None:
    """Give the descriptors of `reserve` free, in the process that has them."""
    pid, found = _memory.spare
    while found and pid == os.getpid():
        os.close(found.pop())


def alive() -> None:
    """Report a sign of life; called by long work whenever the disk has answered."""
    if _memory.waits is not None:
        os.write(_memory.waits, _ALIVE)


def send(folder: str | Path, work: Callable[[], bytes]) -> bytes:
    """Run `work`, which is about files in `folder`, in a child; returns what it returns.

    The child has no open file of this process. Where none can be started, this process works
    itself: whoever watches it ends it if the disk does not answer.

    Raises:
        TimeoutError: the disk did not answer in time, or not the last time either.
        OSError: as `work` raises it; ChildProcessError if the child was killed.
        RuntimeError: `work` raised anything else; its traceback.
    """
    folder = os.path.join(os.path.abspath(folder), "")
    if folder.startswith(tuple(_memory.silent)):
        raise TimeoutError(errno.ETIMEDOUT, "no answer before, so not tried again")
    try:
        how, said, _ = _sent("file", work, PATIENCE_S)
    except TimeoutError:
        _memory.silent.add(folder)
        raise
    except _NoChild:
        return work()
    return _answer(how, said)


def send_foreign(name: str, work: Callable[[], bytes], patience_s: float) -> bytes:
    """Run `work`, which calls code of others, in a child; returns what it returns.

    Args:
        name: of the child process.
        work: raises nothing itself.
        patience_s: longest time that it may take.

    Raises:
        TimeoutError: it did not end in time.
        ChildProcessError: it ended the child, or none could be started; says how, or why.
    """
    try:
        how, said, status = _sent(name, work, patience_s)
    except _NoChild as error:
        raise ChildProcessError(errno.ECHILD, f"could not be tried: {error}") from error
    if how == _DONE:
        return said
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    words = f"exit code {code}" if code >= 0 else forks.signal_name(-code)
    raise ChildProcessError(errno.ECHILD, f"ended its process ({words})")


def _sent(
    name: str, work: Callable[[], bytes], patience_s: float
) -> tuple[bytes, bytes, int | None]:
    """Mark that says how work in a child ended, its output, and status as `os.waitpid` has it."""
    try:
        pipe, write_end = os.pipe()
        try:
            pid, parent = forks.fork()
        except OSError:
            os.close(pipe)
            os.close(write_end)
            raise
    except OSError as error:
        if scarce := shortage_of(error):
            raise _NoChild(scarce.words) from error
        raise
    if pid == 0:
        _serve(name, work, write_end, parent)
    os.close(write_end)
    forks.living.add(pid)
    try:
        how, said = _hear(pipe, patience_s)
    except TimeoutError:
        forks.kill(pid)
        forks.end(pid, patient=False, by=time.monotonic() + _REAP_S)
        raise
    else:
        status = forks.end(pid, patient=True)
    finally:
        os.close(pipe)
        forks.living.discard(pid)
    return how, said, status


def _hear(pipe: int, patience_s: float) -> tuple[bytes, bytes]:
    """Mark that says how the work ended, and the rest of the output: it may be a large report.

    Raises:
        TimeoutError: it stopped responding, or is too slow.
    """
    left = max(0.0, _memory.leave_by - time.monotonic())
    time_left, until = min(patience_s, left / 3), time.monotonic() + left / 2
    how, heard = b"", bytearray()
    while select.select([pipe], [], [], time_left)[0]:
        data = os.read(pipe, _PIECE)
        if not data:
            return how, bytes(heard)
        if not how:
            data = data.lstrip(_ALIVE)
            how, data = data[:1], data[1:]
        heard += data
        if time.monotonic() > until:
            raise TimeoutError(errno.ETIMEDOUT, f"not finished within {left / 2:.1f} s")
    raise TimeoutError(errno.ETIMEDOUT, f"no answer within {time_left:.1f} s")


def _answer(how: bytes, said: bytes) -> bytes:
    if how == _DONE:
        return said
    if how == _REFUSED:
        raise OSError(*json.loads(said))
    if not said:
        raise ChildProcessError(errno.ECHILD, "the process that accessed the disk has died")
    raise RuntimeError(said.decode())


def _serve(name: str, work: Callable[[], bytes], pipe: int, parent: int) -> NoReturn:
    """Body of the child; never returns."""
    try:
        forks.settle(name, parent)
        forks.close_others([pipe])
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        _memory.waits = pipe
        try:
            how, said = _DONE, work()
        except OSError as error:
            how = _REFUSED
            said = json.dumps([error.errno, error.strerror or str(error)]).encode()
        except Exception:  # the boundary of the process: the parent decides
            how, said = _BROKE, traceback.format_exc(limit=-8).encode("utf-8", "replace")
        if len(said) > _PIPE:
            with contextlib.suppress(OSError):  # a user may have only so much of them
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
        rest = memoryview(said)[os.writev(pipe, [how, said]) - len(how) :]
        while rest:
            rest = rest[os.write(pipe, rest) :]
    finally:
        os._exit(0)
