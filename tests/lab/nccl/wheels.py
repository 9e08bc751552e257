"""NCCL's own wheels: the library of a version, fetched once into a cache of the user."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import zipfile
from pathlib import Path

from tests.support.wheels import cache, download

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
TABLED = (
    *("2.27.7", "2.28.3", "2.28.7", "2.28.9", "2.29.2", "2.29.3", "2.29.7", "2.30.3", "2.30.4"),
    *("2.30.7", "2.31.2", "2.32.3"),
)
"""Those whose names and defaults are compared with the table of variables: all since 2.27."""
QUICK = "2.30.7"
"""The one that `make test` asks."""


def library(version: str) -> Path:
    """Path of libnccl.so.2 of a version.

    About 250 MB each, in `$XDG_CACHE_HOME/nccl-doctor/nccl`, where a later call finds it.

    Raises:
        NoWheel: it cannot be fetched.
    """
    folder = cache("nccl", version)
    found = folder / "libnccl.so.2"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            _fetch(version, found)
    return found


def _fetch(version: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        name = WHEELS.get(version, "nvidia-nccl-cu13")
        with zipfile.ZipFile(download(f"{name}=={version}", Path(folder))) as archive:
            member = next(each for each in archive.namelist() if each.endswith("/libnccl.so.2"))
            part = Path(folder, "part")
            with archive.open(member) as source, part.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
        part.rename(target)
