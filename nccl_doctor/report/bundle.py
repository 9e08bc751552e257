"""Archive for a support ticket: texts, and a manifest of what is in it and what was left out.

Nothing of the machine that packs it gets into the archive by the way: no owner, no file names.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from nccl_doctor import __version__
from nccl_doctor.model.report import Report
from nccl_doctor.system import files
from nccl_doctor.system.helpers import alive, send
from nccl_doctor.system.masking import masked

ROOT = "nccl-doctor-bundle"
"""Folder in the archive."""
_HEAD = 1 << 20
_TAIL = 7 << 20
"""Bytes of a long log that are kept from its start, with the set-up of NCCL, and its end."""
_WHOLE, _NOT_WHOLE = b"+", b"-"
_MOST_LOGS = 64
_LINES_KEPT = 4096
"""Lines of a log that are remembered with their replacement."""
_DUMPS = {"NCCL_DEBUG_FILE": b"NCCL ", "NCCL_TOPO_DUMP_FILE": b"<system"}
"""Variables of the job that name files, and what such a file holds near its start."""


@dataclass(frozen=True)
class Piece:
    """One file of the archive: its name there, what it is (a command, a path), and its bytes."""

    name: str
    what: str
    data: bytes


class Bundle:
    """Files and manifest of the archive."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[str, bytes]] = {}
        self._left_out: list[dict[str, str]] = []

    def add(self, name: str, text: str | bytes, what: str = "") -> None:
        """A file of the archive, and what it is: the command that printed it, where it was."""
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        self._texts[name] = (what, data)

    def leave_out(self, what: str, why: str) -> None:
        """Note in the manifest what is not there, or not whole."""
        self._left_out.append({"what": what, "why": why})

    def reword(self, replaced: Callable[[str], str]) -> None:
        """Put pseudonyms into what is said of that."""
        self._left_out = [
            {name: replaced(words) for name, words in each.items()} for each in self._left_out
        ]

    def __len__(self) -> int:
        return len(self._texts)

    def manifest(self, about: dict[str, Any]) -> dict[str, Any]:
        """Names, sizes in bytes and SHA-256 of all files, and what was left out."""
        return {
            **about,
            "tool": {"name": "nccl-doctor", "version": __version__},
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "files": [
                {
                    "name": name,
                    "bytes": len(data),
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "what": what,
                }
                for name, (what, data) in sorted(self._texts.items())
            ],
            "left_out": self._left_out,
        }

    def write(self, path: str | Path, about: dict[str, Any]) -> None:
        """Write the archive (tar, gzip), in one piece and for its owner alone.

        Raises:
            OSError: the folder is not there or not writable.
        """
        manifest = json.dumps(self.manifest(about), indent=1).encode()
        pieces = {
            "manifest.json": manifest,
            **{name: data for name, (_, data) in self._texts.items()},
        }
        whole = io.BytesIO()
        # No file name in the head of gzip, and no owner in those of tar.
        with (
            gzip.GzipFile("", "wb", fileobj=whole) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for each, data in sorted(pieces.items()):
                entry = tarfile.TarInfo(f"{ROOT}/{each}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o644
                archive.addfile(entry, io.BytesIO(data))
        files.write_private(Path(path), whole.getvalue())


def named_logs(report: Report) -> list[Path]:
    """Logs and topologies that NCCL wrote to the files named by the job's variables, if they are on
    this host. A report may come from any source: a file that it names is used only if NCCL wrote
    it.
    """
    named = {
        (variable, value)
        for rank in report.cluster.ranks
        for variable, value in rank.env.items()
        if variable in _DUMPS and isinstance(value, str) and value
    }
    found: list[Path] = []
    for variable, pattern in sorted(named):
        look = partial(_written, pattern, _DUMPS[variable])
        try:
            found += map(Path, json.loads(send(Path(pattern).parent, look)))
        except TimeoutError:
            found.append(Path(pattern))  # who reads it will say why it is not there
    return found[:_MOST_LOGS]


def _written(pattern: str, holds: bytes) -> bytes:
    """Files that a variable names and that NCCL wrote, as JSON. Runs in a child."""
    # %h is the host, %p the process.
    paths = sorted(glob.glob(re.sub("%[hp]", "*", glob.escape(pattern))))
    return json.dumps([path for path in paths if holds in _start_of(Path(path))]).encode()


def _start_of(path: Path) -> bytes:
    alive()
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(4096)
    except OSError:
        return b""


def read_logs(paths: Sequence[Path], packed: Bundle, *, raw: bool) -> Iterator[Piece]:
    """Logs, each once; `raw`: as they are, under their own names, though they may be no text."""
    for i, path in enumerate(dict.fromkeys(path.absolute() for path in paths), 1):
        try:
            answer = send(path.parent, partial(_read_log, path))
        except OSError as error:
            packed.leave_out(str(path), f"cannot be read: {error.strerror}")
            continue
        is_whole, data = answer.startswith(_WHOLE), answer[len(_WHOLE) :]
        if not raw and b"\0" in data:
            packed.leave_out(str(path), "not text, so names in it cannot be replaced by pseudonyms")
            continue
        if not is_whole:
            packed.leave_out(str(path), f"its middle part: longer than {(_HEAD + _TAIL) >> 20} MiB")
        name = f"logs/{i:02d}-{path.name}" if raw else f"logs/{i:02d}.txt"
        yield Piece(name, str(path), without_secrets(data))


def _read_log(path: Path) -> bytes:
    """A log, without the middle of a very long one; before it, whether it is whole.

    Runs in a child.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _HEAD + _TAIL:
            return _WHOLE + file.read(_HEAD + _TAIL)
        head = file.read(_HEAD)
        alive()
        file.seek(size - _TAIL)
        tail = file.read(_TAIL)
    # Whole lines, so that no half of a name stays.
    head, tail = head[: head.rfind(b"\n") + 1], tail[tail.find(b"\n") + 1 :]
    return _NOT_WHOLE + head + b"[...]\n" + tail


def without_secrets(data: bytes) -> bytes:
    """A text with its secrets masked, also where names may be seen; what is no text stays."""
    if b"\0" in data:
        return data
    return masked(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def by_line(text: str, replaced: Callable[[str], str]) -> str:
    """A text with every line replaced. A log says many a line again and again: that is kept."""
    once = lru_cache(maxsize=_LINES_KEPT)(replaced)
    return "".join(once(line) for line in text.splitlines(keepends=True))
