"""The hosts of a job, as DeepSpeed and MPI write them: one line each, `worker-0 slots=8`.

Launchers read lines without `slots=` in different ways: DeepSpeed refuses them, Open MPI takes one
rank or one per core, by version. A doctor that guessed would examine another job than the one that
is meant, so such a line is good only where --nproc-per-node says the number.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nccl_doctor.system import files
from nccl_doctor.toolkit.suggest import suggest

MAX_BYTES = 1 << 20
"""Largest hostfile: some ten thousand hosts."""
MAX_RANKS = 10_000
"""Most ranks on one host; a larger number is a mistake."""

_KEYS = ("slots", "max_slots", "max-slots", "slots_max", "slots-max")
"""Open MPI's limits are read by its own scheduler only: nothing here depends on them."""
# No leading hyphen: ssh would take it for an option.
_HOST = re.compile(r"(?:(?P<user>[\w.][\w.-]*)@)?(?P<name>[\w:][\w.:%-]*)", re.ASCII)
_MARK = "\ufeff"
_SHOWN = 5


class HostfileError(ValueError):
    """The file cannot be used; the text is one line: file, line numbers, what to write."""


@dataclass(frozen=True)
class Entry:
    """One host of the file: `name` as written there, without the user. `slots` None: not given."""

    name: str
    slots: int | None
    line: int
    user: str = ""

    @property
    def destination(self) -> str:
        """Destination for ssh: `name` or `user@name`."""
        return f"{self.user}@{self.name}" if self.user else self.name


def read(path: str, *, found: bool = False, of_deepspeed: bool = False) -> tuple[Entry, ...]:
    """The hosts of a file, in order: the node rank of a host is its index.

    Args:
        path: of the file.
        found: nobody named the file; then no other user may have written it.
        of_deepspeed: deepspeed reads it, and not this program.

    Raises:
        HostfileError: it cannot be read, names no host, or has lines that are wrong.
    """
    try:
        data = files.read_found(Path(path), MAX_BYTES) if found else files.read(path, MAX_BYTES)
    except OSError as error:
        meant = "; if it is meant, name it with --hostfile" if found else ""
        raise HostfileError(
            f"--hostfile {path}: cannot be read: {error.strerror}{meant}"
        ) from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise HostfileError(f"--hostfile {path}: not UTF-8 text (byte {error.start})") from error
    if of_deepspeed and text.startswith(_MARK):
        raise HostfileError(
            f"--hostfile {path}: begins with a byte order mark, which deepspeed takes for a part "
            "of the first name; write it without: "
            f"sed -i '1s/^\\xEF\\xBB\\xBF//' {shlex.quote(path)}"
        )
    return parse(text.removeprefix(_MARK), path, of_deepspeed=of_deepspeed)


def parse(text: str, path: str, *, of_deepspeed: bool = False) -> tuple[Entry, ...]:
    """The hosts of a hostfile's text; `path` is for the errors, `of_deepspeed` as in `read`.

    Raises:
        HostfileError: as in `read`.
    """
    read_entry = _entry_of_deepspeed if of_deepspeed else _entry
    entries: dict[str, Entry] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            entry = read_entry(words, number)
        except ValueError as error:
            problems.append(f'line {number}: "{_short(" ".join(words))}": {error}')
            continue
        name = entry.destination if of_deepspeed else entry.name.lower()
        first = entries.setdefault(name, entry)
        if first is not entry:
            problems.append(
                f'line {number}: "{entry.name}" is already on line {first.line}; '
                "write one line with all its slots"
            )
    if problems:
        raise HostfileError(f"--hostfile {path}: {_few(problems)}")
    if not entries:
        raise HostfileError(f'--hostfile {path}: names no host; write lines like "node1 slots=8"')
    return tuple(entries.values())


def ranks_per_host(
    entries: Sequence[Entry], nproc_per_node: str | None, path: str
) -> tuple[str, ...]:
    """`--nproc-per-node` of every host: what was asked for, or else its slots.

    Raises:
        HostfileError: more ranks were asked for than a host has slots, or nothing says how many.
    """
    if nproc_per_node is None:
        problems = [
            f'line {entry.line}: "{entry.name}" has no slots; write "{entry.name} slots=N" with '
            "the number of ranks, or give --nproc-per-node"
            for entry in entries
            if entry.slots is None
        ]
    else:
        wanted = int(nproc_per_node) if nproc_per_node.isdecimal() else 0
        problems = [
            f'line {entry.line}: "{entry.name}" has slots={entry.slots}, fewer than '
            f"--nproc-per-node {wanted}"
            for entry in entries
            if entry.slots is not None and wanted > entry.slots
        ]
    if problems:
        raise HostfileError(f"--hostfile {path}: {_few(problems)}")
    return tuple(nproc_per_node or str(entry.slots) for entry in entries)


def _entry(words: Sequence[str], number: int) -> Entry:
    """One line; ValueError says what is wrong with it and what to write."""
    host, *rest = words
    match = _host(host)
    slots = None
    for word in rest:
        key, equals, value = word.partition("=")
        if key not in _KEYS:
            hint = f'write "user@{host}"' if key in ("user", "username") else ""
            known = suggest(key, _KEYS) or f'; write "{host} slots=8"'
            raise ValueError(hint or f'"{word}" is not known{known}')
        if not equals or not value:
            raise ValueError(f'write "{key}=8", without spaces')
        if not (value.isascii() and value.isdecimal()) or not 0 < int(value[:9]) <= MAX_RANKS:
            raise ValueError(f"{key} is {value!r}, not a number from 1 to {MAX_RANKS}")
        if key == "slots":
            if slots is not None:
                raise ValueError("slots is given twice")
            slots = int(value)
    return Entry(match["name"], slots, number, match["user"] or "")


def _entry_of_deepspeed(words: Sequence[str], number: int) -> Entry:
    """One line as deepspeed 0.19.8 reads it (_parse_hostfile in deepspeed/launcher/runner.py): a
    name, white space, `slots=` and digits; it looks at nothing behind them.
    """
    host, *rest = words
    match = _host(host)
    slots = re.match(r"slots=(\d+)", rest[0], re.ASCII) if rest else None
    if slots is None:
        given = [word for word in rest if word.startswith("slots=")]
        others = [word for word in rest if word not in given]
        line = " ".join([host, *(given or ["slots=8"]), *(others if given else [])])
        raise ValueError(f'deepspeed takes slots= right behind the name; write "{line}"')
    if int(slots[1][:9]) > MAX_RANKS:
        raise ValueError(f"slots is {slots[1][:12]}, more than {MAX_RANKS}")
    return Entry(match["name"], int(slots[1]), number, match["user"] or "")


def _host(word: str) -> re.Match[str]:
    """Name and user of a host; ValueError if it is none."""
    count = re.fullmatch(r"([^:=]+):(\d+)", word)
    if count:
        raise ValueError(f'write "{count[1]} slots={count[2]}"')
    match = _HOST.fullmatch(word)
    if not match:
        raise ValueError('it does not begin with a host name; write "node1 slots=8"')
    return match


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def _few(problems: Iterable[str]) -> str:
    found = list(problems)
    more = len(found) - _SHOWN
    return "; ".join(found[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
