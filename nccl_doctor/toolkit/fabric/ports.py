"""RDMA devices and their ports on this host, as the kernel shows them in sysfs, without root.

Source: ABI/stable/sysfs-class-infiniband and ABI/testing/sysfs-bus-pci in the kernel's
documentation; `iboe_get_mtu` in include/rdma/ib_addr.h.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.toolkit.host import text_of

SYSFS = Path("/sys/class/infiniband")
MAX_PORTS = 64
_VERBS = ("InfiniBand", "Ethernet", "")
"""Link layers that NCCL uses without a plug-in; one that cannot be read counts as usable."""
_ROCE_HEADERS = 96
"""Bytes that the kernel takes off the MTU of an Ethernet interface before it rounds down."""
_IB_MTUS = (4096, 2048, 1024, 512, 256)


def rdma_ports(folder: Path = SYSFS) -> list[dict[str, Any]]:
    """Every port: `device`, `port`, `state` (`ACTIVE`, `DOWN`, …), `physical` (`LinkUp`, …), `link`
    (`InfiniBand`, `Ethernet`, or `Unknown`, as of EFA) and `rate`; in order of name, what cannot be
    read is empty.
    """
    found = []
    there = [port for port in folder.glob("*/ports/*") if port.name.isdigit()]
    for port in sorted(there, key=lambda p: (_natural(p.parts[-3]), int(p.name))):
        found.append(
            {
                "device": port.parts[-3],
                "port": port.name,
                "state": word(port / "state"),
                "physical": word(port / "phys_state"),
                "link": word(port / "link_layer"),
                "rate": word(port / "rate"),
            }
        )
    return found[:MAX_PORTS]


def speaks_verbs(port: Mapping[str, Any]) -> bool:
    """True if NCCL can use a port without a plug-in: EFA has no link layer that it knows."""
    return port["link"] in _VERBS


def rdma_devices(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Every device: `device`, `driver`, `firmware`, `board` (what the maker calls the adapter,
    such as its PSID), `pci` and `ports`.

    `pci`: `address`, `width` and `width_max` (lanes), `speed` and `speed_max` (GT/s); None where
    that cannot be read, as of virtual functions. `ports`: as of `rdma_ports`, and `name`
    (`mlx5_0:1`), `sm_lid` (of the subnet manager, 0 where none has configured the port), `gbps`,
    `subnet` (first half of GID 0, InfiniBand only), `netdev` and `mtu` (of RoCE, in bytes as for
    InfiniBand: 1024 for an interface of 1500; None where it is not in sysfs).
    """
    folder = root / "sys/class/infiniband"
    devices: dict[str, dict[str, Any]] = {}
    for port in rdma_ports(folder):
        name = port["device"]
        if name not in devices:
            devices[name] = _device(folder / name)
        devices[name]["ports"].append({**port, **_port(root, folder / name, port)})
    return list(devices.values())


def word(path: Path) -> str:
    """The text of a file, empty where it cannot be read: `4: ACTIVE` is `ACTIVE`."""
    text = text_of(path)
    number, colon, rest = text.partition(": ")
    return rest if colon and number.isdigit() else text


def roce_mtu(mtu: int) -> int | None:
    """The MTU of a RoCE port whose Ethernet interface has this one; None where it is too small."""
    return next((each for each in _IB_MTUS if mtu - _ROCE_HEADERS >= each), None)


def _device(folder: Path) -> dict[str, Any]:
    pci = folder / "device"
    return {
        "device": folder.name,
        "driver": _target(pci / "driver"),
        "firmware": word(folder / "fw_ver"),
        "board": word(folder / "board_id") or word(folder / "hca_type"),
        "pci": {
            "address": _target(pci),
            "width": _number(word(pci / "current_link_width")),
            "width_max": _number(word(pci / "max_link_width")),
            "speed": _number(word(pci / "current_link_speed")),
            "speed_max": _number(word(pci / "max_link_speed")),
        },
        "ports": [],
    }


def _port(root: Path, device: Path, port: Mapping[str, Any]) -> dict[str, Any]:
    folder = device / "ports" / port["port"]
    netdev = _netdev(device, folder) if port["link"] == "Ethernet" else ""
    mtu = _number(word(root / "sys/class/net" / netdev / "mtu")) if netdev else None
    gid = word(folder / "gids/0")
    return {
        "name": f"{port['device']}:{port['port']}",
        "sm_lid": _hex(word(folder / "sm_lid")),
        "gbps": _number(port["rate"]),
        "subnet": ":".join(gid.split(":")[:4]) if port["link"] == "InfiniBand" else "",
        "netdev": netdev,
        "mtu": roce_mtu(int(mtu)) if mtu else None,
    }


def _netdev(device: Path, port: Path) -> str:
    """The Ethernet interface of a RoCE port: its GIDs name it, and so does the PCI function."""
    named = word(port / "gid_attrs/ndevs/0")
    return named or next(iter(sorted(each.name for each in device.glob("device/net/*"))), "")


def _target(link: Path) -> str:
    """Name of the target of a link: a PCI address, or a driver."""
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return ""


def _number(text: str) -> float | None:
    """The number that a text begins with: `32.0 GT/s PCIe`, `400 Gb/sec (4X NDR)`."""
    found = re.match(r"\d+(\.\d+)?", text)
    return float(found.group()) if found else None


def _hex(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0


def _natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sorts mlx5_2 before mlx5_10."""
    return tuple(
        (not part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    )
