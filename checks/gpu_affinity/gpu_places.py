"""Location of a GPU: its PCI address, its NUMA node, the CPUs and the network devices near it.

Source: the kernel's ABI/testing/sysfs-bus-pci (numa_node, local_cpulist), and the folders below
/sys/devices, which are nested as the buses are.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nccl_doctor.toolkit.host import cpu_list

from .nic_places import HOW_NEAR

MOST_NICS = 64
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def pci_address(index: int) -> str | None:
    """PCI address of a GPU by the index that CUDA (and torch) gives it in this process.

    The driver must have been started (`see_gpus`); not every torch knows the address.

    Returns: as sysfs writes it, `0000:3b:00.0`; None if the driver does not give it.
    """
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, text = ctypes.c_int(0), ctypes.create_string_buffer(32)
    if libcuda.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    if libcuda.cuDeviceGetPCIBusId(text, len(text), device) != 0:
        return None
    return as_sysfs(text.value.decode("ascii", "replace"))


def as_sysfs(address: str) -> str | None:
    """`00000000:3B:00.0` and `0000:3B:00.0` as `0000:3b:00.0`; None for anything else."""
    address = address.strip().lower()
    if not _ADDRESS.fullmatch(address):
        return None
    domain, _, rest = address.partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def place_on_host(address: str, root: Path = Path("/")) -> dict[str, Any]:
    """Location of a PCI device by sysfs.

    Args:
        address: as `pci_address` returns it.
        root: folder in which `sys` lies.

    Returns: `numa`: number of its node, or None if there is one node or the firmware does not give
    it; `cpus`: numbers of the CPUs near it, empty if unknown; `nics`: network devices, the nearest
    first, each `{"name", "pci", "numa", "near"}` with `near` an index of `HOW_NEAR`, or None if
    unknown.
    """
    folder = root / "sys/bus/pci/devices" / address
    numa = _number(folder / "numa_node")
    path = _buses(folder)
    nics = [
        {
            "name": name,
            "pci": nic.name,
            "numa": _number(nic / "numa_node"),
            "near": _near(path, numa, nic),
        }
        for name, nic in _nics(root)
    ]
    far = len(HOW_NEAR)
    nics.sort(key=lambda nic: (far if nic["near"] is None else nic["near"], nic["name"]))
    return {"numa": numa, "cpus": cpu_list(folder / "local_cpulist"), "nics": nics[:MOST_NICS]}


def _nics(root: Path) -> Iterable[tuple[str, Path]]:
    """Network devices on a bus: `mlx5_0 (ens1)`, `ens2`, with the folder of each."""
    names: dict[str, list[str]] = {}
    for kind in ("infiniband", "net"):
        for link in sorted((root / "sys/class" / kind).glob("*/device")):
            names.setdefault(os.path.realpath(link), []).append(link.parent.name)
    for folder, known in names.items():
        name, *others = known
        yield name + (f" ({', '.join(others)})" if others else ""), Path(folder)


def _buses(device: Path) -> list[str]:
    """`pci0000:17`, `0000:17:01.0`, …, down to the device itself; empty if it does not exist."""
    parts = Path(os.path.realpath(device)).parts
    starts = [at for at, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]+", part)]
    return list(parts[starts[0] :]) if starts else []


def _near(path: list[str], numa: int | None, nic: Path) -> int | None:
    """Distance of a network device: an index of `HOW_NEAR`.

    Two devices that share the port of the root complex are behind one switch.
    """
    shared = 0
    for one, other in zip(path, _buses(nic), strict=False):
        if one != other:
            break
        shared += 1
    if shared:
        return 0 if shared > 1 else 1
    other_numa = _number(nic / "numa_node")
    if numa is None or other_numa is None:
        return None
    return 2 if numa == other_numa else 3


def _number(path: Path) -> int | None:
    """Number of a NUMA node; None for -1, which means unknown."""
    try:
        number = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if number < 0 else number
