"""Wheels of others, fetched once into a cache of the user."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

NOT_THERE = "No matching distribution found"
"""pip's words, where no index can be reached, and where the index does not have the version."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_LONGEST_S = 900


class NoWheel(Exception):
    """The reason why a wheel is not there. `offered`: an index offers it."""

    def __init__(self, reason: str, *, offered: bool) -> None:
        super().__init__(reason)
        self.offered = offered


def leave(error: NoWheel) -> NoReturn:
    """Skip the test; in CI, fail it where an index offers the wheel."""
    if error.offered and os.environ.get("CI", "").lower() == "true":
        pytest.fail(str(error), pytrace=False)
    pytest.skip(str(error))


def cache(*names: str) -> Path:
    """A folder in `$XDG_CACHE_HOME/nccl-doctor`, which is made."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base, "nccl-doctor", *names)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement such as `torch==2.4.1`, without what it needs.

    Raises:
        NoWheel: it cannot be fetched.
    """
    options = ("--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "10")
    pip("download", *options, "--no-cache-dir", "--dest", str(folder), requirement)
    (file,) = folder.glob("*.whl")
    return file


def installed(requirement: str, *options: str) -> Path:
    """Folder in the cache of the user into which a package was installed once.

    `options`: of pip; the last one takes the folder, as `--prefix` or `--target`.
    """
    folder = cache("launchers", requirement)
    with (folder.parent / f"{requirement}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not (folder / "done").exists():
                pip("install", "--no-cache-dir", *options, str(folder), requirement)
                (folder / "done").touch()
        except NoWheel as error:
            leave(error)
    return folder


def newest(name: str) -> str:
    """The newest release of a package that the index offers.

    Raises:
        NoWheel: it offers none.
    """
    said = re.search(r"\((\S+)\)", pip("index", "versions", name))
    if said is None:
        raise NoWheel(f"pip index versions {name} names no release", offered=True)
    return said[1]


def wanted(requirement: str) -> str:
    """`mpich==5.0.2` as it is, or the newest release where `make test-newest` asks for it."""
    name = requirement.partition("==")[0]
    return f"{name}=={newest(name)}" if os.environ.get("NEWEST") == "1" else requirement


def pip(*words: str) -> str:
    """Run pip. Returns: its output.

    Raises:
        NoWheel: it failed; its last line.
    """
    shown = f"pip {words[0]} {words[-1]}"
    try:
        done = subprocess.run(
            [*PIP, *words], capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoWheel(f"{shown} took longer than {_LONGEST_S} s", offered=True) from None
    if done.returncode:
        said = done.stderr.strip()
        last = said.splitlines()[-1] if said else f"exit code {done.returncode}"
        raise NoWheel(f"{shown}: {last}", offered=NOT_THERE not in said)
    return done.stdout
