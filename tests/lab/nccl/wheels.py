"""NCCL's own wheels: the library of a version, fetched once into a cache of the user."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = {
    "2.22.3": "nvidia-nccl-cu12",
    "2.27.7": "nvidia-nccl-cu13",
    "2.28.9": "nvidia-nccl-cu13",
    "2.29.7": "nvidia-nccl-cu13",
    "2.30.7": "nvidia-nccl-cu13",
    "2.32.3": "nvidia-nccl-cu13",
}
"""Those that `make test-nccl` asks: one of every group of releases that have the same rules."""
VERSIONS = tuple(WHEELS)
QUICK = "2.30.7"
"""The one that `make test` asks."""
NOT_THERE = "No matching distribution found"
"""pip's words, where no index can be reached, and where the index does not have the version."""


class NoWheel(Exception):
    """The reason why a wheel is not there. `offered`: an index offers it."""

    def __init__(self, reason: str, *, offered: bool) -> None:
        super().__init__(reason)
        self.offered = offered


def library(version: str) -> Path:
    """Path of libnccl.so.2 of a version.

    About 250 MB each, in `$XDG_CACHE_HOME/nccl-doctor/nccl`, where a later call finds it.

    Raises:
        NoWheel: it cannot be fetched.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base, "nccl-doctor", "nccl", version)
    found = folder / "libnccl.so.2"
    if found.exists():
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            _fetch(version, found)
    return found


def _fetch(version: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "10"]
        wheel = f"{WHEELS.get(version, 'nvidia-nccl-cu13')}=={version}"
        try:
            done = subprocess.run(
                [*pip, "download", *options, "--no-cache-dir", "--dest", folder, wheel],
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NoWheel(f"pip download {wheel} took longer than 600 s", offered=True) from None
        if done.returncode:
            said = done.stderr.strip()
            last = said.splitlines()[-1] if said else f"exit code {done.returncode}"
            offered = NOT_THERE not in said
            raise NoWheel(f"pip download {wheel}: {last}", offered=offered)
        (file,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(file) as archive:
            name = next(each for each in archive.namelist() if each.endswith("/libnccl.so.2"))
            part = Path(folder, "part")
            with archive.open(name) as source, part.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
        part.rename(target)
