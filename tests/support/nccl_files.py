"""Files in /dev/shm as NCCL makes them, with names that belong to one test."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

FOLDER = Path("/dev/shm")
SIZE = 1 << 16


def nccl_file(tag: str, *, keep_open: bool = True) -> mmap.mmap:
    """Make one in this process and map it, as ncclShmOpen does; NCCL keeps it open."""
    handle, _ = tempfile.mkstemp(prefix=f"nccl-{tag}", dir=FOLDER)
    os.posix_fallocate(handle, 0, SIZE)
    memory = mmap.mmap(handle, SIZE)
    KEPT.append((handle, memory))
    if not keep_open:
        os.close(handle)
    return memory


def left(tag: str) -> list[str]:
    """The names of those that are there."""
    return sorted(path.name for path in FOLDER.glob(f"nccl-{tag}*"))


KEPT: list[tuple[int, mmap.mmap]] = []
"""Whatever this process has mapped: descriptor and memory."""
