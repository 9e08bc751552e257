"""Ports of InfiniBand and RoCE devices of this host, as the kernel shows them in sysfs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nccl_doctor.tools.nccl.ifchoice import Filter

SYSFS = Path("/sys/class/infiniband")
MAX_PORTS = 64


def rdma_ports(folder: Path = SYSFS) -> list[dict[str, Any]]:
    """Every port: `device`, `port`, `state` (`ACTIVE`, `DOWN`, …), `physical` (`LinkUp`, …), `link`
    (`InfiniBand` or `Ethernet`) and `rate`; in order of name, what cannot be read is empty.
    """
    found = []
    for port in sorted(folder.glob("*/ports/*"), key=lambda p: (p.parts[-3], p.name)):
        found.append(
            {
                "device": port.parts[-3],
                "port": port.name,
                "state": _word(port / "state"),
                "physical": _word(port / "phys_state"),
                "link": _word(port / "link_layer"),
                "rate": _word(port / "rate"),
            }
        )
    return found[:MAX_PORTS]


def rdma_admits(hca: str, device: str) -> bool:
    """Whether a value of NCCL_IB_HCA lets NCCL use a device; ports in it are not looked at."""
    return not hca or Filter.parse(hca).admits(device)


def _word(path: Path) -> str:
    """`4: ACTIVE` is `ACTIVE`."""
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
    number, colon, word = text.partition(": ")
    return word if colon and number.isdigit() else text
