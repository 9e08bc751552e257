"""What NCCL would probably take on this host, as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nccl_doctor.tools.fabric.direct import gpu_direct_road, read_gpu_direct
from nccl_doctor.tools.fabric.hca import HCA, rdma_off
from nccl_doctor.tools.fabric.ports import speaks_verbs
from nccl_doctor.tools.nccl.conf import Setting
from nccl_doctor.tools.nccl.ifchoice import nccl_choices, nccl_data_road, subnet_prefixes
from nccl_doctor.tools.net.interfaces import interfaces

_NO_PLUGIN = "none"


def road_by_ports(settings: Mapping[str, Setting], ports: Sequence[Mapping[str, Any]]) -> str:
    """What carries data between hosts: `infiniband` (RoCE too), `sockets`, `plugin`, or `efa`:
    EFA, if the plug-in for it can be loaded.

    Args:
        settings: from `nccl_settings`.
        ports: as of `rdma_ports`, each with `wanted`: whether NCCL's settings admit it.
    """
    active = [port for port in ports if port["state"] == "ACTIVE"]
    road = nccl_data_road(settings, any(p["wanted"] and speaks_verbs(p) for p in active))
    told = {
        n: settings.get(n, Setting("", "")).value.lower() for n in ("NCCL_NET", "NCCL_NET_PLUGIN")
    }
    free = not told["NCCL_NET"] and told["NCCL_NET_PLUGIN"] != _NO_PLUGIN
    has_efa = any(not speaks_verbs(port) for port in active)
    return "efa" if road == "sockets" and has_efa and free else road


def table_of_picks(
    settings: Mapping[str, Setting],
    road: str,
    ports: Sequence[Mapping[str, Any]],
    root: Path = Path("/"),
) -> dict[str, Any]:
    """Road, ports, interfaces and GPUDirect RDMA: `{"columns": [...], "rows": [...]}`.

    Args: as of `road_by_ports`, and what it said; `root` holds sys and proc.
    """
    bootstrap, sockets = nccl_choices(interfaces(), settings, subnet_prefixes())
    rows = [["data between hosts", road, _why(settings, road)]]
    if road in ("infiniband", "efa"):
        mine = [p for p in ports if p["state"] == "ACTIVE" and (p["wanted"] or road == "efa")]
        other = [p for p in ports if p not in mine]
        rows.append(["ports", _names(mine), _rates(mine)])
        if other:
            rows.append(["ports left out", _names(other), _reasons(other)])
        rows.append(["GPUDirect RDMA", *gpu_direct_road(read_gpu_direct(root), settings)])
    else:
        rows.append(["interfaces for data", _nics(sockets.picks), sockets.reason])
    rows.append(["interface for bootstrap", _nics(bootstrap.picks), bootstrap.reason])
    return {"columns": ["for", "NCCL would take", "because"], "rows": rows}


def _why(settings: Mapping[str, Setting], road: str) -> str:
    off = rdma_off(settings)
    if road == "sockets" and off:
        return off
    if road == "plugin":
        return f"NCCL_NET={settings['NCCL_NET'].value}"
    if road == "infiniband":
        return f"{HCA}={settings[HCA].value}" if HCA in settings else "a verbs port is active"
    return "EFA, if its plug-in loads" if road == "efa" else "no verbs port is active and admitted"


def _names(ports: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{port['device']}:{port['port']}" for port in ports)


def _rates(ports: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(f"{port['link'] or '?'} {port['rate'] or '?'}" for port in ports)
    return ", ".join(f"{count} of {what}" for what, count in sorted(counts.items()))


def _reasons(ports: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(
        port["state"] or "unknown"
        if port["state"] != "ACTIVE"
        else f"not in {HCA}"
        if speaks_verbs(port)
        else f"link layer {port['link']}"
        for port in ports
    )
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


def _nics(picks: Sequence[tuple[str, str]]) -> str:
    return ", ".join(dict.fromkeys(name for name, _ in picks)) or "none"
