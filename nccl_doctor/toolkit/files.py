"""Reading and writing of the user's files, safe against dead disks and concurrent readers.

A reader of what is written sees the old file or the whole new one. What does not answer is an
error, as what is not there (`nccl_doctor.toolkit.errands`).
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from pathlib import Path

from nccl_doctor.toolkit.errands import alive, send

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_OWN = re.compile(r"/proc/self/fd/([0-9]+)")
_DESCRIPTORS = ("/dev/fd/", "/dev/std", "/proc/self/fd/")
_STREAM = b"stream"
_PIECE = 1 << 20
"""Bytes that are read or written at a time; a sign of life follows each piece."""


def read(path: str | Path, most: int = -1) -> bytes:
    """All of a file, or its first `most` bytes.

    Raises:
        OSError: it cannot be read; a TimeoutError where the disk, or who writes a pipe, is silent.
    """
    if _is_descriptor(path):  # of this process, and of nobody whom it sends
        return _read(path, most)
    return send(Path(path).parent, lambda: _read(path, most))


def write_whole(path: str | Path, text: str) -> None:
    """Write UTF-8 text to a temporary file next to `path`, then rename it.

    What has to stay the file that it is, is written where it stands: a device, a pipe or an open
    stream (/dev/stdout), a file that is a mount, and one in a folder where no other can be made.
    A container's termination message is both of the last. For a slow reader of a pipe this waits.

    Raises:
        OSError: the folder is not there or not writable or does not answer, or nobody reads the
            pipe.
    """
    target, data = Path(path), text.encode()
    if not _is_descriptor(target) and send(target.parent, lambda: _put(target, data)) != _STREAM:
        return
    stream = _open_stream(target)
    if stream is None:
        _replace(target, data)
    else:
        _write(stream, data)


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file that only its owner can read, never seen in part.

    Raises:
        OSError: the folder is not there or not writable or does not answer.
    """
    data = content.encode() if isinstance(content, str) else content

    def put() -> bytes:
        _move(_made(path, data), path)
        return b""

    send(path.parent, put)


def _is_descriptor(path: str | Path) -> bool:
    return os.fspath(path).startswith(_DESCRIPTORS)


def _read(path: str | Path, most: int) -> bytes:
    data = bytearray()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE if most < 0 else min(_PIECE, most - len(data))):
            data += piece
            alive()
    return bytes(data)


def _put(target: Path, data: bytes) -> bytes:
    """Write it, unless it is for a descriptor of the parent. Runs in a child."""
    if _is_stream(target):
        return _STREAM
    _replace(target, data)
    return b""


def _replace(target: Path, data: bytes) -> None:
    try:
        made = _made(target, data)
    except OSError as error:
        if error.errno not in _NOT_ALLOWED or not target.is_file():
            raise
        _write_in_place(target, data)
        return
    os.chmod(made, 0o644)
    try:
        _move(made, target)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _write_in_place(target, data)


def _made(target: Path, data: bytes) -> str:
    """A new file beside the target, of mode 0600."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        _write(handle, data)
    except BaseException:
        os.unlink(name)
        raise
    return name


def _move(made: str, target: Path) -> None:
    try:
        os.replace(made, target)
    except BaseException:
        os.unlink(made)
        raise


def _is_stream(target: Path) -> bool:
    """Whether there is something that is neither a file on a disk nor a folder."""
    try:
        if target.is_symlink() and _OWN.fullmatch(os.readlink(target)):
            return True
        mode = os.stat(target).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _open_stream(target: Path) -> int | None:
    """A descriptor for what is there, if it is neither a file on a disk nor a folder.

    A pipe that nobody reads is an error, not a wait.
    """
    if not _is_stream(target):
        return None
    own = _OWN.fullmatch(os.readlink(target)) if target.is_symlink() else None
    if own:  # /dev/stdout: opened anew, it would not share the place that is written next
        return os.dup(int(own[1]))
    handle = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(handle, True)
    return handle


def _write_in_place(target: Path, data: bytes) -> None:
    _write(os.open(target, os.O_WRONLY | os.O_TRUNC), data)


def _write(handle: int, data: bytes) -> None:
    """Write all of it, and close the descriptor."""
    with os.fdopen(handle, "wb") as file:
        for start in range(0, len(data), _PIECE):
            file.write(data[start : start + _PIECE])
            alive()
