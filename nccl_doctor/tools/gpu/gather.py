"""The state of all GPUs of this host, as facts. Touches the driver: for a probe child only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.contract import Skip, Untested
from nccl_doctor.tools.gpu.fields import read_gpu
from nccl_doctor.tools.gpu.kernlog import read_xids
from nccl_doctor.tools.gpu.nvml import Crumb, Library, Refused, read_pairs, read_system, start
from nccl_doctor.tools.machine.gpus import host_gpus

MOST_GPUS = 64
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def gather_gpus(crumb: Crumb, root: Path = Path("/")) -> dict[str, Any]:
    """Everything that the rules of `health` and `drift` read.

    Args:
        crumb: told each call before it is made.
        root: folder in which `dev`, `proc`, `sys` and `var` lie.

    Returns: `error`: None, or `{call, name}` of the call without which nothing can be read;
    `on_pci`: NVIDIA GPUs that the kernel sees on the bus and that no other driver has;
    `driver`, `nvml`, `cuda`, `count` of `read_system`; `gpus`, those of `read_gpu` in the order of
    NVML; `p2p` and `nearest` of `read_pairs`; `kernel_log` of `read_xids`; `own`: process ids of
    this examination.

    Raises:
        Skip: there is no NVIDIA GPU, or nothing to read it by.
        Untested: the library refuses, for a reason that is not the GPUs'.
    """
    on_host, on_pci = host_gpus(root), len(list(_on_pci(root)))
    facts: dict[str, Any] = {
        "error": None,
        "on_pci": on_pci,
        "driver": on_host["driver"],
        "nvml": None,
        "cuda": None,
        "count": 0,
        "gpus": [],
        "p2p": {},
        "nearest": {},
        "kernel_log": {"source": None, "reason": "", "xids": []},
        "own": [],
    }
    try:
        library = start(crumb)
        facts |= read_system(library)
    except ImportError:
        raise Skip(_nothing(on_host, "nvidia-ml-py is not installed (pip install nvidia-ml-py)"))  # noqa: B904
    except Refused as refused:
        _give_up(refused, on_host, on_pci)
        return {
            **facts,
            "error": {"call": refused.call, "name": refused.name},
            "kernel_log": read_xids(root, crumb),
        }
    if not facts["count"]:
        raise Skip("the NVIDIA driver shows no GPU here")
    return {**facts, **_all(library, min(facts["count"], MOST_GPUS), root, crumb)}


def _all(library: Library, count: int, root: Path, crumb: Crumb) -> dict[str, Any]:
    asked = [read_gpu(library, index, root) for index in range(count)]
    gpus = [one.facts for one in asked]
    pids = {one["pid"] for gpu in gpus for one in gpu.get("processes") or ()}
    return {
        "gpus": gpus,
        **read_pairs(library, asked),
        "kernel_log": read_xids(root, crumb),
        "own": sorted(pid for pid in pids if _is_own(pid, root)),
    }


def _nothing(on_host: Mapping[str, Any], reason: str) -> str:
    if on_host["kfd"]:
        return "AMD GPUs: this check reads NVIDIA's library alone"
    return reason if on_host["nodes"] or on_host["proc"] else f"no NVIDIA GPU here, and {reason}"


def _give_up(refused: Refused, on_host: Mapping[str, Any], on_pci: int) -> None:
    """Raise where the refusal says nothing about the health of a GPU."""
    name = refused.name
    if name == "LIBRARY_NOT_FOUND":
        reason = "libnvidia-ml.so.1 is not here"
        if on_host["nodes"]:
            reason += " (in a container: NVIDIA_DRIVER_CAPABILITIES=all, or add utility)"
        raise Skip(_nothing(on_host, reason))
    if name == "DRIVER_NOT_LOADED" and (on_host["driver"] or not on_pci):
        # Loaded, but without device files: a container that was given no GPU.
        raise Skip(_nothing(on_host, "the NVIDIA driver is not to be reached from here"))
    if name == "LIB_RM_VERSION_MISMATCH":
        raise Untested(
            f"libnvidia-ml.so.1 is not of the version of the kernel driver {on_host['driver']}"
        )
    if name in ("NO_PERMISSION", "FUNCTION_NOT_FOUND"):
        raise Untested(f"NVML refuses: {refused}")


def _on_pci(root: Path) -> Iterator[str]:
    """Bus ids of NVIDIA GPUs that no other driver has taken, such as vfio-pci for a guest."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            kind = (device / "class").read_text(encoding="ascii").strip()
        except OSError:
            continue
        driver = device / "driver"
        taken = driver.is_symlink() and os.path.basename(os.readlink(driver)) != "nvidia"
        if vendor == _NVIDIA and kind.startswith(_DISPLAY) and not taken:
            yield device.name


def _is_own(pid: int, root: Path) -> bool:
    """Whether a process is a child of the examination, or above this one."""
    try:
        if (root / f"proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")[:4] == "ncd:":
            return True
    except OSError:
        return False
    above = os.getpid()
    for _ in range(64):
        if above == pid:
            return True
        try:
            stat = (root / f"proc/{above}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        above = int(stat.rpartition(")")[2].split()[1])
    return False
