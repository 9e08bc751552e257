"""GIDs of RoCE ports: their tables, and the one that NCCL takes.

Source: `ncclIbGetGidIndex` and `ncclUpdateGidIndex` in NCCL's src/transport/net_ib/connect.cc.
Before 2.21.5 NCCL did not look for one: it took index 0 unless NCCL_IB_GID_INDEX said otherwise.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nccl_doctor.toolkit.fabric.ports import rdma_ports, word
from nccl_doctor.toolkit.nccl.conf import Setting

INDEX = "NCCL_IB_GID_INDEX"
_RANGE = "NCCL_IB_ADDR_RANGE"
GID_SETTINGS = (INDEX, "NCCL_IB_ROCE_VERSION_NUM", "NCCL_IB_ADDR_FAMILY", _RANGE)
SEARCHES_SINCE = (2, 21, 5)
_MOST = 256


@dataclass(frozen=True)
class GidKind:
    """The kind of a GID, equal at both ends: RoCE `version` (0: unknown), and IPv4 or IPv6."""

    version: int
    family: str

    def __str__(self) -> str:
        return f"RoCE v{self.version} over {self.family}"


@dataclass(frozen=True)
class PickedGid:
    """The entry that NCCL would take; `kind` and `address` are None where it is empty."""

    index: int
    kind: GidKind | None = None
    address: str | None = None

    @property
    def is_link_local_ipv4(self) -> bool:
        """True if no DHCP server or person gave the interface this address: 169.254.0.0/16."""
        return is_link_local_ipv4(self.address or "::")


def gid_tables(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Every Ethernet port of a verbs device: `name` (`mlx5_0:1`), `device`, `port`, `state`,
    `length` of the table, and `gids`: its entries that are not empty, each `index`, `address`,
    `version` (of RoCE, 0 where that cannot be read) and `netdev`.
    """
    folder = root / "sys/class/infiniband"
    found = []
    for port in rdma_ports(folder):
        if port["link"] == "Ethernet":
            at = folder / port["device"] / "ports" / port["port"]
            indices = sorted(int(p.name) for p in at.glob("gids/*") if p.name.isdigit())[:_MOST]
            entries = [entry for index in indices if (entry := _entry(at, index))]
            found.append(
                {
                    "name": f"{port['device']}:{port['port']}",
                    "device": port["device"],
                    "port": port["port"],
                    "state": port["state"],
                    "length": len(indices),
                    "gids": entries,
                }
            )
    return found


def wanted_kind(settings: Mapping[str, Setting]) -> GidKind:
    """The kind that NCCL looks for: RoCE v2 over IPv4, unless the user sets another."""
    version = settings.get("NCCL_IB_ROCE_VERSION_NUM", Setting("2", "")).value
    family = settings.get("NCCL_IB_ADDR_FAMILY", Setting("", "")).value
    return GidKind(1 if version == "1" else 2, "IPv6" if family == "AF_INET6" else "IPv4")


def fixed_index(settings: Mapping[str, Setting]) -> int | None:
    """The index that the user fixed, or None; with a negative one NCCL searches."""
    try:
        index = int(settings.get(INDEX, Setting("-1", "")).value, 0)
    except ValueError:  # as strtoll does
        index = 0
    return index if index >= 0 else None


def wanted_range(settings: Mapping[str, Setting]) -> str:
    """The value of NCCL_IB_ADDR_RANGE, or empty."""
    return settings.get(_RANGE, Setting("", "")).value


def pick_gid(
    gids: Sequence[Mapping[str, Any]],
    wanted: GidKind,
    fixed: int | None = None,
    *,
    subnet: str = "",
    searches: bool = True,
) -> PickedGid:
    """The GID that NCCL would use on a RoCE port.

    Args:
        gids: entries of its table, as of `gid_tables`.
        wanted: from `wanted_kind`.
        fixed: from `fixed_index`.
        subnet: from `wanted_range`; one that NCCL cannot read does not count.
        searches: whether this NCCL looks for a GID (since 2.21.5).
    """
    by_index = {entry["index"]: entry for entry in gids}
    if fixed is not None or not searches:
        return _picked(fixed or 0, by_index)
    within = _network(subnet)
    at = 0
    for index, entry in sorted(by_index.items()):
        kind = gid_kind(entry)
        now = by_index.get(at)
        fits = kind.family == wanted.family and (
            within is None or ipaddress.ip_address(entry["address"]) in within
        )
        if index == 0 or not fits:
            continue
        if (gid_kind(now).family if now else "IPv6") != kind.family:  # an empty one counts as IPv6
            at = index
        elif _is_local(entry) or kind.version != wanted.version:
            continue
        elif now is None or _is_local(now) or gid_kind(now).version != kind.version:
            at = index
    return _picked(at, by_index)


def is_link_local_ipv4(address: str) -> bool:
    """True if an address is in 169.254.0.0/16."""
    return address.startswith("169.254.")


def gid_kind(entry: Mapping[str, Any]) -> GidKind:
    """RoCE version and address family of an entry."""
    return _kind_of(entry["version"], "IPv6" if ":" in entry["address"] else "IPv4")


_kind_of = lru_cache(maxsize=8)(GidKind)


def _is_local(entry: Mapping[str, Any]) -> bool:
    """True if NCCL takes an entry to be link-local: of IPv6 only, 169.254.0.0/16 is as good as any
    network (`linkLocalGid`).
    """
    first, colon, _ = entry["address"].partition(":")
    return bool(colon) and int(first or "0", 16) & 0xFFC0 == 0xFE80  # fe80::/10


def _picked(index: int, by_index: Mapping[int, Mapping[str, Any]]) -> PickedGid:
    entry = by_index.get(index)
    return PickedGid(index, gid_kind(entry), entry["address"]) if entry else PickedGid(index)


def _entry(port: Path, index: int) -> dict[str, Any] | None:
    try:
        gid = ipaddress.IPv6Address(word(port / f"gids/{index}"))
    except ValueError:  # not readable in this container, or not a GID
        return None
    if not int(gid) or int(gid) == 0xFE80 << 112:  # what NCCL takes to be empty
        return None
    kind = word(port / f"gid_attrs/types/{index}")
    return {
        "index": index,
        "address": str(gid.ipv4_mapped or gid),
        "version": 2 if "v2" in kind else 1 if "v1" in kind else 0,
        "netdev": word(port / f"gid_attrs/ndevs/{index}"),
    }


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False) if "/" in text else None
    except ValueError:
        return None
