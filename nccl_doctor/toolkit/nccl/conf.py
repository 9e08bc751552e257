"""NCCL's variables as NCCL reads them: the environment, and files for what is not set there.

Source: `initEnvFunc` and `setEnvFile` in NCCL's src/misc/param.cc. `make test-nccl` compares this
with NCCL itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nccl_doctor.toolkit.nccl.release import NcclRelease, loaded_release

_LONGEST = 1023
"""Bytes of a name and of a value that NCCL keeps."""


@dataclass(frozen=True)
class Setting:
    """One effective variable and where its value came from: `environment` or a file.

    `line` counts from 1 in a file; it is 0 for the environment.
    """

    value: str
    origin: str
    line: int = field(default=0, compare=False)


@dataclass(frozen=True)
class ConfFault:
    """A line of a configuration file that does not set what it seems to set.

    `name` is the variable that was meant, empty if the line names none. The value is not kept.
    `line` is 0 for the file as a whole.
    """

    path: str
    line: int
    name: str
    fault: str


def nccl_settings(
    env: Mapping[str, str],
    home: Path | None = None,
    root: Path = Path("/"),
    release: NcclRelease | None = None,
) -> dict[str, Setting]:
    """The environment as NCCL reads it, with the variables of its configuration files.

    NCCL_CONF_FILE, where it is not empty, replaces ~/.nccl.conf; /etc/nccl.conf is read always;
    what is set already wins. A file that cannot be read counts as absent, as it does for NCCL.

    Args:
        env: the process environment.
        home: the home folder; by default where this release looks: HOME, or the user database.
        root: the folder below which the host's own file is read, `/` but for tests.
        release: by default the one that this process has loaded.
    """
    release = loaded_release() if release is None else release
    found = {name: Setting(value, "environment") for name, value in env.items()}
    for path in conf_files(env, home, root, release):
        for number, name, value in _assignments(path, release):
            found.setdefault(name, Setting(value, str(path), number))
    return found


def conf_files(
    env: Mapping[str, str],
    home: Path | None = None,
    root: Path = Path("/"),
    release: NcclRelease | None = None,
) -> tuple[Path, ...]:
    """The files that NCCL reads, in its order, whether they exist or not.

    Args: as for `nccl_settings`.
    """
    release = loaded_release() if release is None else release
    named = env.get("NCCL_CONF_FILE", "") if release.reads_conf_file_variable else ""
    if home is None and not named:
        home = _home(env, release)
    first = Path(named) if named else home / ".nccl.conf" if home else None
    etc = root / "etc/nccl.conf"
    return (etc,) if first is None else (first, etc)


def conf_faults(
    env: Mapping[str, str],
    home: Path | None = None,
    root: Path = Path("/"),
    release: NcclRelease | None = None,
) -> Iterator[ConfFault]:
    """Lines that NCCL reads in another way than they look, and an NCCL_CONF_FILE that is missing.

    Args: as for `nccl_settings`.
    """
    release = loaded_release() if release is None else release
    named = env.get("NCCL_CONF_FILE", "")
    for path in conf_files(env, home, root, release):
        text = _text(path)
        if text is None and str(path) == named:
            yield ConfFault(
                named, 0, "NCCL_CONF_FILE", "cannot be read, and NCCL does not report it"
            )
        for number, line in enumerate((text or "").split("\n"), 1):
            name, fault = _fault(
                line.removesuffix("\r") if release.strips_carriage_return else line
            )
            if fault:
                yield ConfFault(str(path), number, name, fault)


def _home(env: Mapping[str, str], release: NcclRelease) -> Path | None:
    if release.home_by_variable:
        # An empty one is not none: NCCL then reads /.nccl.conf.
        return Path(env["HOME"] or "/") if "HOME" in env else None
    import pwd

    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def _text(path: Path) -> str | None:
    try:
        # Not as text: a carriage return before the end of a line is a part of the value for NCCL.
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return None


def _assignments(path: Path, release: NcclRelease) -> Iterator[tuple[int, str, str]]:
    """(line, name, value): `#` is a comment in the first column alone; blanks are not trimmed."""
    for number, line in enumerate((_text(path) or "").split("\n"), 1):
        if release.strips_carriage_return:
            line = line.removesuffix("\r")
        name, equals, value = line.partition("=")
        if equals and name and not line.startswith("#"):
            yield number, name[:_LONGEST], value[:_LONGEST]


def _fault(line: str) -> tuple[str, str]:
    """(name that was meant, what is wrong with a line), both empty for a good one."""
    if line.startswith("#") or not line.strip():
        return "", ""
    name, equals, value = line.partition("=")
    words = name.split()
    meant = words[-1] if words and re.fullmatch(r"\w+", words[-1]) else ""
    if not equals or not meant:
        return "", "" if line.lstrip().startswith("#") else "is not NAME=VALUE, so NCCL ignores it"
    if name != meant:
        return meant, "has blanks or words around the name, which NCCL reads as part of it"
    if value != value.strip():
        return meant, "has blanks around the value, which NCCL reads as part of it"
    return meant, ""
