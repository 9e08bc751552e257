"""Write a file so that a reader sees the old one or the whole new one."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from pathlib import Path

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_OWN = re.compile(r"/proc/self/fd/([0-9]+)")


def write_whole(path: str | Path, text: str) -> None:
    """Write UTF-8 text to a temporary file beside `path`, then put it in its place.

    What has to stay the file that it is, is written where it stands: a device, a pipe or an open
    stream (/dev/stdout), a file that is a mount, and one in a folder where no other can be made.
    A container's termination message is both of the last.

    Raises:
        OSError: the folder is not there or not writable, or nobody reads the pipe.
    """
    target = Path(path)
    stream = _open_stream(target)
    if stream is not None:
        _write(stream, text)
        return
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        if error.errno not in _NOT_ALLOWED or not target.is_file():
            raise
        _write_in_place(target, text)
        return
    try:
        _write(handle, text)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except OSError as error:
        os.unlink(name)
        if error.errno != errno.EBUSY:
            raise
        _write_in_place(target, text)
    except BaseException:
        os.unlink(name)
        raise


def _open_stream(target: Path) -> int | None:
    """A descriptor for what is there, if it is neither a file on a disk nor a folder.

    A pipe that nobody reads is an error, not a wait.
    """
    try:
        own = _OWN.fullmatch(os.readlink(target)) if target.is_symlink() else None
        if own:  # /dev/stdout: opened anew, it would not share the place that is written next
            return os.dup(int(own[1]))
        mode = os.stat(target).st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    handle = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(handle, True)
    return handle


def _write_in_place(target: Path, text: str) -> None:
    _write(os.open(target, os.O_WRONLY | os.O_TRUNC), text)


def _write(handle: int, text: str) -> None:
    """Write all of it, and close the descriptor."""
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
