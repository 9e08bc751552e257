"""Rails: the verbs ports of a host in NCCL's order, and the network of each.

NCCL joins the channels of hosts by number, and a channel goes through the NIC that is nearest to
its GPU: so port number n of one host talks to port number n of the next.

Source: `ncclIbCompareDevs` in NCCL's src/transport/net_ib/init.cc (by PCI address); kernel
documentation, ABI/stable/sysfs-class-infiniband; proc(5) (/proc/net/route).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.toolkit.fabric.gids import (
    fixed_index,
    gid_tables,
    pick_gid,
    wanted_kind,
    wanted_range,
)
from nccl_doctor.toolkit.fabric.ports import rdma_devices, speaks_verbs, word
from nccl_doctor.toolkit.fabric.road import admitted
from nccl_doctor.toolkit.nccl.conf import Setting

_ON_LINK = "00000000"


class RailsSeen(TypedDict):
    """Facts that `rails_of` returns."""

    slots: list[str]
    rails: list[dict[str, Any]]


def rails_of(settings: Mapping[str, Setting], root: Path = Path("/")) -> RailsSeen:
    """The slots and rails of this host that NCCL may use.

    Returns: `slots`: PCI addresses of all devices that speak verbs, in order. `rails`: the ports of
    them that NCCL's settings admit, in NCCL's order, each `name` (`mlx5_0:1`), `pci`, `numa` (node
    or None), `state`; `subnet`: of RoCE the IPv4 network that its GIDs are in, of InfiniBand the
    prefix of its GID 0, empty where neither is known; `nic` and `address`: of RoCE its interface,
    and the address of the GID that NCCL would take, empty where there is none beyond the link.
    """
    networks = _networks(root)
    gids = {port["name"]: port["gids"] for port in gid_tables(root)}
    slots, rails = set(), []
    for device in rdma_devices(root):
        pci = device["pci"]["address"]
        verbs = [port for port in device["ports"] if speaks_verbs(port)]
        if verbs and pci:
            slots.add(pci)
        for port in admitted(settings, verbs):
            if port["wanted"]:
                mine = gids.get(port["name"], [])
                near = networks.get(port["netdev"], [])
                rails.append(
                    {
                        "name": port["name"],
                        "pci": pci,
                        "numa": _numa(root / "sys/class/infiniband" / device["device"]),
                        "state": port["state"],
                        "subnet": port["subnet"] or _subnet([g["address"] for g in mine], near),
                        "nic": port["netdev"],
                        "address": _address(settings, mine),
                    }
                )
    # Those without an address come last, as in NCCL; ports of one device keep their order.
    rails.sort(key=lambda rail: (not rail["pci"], rail["pci"]))
    return {"slots": sorted(slots), "rails": rails}


def _address(settings: Mapping[str, Setting], gids: Sequence[Mapping[str, Any]]) -> str:
    within = wanted_range(settings)
    picked = pick_gid(gids, wanted_kind(settings), fixed_index(settings), subnet=within).address
    return picked if picked and not ipaddress.ip_address(picked).is_link_local else ""


def _numa(device: Path) -> int | None:
    text = word(device / "device/numa_node")
    return int(text) if text.isdigit() else None


def _networks(root: Path) -> dict[str, list[ipaddress.IPv4Network]]:
    """Interface → the IPv4 networks that are on its link."""
    found: dict[str, list[ipaddress.IPv4Network]] = {}
    for name, network in _routes(root / "proc/net/route"):
        found.setdefault(name, []).append(network)
    return found


def _routes(table: Path) -> Iterator[tuple[str, ipaddress.IPv4Network]]:
    try:
        lines = table.read_text(encoding="ascii", errors="replace").splitlines()[1:]
    except OSError:
        return
    for words in map(str.split, lines):
        if len(words) > 7 and words[2] == _ON_LINK and int(words[7], 16):
            net, mask = (bytes.fromhex(words[at])[::-1] for at in (1, 7))
            prefix = bin(int.from_bytes(mask, "big")).count("1")
            yield words[0], ipaddress.IPv4Network((net, prefix), strict=False)


def _subnet(addresses: list[str], networks: list[ipaddress.IPv4Network]) -> str:
    for text in addresses:
        address = ipaddress.ip_address(text)
        for network in networks:
            if address in network:
                return str(network)
    return ""
