"""Files in a folder that may belong to another user, safe against what is swapped meanwhile.

A path is looked up anew by every call: whoever may write to one of its folders can put a link there
between two of them, and root then changes a file of the system. So a folder is opened once, and
what is in it is reached by that descriptor and a plain name, without following a link. What is
there already is trusted by what the open file says of itself: its owner, its mode, its kind.

Everything here may wait for a disk: `nccl_doctor.system.files` sends a process.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nccl_doctor.system import forks
from nccl_doctor.system.helpers import alive

PRIVATE = ".private"
"""Subfolder of a shared folder that only its owner can read."""
_PIECE = 1 << 20
"""Bytes that are read or written at a time; a sign of life follows each piece."""
_OWN = re.compile(r"/proc/self/fd/([0-9]+)")
_FOR_OTHERS = 0o077
_OTHERS_WRITE = 0o022
_ACL = "system.posix_acl_access"
_THERE = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Flags to open what is there, and may be a pipe or a terminal."""


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[int]:
    """Descriptor of a folder, for the time of the block. Links in its own path are followed.

    Raises:
        OSError: it is not there, or no folder.
    """
    folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def opened_private(path: str | Path) -> Iterator[int]:
    """Descriptor of the private folder in a folder, made where there is none.

    Raises:
        OSError: it cannot be made; or it was made by another user, or others can enter it, so that
            names would be known to them, and a key theirs.
    """
    with opened(path) as outside:
        with contextlib.suppress(FileExistsError):
            os.mkdir(PRIVATE, 0o700, dir_fd=outside)
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            folder = os.open(PRIVATE, flags, dir_fd=outside)
        except NotADirectoryError:
            raise _refused(f"{PRIVATE} is a link or a file, not a folder; remove it") from None
        try:
            there = os.fstat(folder)
            if there.st_uid != os.geteuid() and there.st_uid != _like_ours(folder).st_uid:
                raise _refused(f"{PRIVATE} belongs to another user (uid {there.st_uid}); remove it")
            if there.st_mode & _FOR_OTHERS:
                mode = stat.S_IMODE(there.st_mode)
                raise _refused(f"others can enter {PRIVATE} (mode {mode:o}); remove it")
            yield folder
        finally:
            os.close(folder)


class NotMade(OSError):
    """Error: no new file can be made in a folder, so what is there was not touched."""


def put(folder: int, name: str, data: bytes, mode: int, *, keeps: bool = False) -> None:
    """Write a file, in the place of whatever has its name; of the mode, the umask takes its part.
    If it `keeps`, it has the mode of the file that had its name.

    A reader sees the old file or the whole new one. Where the file system can, the new one has no
    name before it is whole, and gets it while this process outlives its parent: where both are
    killed, as a job is, no part of a file is left.

    Raises:
        NotMade: the folder is not writable.
        OSError: the disk is full, or what has the name cannot be replaced.
    """
    made, modes = _new_name(name), _modes(folder, name, mode, keeps=keeps)
    if _put_nameless(folder, made, name, data, modes):
        return
    try:
        _write_named(folder, made, data, modes)
    except OSError as error:
        raise NotMade(error.errno, error.strerror) from error
    _move(folder, made, name)


class _Modes(NamedTuple):
    """Mode that a file is made with, less the umask; and the one that it gets then, if any."""

    first: int
    then: int | None = None

    def give(self, handle: int) -> None:
        if self.then is not None:
            with contextlib.suppress(OSError):  # a file system may have one mode for all files
                os.fchmod(handle, self.then)


def _modes(folder: int, name: str, mode: int, *, keeps: bool) -> _Modes:
    """Modes of a new file: `mode`, or if it `keeps`, that of the file that has the name, and at no
    time more than that.
    """
    with contextlib.suppress(OSError):
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if keeps and stat.S_ISREG(there.st_mode):
            kept = there.st_mode & 0o777
            return _Modes(mode & kept, kept)
    return _Modes(mode)


def _put_nameless(folder: int, made: str, name: str, data: bytes, modes: _Modes) -> bool:
    """False where the file system or /proc cannot do that."""
    handle = _written_nameless(folder, data, modes)
    if handle is None:
        return False
    with os.fdopen(handle, "rb"), forks.outliving_parent():
        if not _linked(handle, folder, made):
            return False
        _move(folder, made, name)
    return True


def _linked(handle: int, folder: int, name: str) -> bool:
    """Give a file without a name this one; False where there is no /proc, or one that hides it."""
    try:
        os.link(f"/proc/self/fd/{handle}", name, dst_dir_fd=folder, follow_symlinks=True)
    except (FileNotFoundError, PermissionError):
        return False
    return True


def _written_nameless(folder: int, data: bytes, modes: _Modes) -> int | None:
    """Descriptor of a new file without a name; None where there can be none."""
    try:
        handle = _nameless(folder, modes.first)
    except OSError:  # the other way says what is wrong
        return None
    if handle is not None:
        try:
            write(os.dup(handle), data)
            modes.give(handle)
        except BaseException:
            os.close(handle)
            raise
    return handle


def _write_named(folder: int, made: str, data: bytes, modes: _Modes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(made, flags, modes.first, dir_fd=folder)
    modes.give(handle)
    try:
        write(handle, data)
    except BaseException:
        os.unlink(made, dir_fd=folder)
        raise


def _new_name(name: str) -> str:
    return f".{name}.{secrets.token_hex(4)}"


def _nameless(folder: int, mode: int) -> int | None:
    """A new file without a name; None where the file system knows no such file.

    Raises:
        OSError: none can be made.
    """
    try:
        return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            return None
        raise


def _move(folder: int, made: str, name: str) -> None:
    """Give a new file its name, in the place of whatever has it; or remove it."""
    try:
        os.replace(made, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(made, dir_fd=folder)
        raise


def keep_first(folder: int, name: str, data: bytes) -> None:
    """Write a file that only its owner can read; one of that name that is there stays.

    Raises:
        OSError: the folder is not writable, or the disk is full.
    """
    handle = _written_nameless(folder, data, _Modes(0o600))
    if handle is not None:
        with os.fdopen(handle, "rb"):
            try:
                if _linked(handle, folder, name):
                    return
            except FileExistsError:
                return
    made = _new_name(name)
    _write_named(folder, made, data, _Modes(0o600))
    try:
        os.link(made, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        pass
    finally:
        os.unlink(made, dir_fd=folder)


def check_way(folder: Path) -> None:
    """Check that not everybody may put a folder of their own in the place of this one.

    In a folder such as /tmp, whose sticky bit is set, that is so for what belongs to this user or
    root.

    Raises:
        PermissionError: everybody may write to it, or to a folder on the way to it.
    """
    below = None
    for place in (folder, *folder.parents):
        there = os.stat(place)
        kept = below is not None and there.st_mode & stat.S_ISVTX and is_ours(below)
        if there.st_mode & stat.S_IWOTH and not kept:
            raise _refused(f"everybody may write to {place}")
        below = there


def is_ours(there: os.stat_result) -> bool:
    """True if it belongs to this user or root."""
    return there.st_uid in (0, os.geteuid())


def read_own(folder: int, name: str, most: int) -> tuple[bytes, float]:
    """Content and time of a file that only this user or root can have written.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is another user's, or others can write to it, or it is a link or no file, or
            longer than `most` bytes.
    """
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | _THERE, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refused(f"{name} is a link") from None
        raise
    with os.fdopen(handle, "rb") as file:
        there = os.fstat(handle)
        if not stat.S_ISREG(there.st_mode):
            raise _refused(f"{name} is not a file")
        writable = _written_by_others(handle, there)
        if not is_ours(there) or writable:
            like_ours = _like_ours(folder)
            if not is_ours(there) and there.st_uid != like_ours.st_uid:
                raise _refused(f"{name} belongs to another user (uid {there.st_uid})")
            if writable & ~like_ours.st_mode:
                mode = stat.S_IMODE(there.st_mode)
                raise _refused(f"others can write to {name} (mode {mode:o})")
        data = bytearray()
        while piece := file.read(min(_PIECE, most + 1 - len(data))):
            data += piece
            alive()
    if len(data) > most:
        raise OSError(errno.EFBIG, f"{name} is longer than {most} bytes")
    return bytes(data), there.st_mtime


def _written_by_others(handle: int, there: os.stat_result) -> int:
    """Bits of a mode that let others write: not those of a group that has this user alone, as
    distributions give each user one, with a umask of 002.
    """
    writable = there.st_mode & _OTHERS_WRITE
    if writable & stat.S_IWGRP:
        with contextlib.suppress(KeyError, OSError):
            group, user = grp.getgrgid(there.st_gid), pwd.getpwuid(os.geteuid())
            alone = group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}
            if alone and _ACL not in os.listxattr(handle):  # its mask would stand in these bits
                writable &= ~stat.S_IWGRP
    return writable


def open_in_place(folder: int, name: str, flags: int, mode: int = 0) -> int | None:
    """Descriptor of a file on a disk, to be written to where it stands; it has no flag that waits.

    Returns: None where it may be a file that somebody else chose for us: there is a link, or a
        second name of a file, in a folder that is not safe.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        handle = os.open(name, flags | os.O_NOFOLLOW | _THERE, mode, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ELOOP or not is_trusted_link(folder, name):
            raise
        handle = os.open(name, flags | _THERE, mode, dir_fd=folder)
    there = os.fstat(handle)
    if stat.S_ISREG(there.st_mode) and (there.st_nlink <= 1 or _is_safe(folder)):
        return handle
    os.close(handle)
    return None


def stream_of(folder: int, name: str) -> int | str | None:
    """Device, pipe or stream that stands there; nothing if it is a file on a disk or a folder.

    What another user put there counts as a file, so that it is replaced and not obeyed.

    Returns: the number of a descriptor of this process, or the name to open; None for a file, a
        folder, or nothing.
    """
    try:
        link = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(link.st_mode):
            if not is_trusted_link(folder, name):
                return None
            if own := _OWN.fullmatch(os.readlink(name, dir_fd=folder)):
                return int(own[1])
            link = os.stat(name, dir_fd=folder)
    except OSError:
        return None
    if stat.S_ISREG(link.st_mode) or stat.S_ISDIR(link.st_mode):
        return None
    return name if is_ours(link) or _is_safe(folder) else None


def fresh(folder: int) -> os.stat_result:
    """State of a file that was just made there, by the clock and the owners of its file server.

    Raises:
        OSError: none can be made.
    """
    handle = _nameless(folder, 0o600)
    if handle is None:
        made = _new_name("new")
        _write_named(folder, made, b"", _Modes(0o600))
        try:
            return os.stat(made, dir_fd=folder, follow_symlinks=False)
        finally:
            os.unlink(made, dir_fd=folder)
    try:
        return os.fstat(handle)
    finally:
        os.close(handle)


def write(handle: int, data: bytes) -> None:
    """Write all of it, and close the descriptor."""
    with os.fdopen(handle, "wb") as file:
        for start in range(0, len(data), _PIECE):
            file.write(data[start : start + _PIECE])
            alive()


def _like_ours(folder: int) -> os.stat_result:
    """Owner and mode of a file of ours there: a file server may have other names for us, or know no
    modes. Where none can be made, what this process says.
    """
    try:
        return fresh(folder)
    except OSError:
        return os.stat_result((0o600, 0, 0, 1, os.geteuid(), os.getegid(), 0, 0, 0, 0))


def _is_safe(folder: int) -> bool:
    """True if only this user and root can put anything into it."""
    there = os.fstat(folder)
    return is_ours(there) and not there.st_mode & _OTHERS_WRITE


def is_trusted_link(folder: int, name: str) -> bool:
    """True if this user or root made the link, or no other user could have."""
    link = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return is_ours(link) or _is_safe(folder)


def _refused(words: str) -> OSError:
    return PermissionError(errno.EPERM, words)
