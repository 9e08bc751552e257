"""NCCL's variables as NCCL sees them: the environment, and the files that fill what it lacks.

Source: `initEnvFunc` in NCCL's src/misc/param.cc.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ETC_CONF = Path("/etc/nccl.conf")


@dataclass(frozen=True)
class Setting:
    """One effective variable and where its value came from: `environment` or a file."""

    value: str
    origin: str


def nccl_settings(
    env: Mapping[str, str], home: Path | None = None, etc: Path = ETC_CONF
) -> dict[str, Setting]:
    """The environment as NCCL sees it: its configuration files fill what is not set.

    NCCL_CONF_FILE, where it is not empty, replaces ~/.nccl.conf; /etc/nccl.conf is read always;
    what is set already wins. A file that cannot be read counts as absent, as it does for NCCL.

    Args:
        env: the process environment.
        home: the home folder; by default that of the user database, which is where NCCL looks.
        etc: the host's own file.
    """
    found = {name: Setting(value, "environment") for name, value in env.items()}
    named = env.get("NCCL_CONF_FILE", "")
    if home is None:
        home = _home()
    first = Path(named) if named else home / ".nccl.conf" if home else None
    for path in (first, etc):
        for name, value in _read_conf(path).items() if path else ():
            found.setdefault(name, Setting(value, str(path)))
    return found


def _home() -> Path | None:
    import pwd

    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def _read_conf(path: Path) -> dict[str, str]:
    """NAME=VALUE lines; `#` is a comment in the first column alone, and blanks are not trimmed."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    values: dict[str, str] = {}
    for line in text.split("\n"):
        name, equals, value = line.partition("=")
        if equals and name and not line.startswith("#"):
            values.setdefault(name, value)
    return values
