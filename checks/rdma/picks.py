"""A table of what NCCL would probably use on this host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nccl_doctor.toolkit.fabric.direct import gpu_direct_road, read_gpu_direct
from nccl_doctor.toolkit.fabric.hca import HCA
from nccl_doctor.toolkit.fabric.ports import speaks_verbs
from nccl_doctor.toolkit.fabric.road import Road, port_name
from nccl_doctor.toolkit.gpu.devices import host_gpus
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.nccl.interface_choice import nccl_choices, resolver, subnet_prefixes
from nccl_doctor.toolkit.nccl.release import loaded_release
from nccl_doctor.toolkit.net.interfaces import interfaces

_RESOLVE_S = 1.0
"""Longest time for the host name in an NCCL_COMM_ID."""


def table_of_picks(
    settings: Mapping[str, Setting],
    road: Road,
    ports: Sequence[Mapping[str, Any]],
    root: Path = Path("/"),
) -> dict[str, Any]:
    """Network, ports, interfaces and GPUDirect RDMA: `{"columns": [...], "rows": [...]}`.

    Args: `ports` from `admitted`, in NCCL's order; `root` holds dev, sys and proc.
    """
    bootstrap, sockets = nccl_choices(
        interfaces(), settings, subnet_prefixes(), loaded_release(), resolver(_RESOLVE_S)
    )
    rows = [["data between hosts", road.name, road.reason]]
    if road.ports:
        mine = [port for port in ports if port_name(port) in road.ports]
        other = [port for port in ports if port_name(port) not in road.ports]
        rows.append(["ports", _names(mine), _rates(mine)])
        if other:
            rows.append(["ports left out", _names(other), _reasons(road, other)])
        rows.append(["GPUDirect RDMA", *_gpu_direct(root, settings)])
    else:
        rows.append(["interfaces for data", _nics(sockets.picks), sockets.reason])
    rows.append(["interface for bootstrap", _nics(bootstrap.picks), bootstrap.reason])
    return {"columns": ["for", "NCCL would take", "because"], "rows": rows}


def _gpu_direct(root: Path, settings: Mapping[str, Setting]) -> tuple[str, str]:
    on_host = host_gpus(root)
    if on_host["kfd"] and not on_host["driver"]:
        return "not examined", "AMD GPUs"  # RCCL has rules of its own
    return gpu_direct_road(read_gpu_direct(root), settings)


def _names(ports: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(map(port_name, ports))


def _rates(ports: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(f"{port['link'] or '?'} {port['rate'] or '?'}" for port in ports)
    return ", ".join(f"{count} of {what}" for what, count in sorted(counts.items()))


def _reasons(road: Road, ports: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(_reason(road, port) for port in ports)
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


def _reason(road: Road, port: Mapping[str, Any]) -> str:
    if port["state"] != "ACTIVE":
        return str(port["state"] or "unknown")
    if speaks_verbs(port) == (road.name == "efa"):
        return "not EFA" if speaks_verbs(port) else f"link layer {port['link']}"
    return "cannot be opened" if port["wanted"] or road.name == "efa" else f"not in {HCA}"


def _nics(picks: Sequence[tuple[str, str]]) -> str:
    return ", ".join(dict.fromkeys(name for name, _ in picks)) or "none"
