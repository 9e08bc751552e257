"""Pseudonyms for a report, and their private map; no other module knows both.

The map stands beside what is given away, never inside, readable by its owner alone. It holds the
key too: what is redacted beside the same map has the same pseudonyms.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.model.report import Report
from nccl_doctor.report.redaction import Book, Text, key_of_map, known_of, redact
from nccl_doctor.toolkit import files
from nccl_doctor.toolkit.errands import send

MAP = ".map.json"
"""Suffix of the map, after the name of the redacted file."""
PRIVATE = ".private"
"""Subfolder of a shared folder that only its owner can read."""
_LEAST = 8
"""Least number of bytes in a key file: fewer can be guessed."""


class Cover:
    """One key, and the map that says what its pseudonyms stand for.

    Args:
        path: where the map is kept; None to keep none.
        key_file: what to make the key of: any file, or the map of another report. Else it is the
            key of the map that is there, or a new one.

    Raises:
        OSError: the key file cannot be read.
        ValueError: it holds too little to be a key.
    """

    def __init__(self, path: str | Path | None, key_file: str | None = None) -> None:
        self._path = None if path is None else Path(path)
        before = [_map_at(self._path), _map_at(None if key_file is None else Path(key_file))]
        keys = [key_of_map(json.dumps(each)) for each in before]
        self.key = (
            read_key(key_file) if key_file is not None else keys[0] or secrets.token_bytes(32)
        )
        self._kinds: dict[str, dict[str, str]] = {}
        for each, key in zip(before, keys, strict=True):
            if key == self.key:
                self._add(each["pseudonyms"])

    def of_report(self, report: Report) -> Report:
        """The report with pseudonyms; one that has them already, as it is."""
        redacted, book = redact(report, self.key)
        self.keep(book)
        return redacted

    def text_of(self, report: Report) -> Text:
        """Text replacer for texts that belong to a report; `keep` its book afterwards."""
        text = known_of(report, Book(self.key))
        for name in self._kinds.get("host", {}).values():
            text.names.know_host(name)
        for name in self._kinds.get("user", {}).values():
            text.names.know_user(name)
        return text

    def keep(self, book: Book) -> None:
        """Note what a book says in the map; `write` puts it on the disk."""
        self._add(book.to_json()["pseudonyms"])

    def _add(self, pseudonyms: Mapping[str, Mapping[str, str]]) -> None:
        for kind, names in pseudonyms.items():
            self._kinds.setdefault(kind, {}).update(names)

    def write(self, path: Path | None = None) -> str | None:
        """Write the map, mode 0600, in one piece; returns where, or None where none is kept.

        Raises:
            OSError: the folder is not writable.
        """
        target = path or self._path
        if target is None or not self._kinds:
            return None
        data = {**Book(self.key).to_json(), "pseudonyms": self._kinds}
        files.write_private(target, json.dumps(data, indent=1, sort_keys=True) + "\n")
        return str(target)


def read_key(path: str) -> bytes:
    """The key in a file: that of a map, or else whatever it holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds too little to be a key.
    """
    data = files.read(path)
    found = key_of_map(data.decode("utf-8", "replace")) or data.strip()
    if len(found) < _LEAST:
        raise ValueError(f"a key needs at least {_LEAST} characters, and must be hard to guess")
    return found


def key_in(folder: str | Path) -> str:
    """The file of the key of all hosts that share a folder; the first host makes it.

    Raises:
        OSError: the folder is not writable.
    """
    private = private_folder(folder)
    path = private / "key"
    made = private / f"key.{secrets.token_hex(8)}"
    if send(private, lambda: str(path.exists()).encode()) == b"False":
        files.write_private(made, secrets.token_hex(32) + "\n")
        send(private, lambda: _linked(made, path))
    return str(path)


class FolderRedaction:
    """Redaction of what hosts leave in a folder that they share: see `gather.partial_reports`.

    Args:
        key_file: the file of the key; None for one that the hosts share in the private folder.
    """

    def __init__(self, key_file: str | None) -> None:
        self._key_file = key_file

    def private_folder(self, folder: Path) -> Path:
        """The private folder in it, made if possible; writing there reports the error if not."""
        with contextlib.suppress(OSError):
            private_folder(folder)
        return folder / PRIVATE

    def of(self, report: Report, folder: Path) -> tuple[Report, Callable[[str], object]]:
        """The report with pseudonyms, and what saves their map for a file of this name.

        Raises:
            OSError: the key cannot be read.
            ValueError: the key file holds no key.
        """
        cover = Cover(None, self._key_file or key_in(folder))
        redacted = cover.of_report(report)
        return redacted, lambda name: cover.write(folder / PRIVATE / f"{name}{MAP}")


def _linked(made: Path, path: Path) -> bytes:
    """Put a file in its place: whole, or not at all, and never over another one."""
    try:
        os.link(made, path)
    except FileExistsError:
        pass
    finally:
        made.unlink()
    return b""


def private_folder(folder: str | Path) -> Path:
    """The private folder in one that hosts share, made where it is not there.

    Raises:
        OSError: it cannot be made.
    """
    private = Path(folder) / PRIVATE

    def make() -> bytes:
        private.mkdir(mode=0o700, exist_ok=True)
        return b""

    send(folder, make)
    return private


def map_beside(outputs: Mapping[str, str]) -> str | None:
    """Path of the map of a report that is written to `outputs`; None if no output is a file."""
    paths = [outputs.get("json", "-"), *outputs.values()]
    files = [path for path in paths if path != "-" and not path.startswith("/dev/")]
    return f"{files[0]}{MAP}" if files else None


def _map_at(path: Path | None) -> dict[str, Any]:
    """The map that is there already; an empty one where none is, or what is there is none."""
    try:
        text = files.read(path).decode() if path else ""
        return dict(json.loads(text)) if key_of_map(text) else {}
    except (OSError, UnicodeDecodeError):
        return {}
