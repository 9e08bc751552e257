"""A disk that does not answer: a writer waits in the kernel, and cannot even be killed."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_BYTES = 16 << 20


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[Path]:
    """Mount point of a frozen file system in a file of `folder`; thawed at the end."""
    image, disk = folder / "image", folder / "disk"
    with image.open("wb") as file:
        file.truncate(_BYTES)
    disk.mkdir()
    _do("mkfs.ext4", "-q", str(image))
    _do("mount", "-o", "loop", str(image), str(disk))
    try:
        _do("fsfreeze", "-f", str(disk))
        try:
            yield disk
        finally:
            thaw(disk)
    finally:
        # Lazily: who was let go a moment ago may still have a file open.
        subprocess.run(["umount", "-l", disk], check=True, timeout=10)


def thaw(disk: Path) -> None:
    """Let all that wait for the disk go on; nothing happens to one that is thawed."""
    subprocess.run(["fsfreeze", "-u", disk], check=False, stderr=subprocess.DEVNULL, timeout=10)


def _do(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        pytest.skip(f"needs {command[0]}")
    if done.returncode:
        pytest.skip(f"this machine refuses `{' '.join(command)}`: {done.stderr.strip()}")
