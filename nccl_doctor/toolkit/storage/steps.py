"""Steps of a process on one path: look, write, find what other hosts wrote, remove.

What is written is a file of 4 KiB, named `.nccl-doctor-` and random digits. The folder is opened
once, and files in it are reached by that descriptor, without following links.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import statistics
import struct
import time
from collections.abc import Mapping
from typing import Any

from nccl_doctor.toolkit.storage.worker import Desk

BYTES = 4096
_PREFIX = ".nccl-doctor-"
_NAME = re.compile(rf"\{_PREFIX}[0-9a-f]{{16}}")
_MAGIC = b"nccl-doctor: written to see whether other hosts see it, and removed at once\n"
_TIMES = 3
_OLD_S = 3600.0
"""A file of ours that is older was left by a run that was killed with its whole host."""
_MOST_ENTRIES = 1000
"""Entries of a folder among which such files are looked for: more would take long."""
_LONGEST_PAUSE_S = 0.5
_MOST_READ = 1 << 16
_REFCOUNT = b"refcount/"
"""Key in which torch's FileStore counts the processes that have it open."""


class PathDesk(Desk):
    """Steps on one path."""

    def __init__(self, path: str) -> None:
        """Nothing is touched yet."""
        self._path = path
        self._folder = -1
        self._name = _PREFIX + secrets.token_hex(8)
        self._written = False
        self._locked = -1
        self._now = 0.0
        self.steps = {
            "look": self._look,
            "write": self._write,
            "find": self._find,
            "remove": self._remove,
            "lock": self._lock,
            "file": self._file,
        }

    def put_away(self) -> None:
        """Remove the file that was written, if it is still there."""
        if self._written:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder)

    def _look(self) -> Mapping[str, Any]:
        """Kind, place, owner and room of the path; it is opened for reading."""
        there = os.stat(self._path)
        room = os.statvfs(self._path)
        form = "other"
        if stat.S_ISDIR(there.st_mode):
            form = "folder"
            self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with os.scandir(self._folder) as entries:
                next(entries, None)
        elif stat.S_ISREG(there.st_mode):
            form = "file"
            with open(self._path, "rb", buffering=0) as file:
                file.read(1)
        return {
            "form": form,
            "real": os.path.realpath(self._path),
            "owner": there.st_uid,
            "mode": f"{stat.S_IMODE(there.st_mode):o}",
            "uid": os.geteuid(),
            "free": room.f_bavail * room.f_frsize if room.f_blocks else None,
            "inodes_free": room.f_favail if room.f_files else None,
        }

    def _write(self) -> Mapping[str, Any]:
        """Write a file and read it back; `write_s` for one write and fsync."""
        create = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        token = secrets.token_hex(16)
        content = (_MAGIC + token.encode()).ljust(BYTES, b"\n")
        handle = self._open(self._name, create)
        self._written = True
        took, self._now = self._timed(handle, content)
        if self._content(self._name) != content:
            raise OSError(errno.EIO, "what was written reads back as something else")
        times = [took]
        with contextlib.suppress(OSError):  # what keeps objects lets nobody write to one again
            while len(times) < _TIMES:
                times.append(self._timed(self._open(self._name, os.O_WRONLY), content)[0])
        self._remove_old()
        return {"name": self._name, "token": token, "write_s": round(statistics.median(times), 4)}

    def _timed(self, handle: int, content: bytes) -> tuple[float, float]:
        """Seconds to write with fsync, and the time of the file by the clock of the server."""
        try:
            began = time.monotonic()
            if os.write(handle, content) < BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle)
            return time.monotonic() - began, os.fstat(handle).st_mtime
        finally:
            os.close(handle)

    def _find(self, files: Mapping[str, tuple[str, str]], limit_s: float) -> Mapping[str, Any]:
        """`sees`: key → seconds until the file of that name and token was there, None for never.
        `feels`, after step `lock`: key → whether the lock on it is felt here.
        """
        began = time.monotonic()
        sees: dict[str, float | None] = dict.fromkeys(files)
        feels: dict[str, bool | None] = {}
        pause = 0.02
        while left := [key for key in files if sees[key] is None]:
            for key in left:
                if self._is_there(*files[key]):
                    sees[key] = round(time.monotonic() - began, 3)
                    if self._locked >= 0:
                        feels[key] = self._is_locked(files[key][0])
            if time.monotonic() - began + pause > limit_s:
                break
            if None in sees.values():
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        return {"sees": sees, **({"feels": feels} if feels else {})}

    def _is_there(self, name: str, token: str) -> bool:
        """True if another host's file can be seen, with what it has written."""
        if not _NAME.fullmatch(name):
            return False
        try:
            return self._content(name).startswith(_MAGIC + token.encode())
        except PermissionError:  # another user's, so it is there
            return True
        except OSError:
            return False

    def _remove(self) -> Mapping[str, Any]:
        """Remove what was written."""
        os.unlink(self._name, dir_fd=self._folder)
        self._written = False
        return {}

    def _lock(self) -> Mapping[str, Any]:
        """Lock the file that was written, flock(2) as torch's FileStore, and keep it locked."""
        try:
            self._locked = self._open(self._name, os.O_RDWR)
            fcntl.flock(self._locked, fcntl.LOCK_EX)
        except OSError as error:
            return {"lock_error": error.strerror or str(error)}
        return {"lock_error": ""}

    def _is_locked(self, name: str) -> bool | None:
        """True if another host's lock on its file is felt here; None if that cannot be tried."""
        try:
            handle = self._open(name, os.O_RDWR)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return True if error.errno == errno.EWOULDBLOCK else None
        finally:
            os.close(handle)
        return False

    def _file(self, name: str) -> Mapping[str, Any]:
        """`file`: what is known of a file in the folder, None if it is not there."""
        try:
            there = os.stat(name, dir_fd=self._folder)
        except FileNotFoundError:
            return {"file": None}
        content = b""
        if stat.S_ISREG(there.st_mode):
            with contextlib.suppress(OSError):
                content = self._content(name, _MOST_READ)
        facts = {
            "regular": stat.S_ISREG(there.st_mode),
            "size": there.st_size,
            "age_s": round(max(0.0, (self._now or time.time()) - there.st_mtime), 1),
            "owner": there.st_uid,
            "ranks": ranks_of_store(content),
        }
        return {"file": facts}

    def _open(self, name: str, how: int = os.O_RDONLY) -> int:
        flags = how | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, 0o644, dir_fd=self._folder)

    def _content(self, name: str, most: int = BYTES + 1) -> bytes:
        handle = self._open(name)
        try:
            return os.read(handle, most)
        finally:
            os.close(handle)

    def _remove_old(self) -> None:
        """Remove files that earlier runs of this user left, by the clock of the file system."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for number, entry in enumerate(entries):
                if number >= _MOST_ENTRIES:
                    break
                if _NAME.fullmatch(entry.name) and entry.name != self._name:
                    self._remove_if_old(entry.name)

    def _remove_if_old(self, name: str) -> None:
        with contextlib.suppress(OSError):
            there = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
            mine = there.st_uid == os.geteuid() and stat.S_ISREG(there.st_mode)
            if mine and self._now - there.st_mtime > _OLD_S and there.st_size <= BYTES:
                content = self._content(name)
                if not content or content.startswith(_MAGIC):
                    os.unlink(name, dir_fd=self._folder)


def ranks_of_store(content: bytes) -> int | None:
    """Processes that used a file of torch's FileStore; None where it does not look like one.

    Each entry is the length of the key (32 bits), the key, the length of the value, the value.
    """
    most, at = None, 0
    with contextlib.suppress(struct.error, ValueError):
        while at < len(content):
            words = []
            for _ in range(2):
                (length,) = struct.unpack_from("=I", content, at)
                words.append(content[at + 4 : at + 4 + length])
                at += 4 + length
            if words[0] == _REFCOUNT:
                most = max(most or 0, int(words[1]))
    return most
