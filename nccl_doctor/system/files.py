"""Reading and writing of the user's files, safe against dead disks, concurrent readers and links.

A reader of what is written sees the old file or the whole new one. What does not answer is an
error, as what is not there (`nccl_doctor.system.helpers`). What another user puts in the way is
not followed (`nccl_doctor.system.folders`).
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from nccl_doctor.system import folders
from nccl_doctor.system.helpers import alive, send

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_DESCRIPTORS = ("/dev/fd/", "/dev/std", "/proc/self/fd/")
_STREAM = b"stream"
_MODE = 0o644
"""Mode of a report, less what the umask takes; one that takes the place of a file has its mode."""
_PIECE = 1 << 20
"""Bytes that are read or written at a time; a sign of life follows each piece."""


GZIP = ".gz"
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_LEVEL = 6
"""A report of 1,024 ranks is then 1.4 MB in place of 20; 2.7 MB at level 1, in half the time."""
CONFIG_MAX = 4 << 20
"""Most bytes of a file of settings: the largest have some thousand lines."""


def too_long(most: int) -> OSError:
    """Error for a file of more than `most` bytes."""
    size = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
    return OSError(errno.EFBIG, f"longer than {size}")


def read(path: str | Path, most: int) -> bytes:
    """All of a file of at most `most` bytes: of /dev/zero there is no end.

    Raises:
        OSError: it cannot be read, or is longer; a TimeoutError where the disk, or who writes a
            pipe, is silent.
    """
    if _is_descriptor(path):  # of this process, and of nobody whom it sends
        return _read(path, most)
    return send(Path(path).parent, lambda: _read(path, most))


def read_unpacked(path: str | Path, most: int) -> bytes:
    """All of a file, or of what is in it, if it is a gzip file: at most `most` bytes.

    Raises:
        OSError: as `read`.
        ValueError: a gzip file is damaged or cut off.
    """
    return unpacked(read(path, most), most)


def unpacked(data: bytes, most: int) -> bytes:
    """Content of a gzip file; other data as it is.

    Raises:
        OSError: its content is longer than `most` bytes.
        ValueError: it is damaged or cut off.
    """
    if not data.startswith(_GZIP_MAGIC):
        return data
    import gzip
    import zlib

    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(data)).read(most + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"a damaged gzip file: {error}") from error
    if len(content) > most:
        raise too_long(most)
    return content


def read_own(path: Path, most: int) -> bytes:
    """All of a file that only this user or root can have written.

    Raises:
        OSError: as for `folders.read_own`, or the disk does not answer.
    """

    def get() -> bytes:
        with folders.opened(path.parent) as folder:
            return folders.read_own(folder, path.name, most)[0]

    return send(path.parent, get)


def read_found(path: Path, most: int) -> bytes:
    """Read a file that was found where such files are looked for, and not named by the user.

    It must belong to this user or root, nobody else may write to it, and not everybody to a folder
    on the way. A link is followed where it belongs to this user or root.

    Raises:
        PermissionError: another user may have chosen what it says; errno is EPERM.
        OSError: as for `read`.
    """

    def get() -> bytes:
        place, folder = Path(os.path.realpath(path)), path.parent.resolve()
        folders.check_way(folder)
        if place != folder / path.name:
            with folders.opened(folder) as link:
                if not folders.is_trusted_link(link, path.name):
                    raise PermissionError(errno.EPERM, f"{path.name} is a link of another user")
            folders.check_way(place.parent)
        with folders.opened(place.parent) as there:
            return folders.read_own(there, place.name, most)[0]

    return send(path.parent, get)


def write_whole(path: str | Path, text: str | Iterable[str]) -> None:
    """Write UTF-8 text, whole or in pieces, to a temporary file next to `path`, then rename it.

    A file whose name ends in .gz is compressed. What has to stay the file that it is, is written
    where it stands: a device, a pipe or an open stream (/dev/stdout), a file that is a mount, and
    one in a folder where no other can be made. A container's termination message is both of the
    last. For a slow reader of a pipe this waits.

    Raises:
        OSError: the folder is not there or not writable or does not answer, or nobody reads the
            pipe.
    """
    target = Path(path)
    data = _encoded([text] if isinstance(text, str) else text, packed=target.suffix == GZIP)
    if not _is_descriptor(target) and send(target.parent, lambda: _put(target, data)) != _STREAM:
        return
    with folders.opened(target.parent) as folder:
        stream = _open_stream(folder, target.name)
        if stream is None:
            _replace(folder, target.name, data)
        else:
            folders.write(stream, data)


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file that only its owner can read, never seen in part.

    Raises:
        OSError: the folder is not there or not writable or does not answer.
    """
    data = content.encode() if isinstance(content, str) else content

    def put() -> bytes:
        with folders.opened(path.parent) as folder:
            folders.put(folder, path.name, data, 0o600)
        return b""

    send(path.parent, put)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, where they are not there.

    Raises:
        OSError: it cannot be made, or the disk does not answer.
    """

    def make() -> bytes:
        os.makedirs(path, exist_ok=True)
        return b""

    send(path.parent, make)


def remove(paths: Iterable[Path]) -> None:
    """Remove files that are there.

    Raises:
        OSError: one cannot be removed, or the disk does not answer.
    """
    for path in paths:

        def unlink(path: Path = path) -> bytes:
            path.unlink(missing_ok=True)
            return b""

        send(path.parent, unlink)


def append(path: Path, text_after: Callable[[int], str]) -> None:
    """Add to a file, which is made if it is not there, what follows its first so many bytes.

    Raises:
        OSError: it cannot be written, or somebody else chose the file: it is a link in a folder of
            another user; or the disk does not answer.
    """

    def put() -> bytes:
        with folders.opened(path.parent) as folder:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            handle = folders.open_in_place(folder, path.name, flags, _MODE)
            if handle is None:
                raise PermissionError(errno.EPERM, "another user could have chosen this file")
            folders.write(handle, text_after(os.fstat(handle).st_size).encode())
        return b""

    send(path.parent, put)


def _is_descriptor(path: str | Path) -> bool:
    return os.fspath(path).startswith(_DESCRIPTORS)


def _read(path: str | Path, most: int) -> bytes:
    data = bytearray()
    with open(path, "rb") as file:
        there = os.fstat(file.fileno())
        longer = stat.S_ISREG(there.st_mode) and there.st_size > most
        while not longer and (piece := file.read(min(_PIECE, most + 1 - len(data)))):
            data += piece
            longer = len(data) > most
            alive()
    if longer:
        raise too_long(most)
    return bytes(data)


def _encoded(text: Iterable[str], *, packed: bool) -> bytes:
    out = io.BytesIO()
    if not packed:
        for piece in text:
            out.write(piece.encode())
        return out.getvalue()
    import gzip

    with gzip.GzipFile("", "wb", _GZIP_LEVEL, out, mtime=0) as file:
        for piece in text:
            file.write(piece.encode())
    return out.getvalue()


def _put(target: Path, data: bytes) -> bytes:
    """Write it, unless it is for a descriptor of the parent. Runs in a child."""
    with folders.opened(target.parent) as folder:
        if folders.stream_of(folder, target.name) is not None:
            return _STREAM
        _replace(folder, target.name, data)
    return b""


def _replace(folder: int, name: str, data: bytes) -> None:
    try:
        folders.put(folder, name, data, _MODE, keeps=True)
    except OSError as error:
        elsewhere = _NOT_ALLOWED if isinstance(error, folders.NotMade) else (errno.EBUSY,)
        if error.errno not in elsewhere or not _wrote_in_place(folder, name, data):
            raise


def _wrote_in_place(folder: int, name: str, data: bytes) -> bool:
    """False where there is no file, or one that may not be meant."""
    try:
        handle = folders.open_in_place(folder, name, os.O_WRONLY)
    except OSError:
        return False
    if handle is None:
        return False
    os.ftruncate(handle, 0)
    folders.write(handle, data)
    return True


def _open_stream(folder: int, name: str) -> int | None:
    """A descriptor for what is there, if it is neither a file on a disk nor a folder.

    A pipe that nobody reads is an error, not a wait.
    """
    found = folders.stream_of(folder, name)
    if found is None:
        return None
    if isinstance(found, int):  # /dev/stdout: opened anew, it would write over what is there
        return os.dup(found)
    handle = os.open(found, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    os.set_blocking(handle, True)
    return handle
