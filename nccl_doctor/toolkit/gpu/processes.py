"""Processes on a GPU, by their numbers as the driver gives them.

In a container a driver may give the numbers of the host: a number then is nobody's here, or that of
another process.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from nccl_doctor.toolkit.forks import OURS
from nccl_doctor.toolkit.host import is_first_namespace

NVIDIA, AMD = "/dev/nvidia", "/dev/kfd"
"""How the names of the device files begin that a process on a GPU of this vendor has open."""
_DEEPEST = 64


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
    """Whether a process belongs to the examination, or is a parent of this one."""
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
            return False
        above = int(stat.rpartition(")")[2].split()[1])
    return False


def _has_open(process: Path, device: str) -> bool:
    """Whether a process is seen to have a device of the driver open, as all that use a GPU have."""
    try:
        handles = list((process / "fd").iterdir())
    except OSError:  # it is not there, or of another user
        return False
    for handle in handles:
        with contextlib.suppress(OSError):  # closed by now
            if os.readlink(handle).startswith(device):
                return True
    return False
