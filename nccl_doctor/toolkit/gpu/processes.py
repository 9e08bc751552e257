"""Processes on a GPU, by their numbers as the driver gives them.

In a container a driver may give the numbers of the host: a number then is nobody's here, or that of
another process.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from nccl_doctor.system.forks import OURS
from nccl_doctor.toolkit.host import is_first_namespace

NVIDIA, AMD = "/dev/nvidia", "/dev/kfd"
"""How the names of the device files begin that a process on a GPU of this vendor has open."""
_DEEPEST = 64
_NEAR, _WORDS = 3, 8
_DOCTOR = re.compile(rb"(^|/)nccl[_-]doctor(\.pyz|/__main__\.py)?$")


def process_on_gpu(root: Path, pid: int, held: int | None, device: str) -> dict[str, Any]:
    """A process on a GPU; its name is None if it is in another PID namespace.

    `here`: whether its number is one of this PID namespace: all are in the first one, and else that
    of a process that has a device of the driver open.

    Args:
        root: folder in which `proc` lies.
        pid: the number that the driver gives.
        held: bytes that it holds on the GPU.
        device: NVIDIA or AMD.
    """
    process = root / f"proc/{pid}"
    try:
        name: str | None = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        name = None
    here = is_first_namespace(root / "proc") or _has_open(process, device)
    return {"pid": pid, "bytes": held, "name": name, "here": here}


def is_own(pid: int, root: Path) -> bool:
    """True if a process belongs to the examination, or is above this one or one of another rank:
    the rank's own process of the job, which started the examination and waits for it (Ray Train).
    """
    try:
        comm = root / f"proc/{pid}/comm"
        if comm.read_text(encoding="utf-8", errors="replace").startswith(OURS):
            return True
    except OSError:
        return False
    above = os.getpid()
    for _ in range(_DEEPEST):
        if above == pid:
            return True
        try:
            stat = (root / f"proc/{above}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        above = int(stat.rpartition(")")[2].split()[1])
    return _examines(root / f"proc/{pid}", _NEAR)


def _examines(process: Path, depth: int) -> bool:
    """True if a process has started nccl-doctor, by itself or through a few others."""
    below: list[str] = []
    with contextlib.suppress(OSError):  # it is over
        for file in process.glob("task/*/children"):
            with contextlib.suppress(OSError):  # the thread is over
                below += file.read_text(encoding="ascii").split()
    for pid in below:
        child = process.parent / pid
        with contextlib.suppress(OSError):  # ended by now
            words = (child / "cmdline").read_bytes().split(b"\0")
            if any(_DOCTOR.search(word) for word in words[:_WORDS]):
                return True
        if depth > 1 and _examines(child, depth - 1):
            return True
    return False


def _has_open(process: Path, device: str) -> bool:
    """True if a process is seen to have a device of the driver open, as all that use a GPU have."""
    try:
        handles = list((process / "fd").iterdir())
    except OSError:  # it is not there, or of another user
        return False
    for handle in handles:
        with contextlib.suppress(OSError):  # closed by now
            if os.readlink(handle).startswith(device):
                return True
    return False
