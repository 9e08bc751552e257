"""A disk that does not answer: a writer waits in the kernel, and cannot even be killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_BYTES = 16 << 20
_MNT_DETACH = 2


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


@contextlib.contextmanager
def silent(folder: Path) -> Iterator[Path]:
    """A folder below `folder` on a file server that is gone: not even a look at it returns.

    A FUSE whose server reads no request. At the end every request fails.
    """
    place = folder / "silent"
    place.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"needs /dev/fuse: {error.strerror}")
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"silent", bytes(place), b"fuse", 0, options.encode()):
        os.close(device)
        pytest.skip(f"this machine refuses to mount: {os.strerror(ctypes.get_errno())}")
    try:
        yield place
    finally:
        os.close(device)
        libc.umount2(bytes(place), _MNT_DETACH)


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
