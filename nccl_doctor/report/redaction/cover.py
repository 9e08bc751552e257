"""Pseudonyms for a report, and their private map; no other module knows both.

The map stands beside what is given away, never inside, readable by its owner alone. It holds the
key too: what is redacted beside the same map has the same pseudonyms.
"""

from __future__ import annotations

import errno
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nccl_doctor.model.report import Report
from nccl_doctor.report.redaction import Book, Text, key_of_map, known_of, redact
from nccl_doctor.system import files, folders
from nccl_doctor.system.helpers import send

MAP = ".map.json"
"""Suffix of the map, after the name of the redacted file."""
_LEAST = 8
"""Least number of bytes in a key file: fewer can be guessed."""
_KEY_MOST = 4096
_MAP_MOST = 256 << 20
"""Bytes of a key that hosts share, and of a map."""


class Cover:
    """One key, and the map that says what its pseudonyms stand for.

    Args:
        path: where the map is kept; None to keep none.
        key_file: what to make the key of: any file, or the map of another report.
        folder: without a key file, the folder that all hosts share, with its key.
        beside: without both, maps that may lie there; the first one, or else the map at `path`, has
            the key. Without any, it is a new one.

    Raises:
        OSError: the key file cannot be read, or a map beside it is of another user, who would know
            the key.
        ValueError: the key file holds too little to be a key.
    """

    def __init__(
        self,
        path: str | Path | None,
        key_file: str | None = None,
        *,
        folder: str | Path | None = None,
        beside: Sequence[str] = (),
    ) -> None:
        self._path = None if path is None else Path(path)
        before = [_own_map(each) for each in (*map(Path, beside), *filter(None, [self._path]))]
        if key_file is not None:
            before.append(_map_of(_bytes_or_none(key_file)))
        keys = [key_of_map(json.dumps(each)) for each in before]
        if key_file is not None:
            self.key = read_key(key_file)
        elif folder is not None:
            self.key = shared_key(folder)
        else:
            self.key = next(filter(None, keys), None) or secrets.token_bytes(32)
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

    def write(self) -> str | None:
        """Write the map, mode 0600, in one piece; returns where, or None where none is kept.

        Raises:
            OSError: the folder is not writable.
        """
        if self._path is None or not self._kinds:
            return None
        files.write_private(self._path, self._map())
        return str(self._path)

    def write_into(self, folder: Path, name: str) -> None:
        """Write the map into the private folder of a folder that hosts share.

        Raises:
            OSError: the folder is not writable, or not private.
        """
        data = self._map().encode()

        def put() -> bytes:
            with folders.opened_private(folder) as private:
                folders.put(private, name, data, 0o600)
            return b""

        send(folder, put)

    def _map(self) -> str:
        data = {**Book(self.key).to_json(), "pseudonyms": self._kinds}
        return json.dumps(data, indent=1, sort_keys=True) + "\n"


def read_key(path: str) -> bytes:
    """The key in a file: that of a map, or else whatever it holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds too little to be a key.
    """
    return _key_of(files.read(path, _MAP_MOST))


def shared_key(folder: str | Path) -> bytes:
    """The key of all hosts that share a folder, in its private folder; the first host makes it.

    Raises:
        OSError: the folder is not writable, or not private.
        ValueError: what lies there holds too little to be a key.
    """

    def get() -> bytes:
        with folders.opened_private(folder) as private:
            try:
                return folders.read_own(private, "key", _KEY_MOST)[0]
            except FileNotFoundError:
                folders.keep_first(private, "key", f"{secrets.token_hex(32)}\n".encode())
                return folders.read_own(private, "key", _KEY_MOST)[0]

    return _key_of(send(folder, get))


def _key_of(data: bytes) -> bytes:
    found = key_of_map(data.decode("utf-8", "replace")) or data.strip()
    if len(found) < _LEAST:
        raise ValueError(f"a key needs at least {_LEAST} characters, and must be hard to guess")
    return found


class FolderRedaction:
    """Redaction of what hosts leave in a folder that they share: see `gather.views`.

    Args:
        key_file: the file of the key; None for one that the hosts share in the private folder.
    """

    def __init__(self, key_file: str | None) -> None:
        self._key_file = key_file

    def of(self, report: Report, folder: Path) -> tuple[Report, Callable[[str], object]]:
        """The report with pseudonyms, and what saves their map for a file of this name.

        Raises:
            OSError: the key cannot be read.
            ValueError: the key file holds no key.
        """
        cover = Cover(None, self._key_file, folder=folder)
        redacted = cover.of_report(report)
        return redacted, lambda name: cover.write_into(folder, f"{name}{MAP}")


def map_beside(outputs: Mapping[str, str]) -> str | None:
    """Path of the map of a report that is written to `outputs`; None if no output is a file."""
    paths = [outputs.get("json", "-"), *outputs.values()]
    files = [path for path in paths if path != "-" and not path.startswith("/dev/")]
    return f"{files[0]}{MAP}" if files else None


def _own_map(path: Path) -> dict[str, Any]:
    """The map that is there already; an empty one where none is, or what is there is none.

    Raises:
        PermissionError: another user wrote it: its key would be known to them.
    """
    try:
        return _map_of(files.read_own(path, _MAP_MOST))
    except PermissionError as error:
        if error.errno != errno.EPERM:
            return {}
        words = f"{error.strerror}; give its key with --redact-key, or move it away"
        raise PermissionError(errno.EPERM, words) from None
    except OSError:
        return {}


def _bytes_or_none(path: str) -> bytes:
    try:
        return files.read(path, _MAP_MOST)
    except OSError:
        return b""


def _map_of(data: bytes) -> dict[str, Any]:
    text = data.decode("utf-8", "replace")
    return dict(json.loads(text)) if key_of_map(text) else {}
