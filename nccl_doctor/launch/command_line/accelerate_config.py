"""The configuration file of `accelerate`: which one is read, and what is in it.

The file is written by `accelerate config`: `key: value` lines, with one level of tables. That much
YAML is read here, so that no YAML package is needed; a line beyond it is reported, not guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nccl_doctor.launch.command_line.job_line import JobLineError, Said
from nccl_doctor.toolkit import files

_MAX_BYTES = 1 << 20
_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_][\w-]*):(?:\s+(?P<value>.*))?")
_NOTHING = ("", "null", "Null", "NULL", "~", "{}", "[]")


@dataclass(frozen=True)
class Config:
    """Keys of the file, those of its tables too, as text; an absent or empty one is not there."""

    path: Path
    values: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def said(self, name: str) -> Said | None:
        """The value of a key, and where it stands."""
        return Said(self.values[name], f"{name} in {self.path}") if name in self.values else None


def default_path(environ: Mapping[str, str]) -> Path:
    """Path that accelerate reads if no file is given."""
    home = Path(environ.get("HOME") or "/")
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    text = environ.get("HF_HOME", f"{cache}/huggingface")
    folder = home / text.removeprefix("~/") if text.startswith("~/") else Path(text)
    return folder / "accelerate" / "default_config.yaml"


def load(path: Path, *, found: bool = False) -> Config:
    """Read a file; if it was `found`, and not named, no other user may have written it.

    Raises:
        JobLineError: it cannot be read, or is a JSON file that is none.
    """
    try:
        data = files.read_found(path, _MAX_BYTES) if found else files.read(path, _MAX_BYTES)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise JobLineError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobLineError(f"{path}: not text (byte {error.start})") from error
    if path.suffix != ".json":
        return _yaml(path, text)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobLineError(f"{path}: not JSON: {error}") from error
    if not isinstance(table, dict):
        raise JobLineError(f"{path}: not a table of keys and values")
    return Config(path, _flat(table))


def _flat(table: Mapping[str, Any]) -> dict[str, str]:
    values = {}
    for key, value in table.items():
        if isinstance(value, dict):
            values.update(_flat(value))
        elif isinstance(value, (str, int, float)):
            values[key] = str(value)
    return values


def _yaml(path: Path, text: str) -> Config:
    values: dict[str, str] = {}
    odd = []
    for line_number, line in enumerate(text.splitlines(), start=1):
        bare = _without_comment(line).rstrip()
        if not bare or bare == "---" or bare.lstrip().startswith("- "):
            continue
        match = _LINE.fullmatch(bare)
        if match is None:
            odd.append(line_number)
            continue
        value = (match["value"] or "").strip()
        if len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]:
            values[match["key"]] = value[1:-1]
        elif value not in _NOTHING:
            values[match["key"]] = value
    lines = ", ".join(map(str, odd[:5])) + (" …" if len(odd) > 5 else "")
    note = f"{path}: not read, for not being `key: value`: line {lines}"
    return Config(path, values, (note,) if odd else ())


def _without_comment(line: str) -> str:
    """A line up to a `#` that begins it or follows white space, outside quotes."""
    quote = ""
    for index, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and line[:index].rstrip().endswith(":"):
            quote = char
        elif char == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line
