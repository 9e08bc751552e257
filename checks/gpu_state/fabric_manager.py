"""State of NVIDIA's fabric manager, which sets the NVSwitches up: does it run and fit the driver?

Sources: NVIDIA Fabric Manager user guide (its version must equal the driver's; log file
/var/log/fabricmanager.log). Switches of the fourth generation (HGX B200) have no device files of
their own, and are not counted here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from nccl_doctor.toolkit.host import is_first_namespace, text_of

_COMM = "nv-fabricmanage"  # as long as the kernel keeps it
_SWITCH = re.compile(r"nvidia-nvswitch\d+")
_MISFIT = re.compile(
    r"[Ff]abric [Mm]anager NVIDIA GPU driver interface version (\d+[\d.]*\d) (?:don't|doesn't|does "
    r"not) match with driver version (\d+[\d.]*\d)"
)
_LOGS = ("var/log/fabricmanager.log", "var/log/syslog", "var/log/messages")
_TAIL_BYTES = 1 << 20


class _Manager(TypedDict):
    switches: int
    running: bool | None
    misfit: list[str] | None


class FabricManager(_Manager, total=False):
    """The fabric manager, as `read_fabric_manager` returns it; `up_s` with switches only."""

    up_s: int | None


def read_fabric_manager(
    root: Path = Path("/"), crumb: Callable[..., None] | None = None
) -> FabricManager:
    """Facts about the fabric manager that can be read without root.

    Args:
        root: folder in which `dev`, `proc` and `var` lie.
        crumb: called with each log file before it is opened.

    Returns: `switches`: NVSwitches by their device files; `running`: whether its process is there,
    None in a container, where processes of the host cannot be seen; `misfit`: None, or `[its
    version, the driver's]`, the last that it complained of in a log that may be read; `up_s`:
    seconds since the host was started, None if not known.
    """
    dev = root / "dev"
    switches = [path for path in dev.glob("nvidia-nvswitch*") if _SWITCH.fullmatch(path.name)]
    facts: FabricManager = {"switches": len(switches), "running": None, "misfit": None}
    if switches:
        facts["up_s"] = _up_s(root / "proc/uptime")
        facts["running"] = _running(root / "proc")
        facts["misfit"] = _misfit(root, crumb)
    return facts


def _up_s(path: Path) -> int | None:
    words = text_of(path).split()
    try:
        return int(float(words[0])) if words else None
    except (ValueError, OverflowError):
        return None


def _running(proc: Path) -> bool | None:
    for path in proc.glob("[0-9]*/comm"):
        if text_of(path) == _COMM:
            return True
    return False if is_first_namespace(proc) else None


def _misfit(root: Path, crumb: Callable[..., None] | None) -> list[str] | None:
    for name in _LOGS:
        if crumb is not None:
            crumb("reading a log of the fabric manager", file=f"/{name}")
        try:
            with (root / name).open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - _TAIL_BYTES))
                found = _MISFIT.findall(file.read().decode("utf-8", "replace"))
        except OSError:
            continue
        if found:
            return list(found[-1])
    return None
