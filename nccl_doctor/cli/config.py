"""The configuration file: options of `run` and expected values.

`nccl-doctor.toml`, or the table `[tool.nccl-doctor]` of `pyproject.toml`, in the working directory;
the first wins. What is not known is an error: a value nobody reads is a promise nobody keeps. What
another user may have written there is left out, and said.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nccl_doctor.cli.options import Types, in_file
from nccl_doctor.system import files
from nccl_doctor.system.helpers import send
from nccl_doctor.toolkit.suggest import suggest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "nccl-doctor.toml"
_TABLE = "nccl-doctor"

OPTIONS: Mapping[str, Types] = in_file()
"""Options of `run` by the name of their flag. Which values are good, the command line decides."""
EXPECTED: Mapping[str, Types] = {"gpus-per-host": (int,)}
"""Keys of `[expected]` that a check reads."""

_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list of strings",
}


class ConfigError(ValueError):
    """The configuration file cannot be used; the text names file, key and value."""


class NotOurs(Exception):
    """Another user may have chosen what a file says."""


class ConfigFile(NamedTuple):
    """Options of a file: name (with underscores) → value, and under `expected` its table; the path
    of the file, if there is one; and a line for each file that was left out.
    """

    values: Mapping[str, Any]
    file: str = ""
    left_out: tuple[str, ...] = ()


def load(path: str | None, cwd: str | Path) -> ConfigFile:
    """Read the configuration. One that is found in the working directory is left out where another
    user may have written it.

    Args:
        path: the file given with --config, or None to look in `cwd`.
        cwd: the working directory.

    Raises:
        ConfigError: the file given is missing, or a file is not TOML, or holds an unknown key or a
            value of the wrong type.
    """
    if path is not None:
        table = _table(Path(path), _read(Path(path)))
        if table is None:
            raise ConfigError(f"{path} has no table [tool.{_TABLE}]")
        return ConfigFile(_checked(Path(path), table), path)
    left_out = []
    for file in _there(Path(cwd)):
        if file.name == "pyproject.toml" and _TABLE not in _read(file):
            continue  # not ours to complain about
        try:
            table = _table(file, _read(file, files.read_found))
        except NotOurs as error:
            left_out.append(f"{error}; --config {file.name} uses it all the same")
            continue
        if table is not None:
            return ConfigFile(_checked(file, table), str(file), tuple(left_out))
    return ConfigFile({}, left_out=tuple(left_out))


def _there(cwd: Path) -> list[Path]:
    """Files of a folder that may hold a configuration."""
    names = (FILE_NAME, "pyproject.toml")
    try:
        found = send(cwd, lambda: "/".join(n for n in names if (cwd / n).is_file()).encode())
    except OSError as error:
        raise ConfigError(f"cannot look for a configuration in {cwd}: {error.strerror}") from error
    return [cwd / name for name in found.decode().split("/") if name]


def _read(file: Path, how: Callable[[Path, int], bytes] = files.read) -> str:
    try:
        return how(file, files.CONFIG_MAX).decode()
    except OSError as error:
        if how is files.read_found and error.errno == errno.EPERM:
            raise NotOurs(f"{file} is left out: {error.strerror}") from error
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start})") from error


def _table(file: Path, text: str) -> Mapping[str, Any] | None:
    try:
        data: Mapping[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise ConfigError(f"{file} is not TOML: {error}") from error
    if file.name != "pyproject.toml":
        return data
    tool = data.get("tool", {})
    table = tool.get(_TABLE) if isinstance(tool, Mapping) else None
    if table is not None and not isinstance(table, Mapping):
        raise ConfigError(f"{file}: tool.{_TABLE} is not a table")
    return table


def _checked(file: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    sections = {"expected": EXPECTED}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in sections:
            out[name.replace("-", "_")] = _value(file, key, value, OPTIONS, sections)
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"{file}: {key} is not a table; write [{key}]")
        out[name] = {
            inner.replace("-", "_"): _value(file, inner, item, sections[name], (), prefix=f"{key}.")
            for inner, item in value.items()
        }
    return out


def _value(
    file: Path, key: str, value: Any, known: Mapping[str, Types], also: Any, *, prefix: str = ""
) -> Any:
    name = key.replace("_", "-")
    if name not in known:
        names = [*known, *also]
        hint = suggest(name, names)
        hint = hint or (f"; known: {', '.join(names)}" if names else "; none is known yet")
        raise ConfigError(f'{file}: unknown key "{prefix}{key}"{hint}')
    types = known[name]
    good = isinstance(value, types) and (not isinstance(value, bool) or bool in types)
    if isinstance(value, list):
        good = good and all(isinstance(item, str) for item in value)
    if not good:
        words = [_WORDS[t] for t in types if t is not int or float not in types]
        raise ConfigError(f"{file}: {prefix}{key} is {value!r}, not {' or '.join(words)}")
    return value
