"""Files of a dead job, in folders and archives, each with its content.

Nothing is unpacked to a disk, and no more than a bounded part of anything is held in memory.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from nccl_doctor.autopsy.console import Frame, LineOrigin, Raised, Stack, read_console
from nccl_doctor.autopsy.flight import is_dump
from nccl_doctor.autopsy.ras import is_ras
from nccl_doctor.system.helpers import alive
from nccl_doctor.system.terminal import safe

_LARGEST = 2 << 30
"""Bytes of one file."""
_LARGEST_DUMP = 256 << 20
"""Bytes of a file that is read as a whole."""
_MOST_FILES = 100_000
_HEAD = 4096
_REPORT = re.compile(rb'\{\s*"checks": \[')
"""Beginning of a report: its keys are sorted."""
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError)


class Content(Enum):
    """Content of a file, by its first bytes."""

    CONSOLE = "console"
    DUMP = "flight-recorder dump"
    ERROR_FILE = "error file of torchelastic"
    RAS = "answer of NCCL's RAS"
    STACKS = "stacks of py-spy as JSON"
    REPORT = "report of nccl-doctor"
    BINARY = "neither text nor a dump"
    DAMAGED = "damaged"


@dataclass
class JobFile:
    """One file to read. `name` is what the user gave, and its path in there; `given`: the user
    named this file, not a folder or an archive that holds it; `why` it cannot be read.
    """

    name: str
    content: Content
    stream: _Bounded
    given: bool
    why: str = ""

    @property
    def size(self) -> int:
        """Bytes that were read of it."""
        return _LARGEST - self.stream.left

    def whole(self) -> bytes:
        """All of it.

        Raises:
            ValueError: it is too large for its content.
        """
        pieces, left = [], _LARGEST_DUMP
        while piece := self.stream.read(left + 1):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                raise ValueError(f"{self.name} is larger than {_LARGEST_DUMP >> 20} MB")
        return b"".join(pieces)


def found_in(paths: Iterable[str], standard_input: BinaryIO) -> Iterator[JobFile]:
    """Every file in `paths`, one after the other, each until the next; `-` is standard input.

    Raises:
        ValueError: a path cannot be read, or is not what can be examined; says which and why.
    """
    count = 0
    for path in paths:
        try:
            for found in _in_path(path, standard_input):
                count += 1
                if count > _MOST_FILES:
                    raise ValueError(f"{path}: there are more than {_MOST_FILES} files")
                yield found
        except _DAMAGED as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def _in_path(path: str, standard_input: BinaryIO) -> Iterator[JobFile]:
    if path == "-":
        yield from _opened("standard input", standard_input, given=True)
        return
    mode = os.stat(path).st_mode
    if not stat.S_ISDIR(mode):
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise ValueError(f"{path} is no file and no folder")
        yield from _file(path, path, given=True)
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            each = Path(folder, name)
            if each.is_file():
                yield from _file_among_others(str(each), str(each.relative_to(path)))


def _file_among_others(path: str, name: str) -> Iterator[JobFile]:
    """The files in one of a folder; those before its damage, and one that says what it is."""
    try:
        yield from _file(path, name, given=False)
    except (*_DAMAGED, OSError, ValueError) as error:
        why = f"{name}: {error}" if isinstance(error, (*_DAMAGED, OSError)) else str(error)
        yield JobFile(name, Content.DAMAGED, _Bounded(io.BytesIO(), name), given=False, why=why)


def _file(path: str, name: str, *, given: bool) -> Iterator[JobFile]:
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > _LARGEST:
            raise ValueError(
                f"{path} has {size / 1e9:.1f} GB, and {_LARGEST / 1e9:.1f} GB are read at most; "
                f"give its end: tail -c 500M {path} > end.log"
            )
        yield from _opened(name, stream, given=given)


def _opened(name: str, stream: IO[bytes], *, given: bool) -> Iterator[JobFile]:
    """The files in a stream: itself, or the members of an archive."""
    buffered = io.BufferedReader(cast(Any, stream), _HEAD * 16) if not _peeks(stream) else stream
    head = cast(Any, buffered).peek(_HEAD)[:_HEAD]
    if head[:2] == b"\x1f\x8b":
        with gzip.open(buffered) as unpacked:
            yield from _opened(name, cast(Any, unpacked), given=given)
    elif head[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(cast(Any, _seekable(name, buffered))) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    with archive.open(info) as member:
                        yield from _member(name, info.filename, member)
    elif head[257:262] == b"ustar":
        with tarfile.open(fileobj=cast(Any, buffered), mode="r|") as tape:
            for entry in tape:
                if entry.isfile() and (content := tape.extractfile(entry)) is not None:
                    yield from _member(name, entry.name, content)
    else:
        content_is = content_of(head)
        if content_is is not Content.BINARY or given:
            if content_is is Content.BINARY:
                raise ValueError(f"{name} is {Content.BINARY.value} of torch's flight recorder")
            yield JobFile(safe(name), content_is, _Bounded(buffered, name), given)


def _member(name: str, path: str, content: IO[bytes]) -> Iterator[JobFile]:
    yield from _opened(f"{name}:{path}", content, given=False)


def _peeks(stream: IO[bytes]) -> bool:
    return hasattr(stream, "peek")


def _seekable(name: str, stream: IO[bytes]) -> IO[bytes]:
    """The stream, or its content in memory, as the index of a zip file is at its end."""
    if stream.seekable():
        return stream
    data = stream.read(_LARGEST_DUMP + 1)
    if len(data) > _LARGEST_DUMP:
        raise ValueError(f"{name}: an archive larger than {_LARGEST_DUMP >> 20} MB needs a file")
    return io.BytesIO(data)


class _Bounded(io.RawIOBase):
    """A stream that may not have more than the largest number of bytes: archives unpack to more."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream, self._name, self.left = stream, name, _LARGEST

    def read(self, size: int = -1) -> bytes:
        alive()
        try:
            # What is there: an archive that ends too early gives no part of a larger read.
            data: bytes = cast(Any, self._stream).read1(size)
        except _DAMAGED as error:
            raise ValueError(f"{self._name} is damaged: {error}") from error
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(f"{self._name} has more than {_LARGEST / 1e9:.1f} GB")
        return data


def content_of(head: bytes) -> Content:
    """Content of a file with these first bytes."""
    if is_dump(head):
        return Content.DUMP
    if _REPORT.match(head) or (b'"schema_version"' in head and b'"tool"' in head):
        return Content.REPORT
    if head[:1] == b"{" and b'"message"' in head and b'"extraInfo"' in head:
        return Content.ERROR_FILE
    if head.lstrip()[:1] == b"[" and b'"thread_name"' in head:
        return Content.STACKS
    if is_ras(head):
        return Content.RAS
    return Content.BINARY if b"\0" in head else Content.CONSOLE


def read_error_file(data: bytes, name: str) -> list[Raised]:
    """The exception in an error file of torchelastic (@record), with its traceback.

    Raises:
        ValueError: it has none.
    """
    try:
        message = json.loads(data)["message"]
        text, stack = (
            (message, "")
            if isinstance(message, str)
            else (str(message["message"]), str(message["extraInfo"]["py_callstack"]))
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: an error file without a message: {error!r}") from error
    found = [each for each in read_console(io.BytesIO(stack.encode())) if isinstance(each, Raised)]
    return found or [Raised(1, LineOrigin(), error=text)]


def read_stacks(data: bytes, name: str) -> list[Stack]:
    """The main thread's stack in what `py-spy dump --json` prints.

    Raises:
        ValueError: it is cut off, or of another form.
    """
    try:
        return [
            Stack(
                1,
                LineOrigin(pid=int(thread["pid"])),
                [
                    Frame(str(each["filename"]), int(each["line"]), str(each["name"]))
                    for each in reversed(thread["frames"])  # the innermost first
                ],
            )
            for thread in json.loads(data)
            if thread["thread_name"] == "MainThread"
        ]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: no stacks of py-spy: {error!r}") from error
