"""Network interfaces of this host, and what their addresses are good for."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Interface:
    """One network interface, in the order in which getifaddrs lists it.

    `addresses` are numeric IPv4 and IPv6 addresses without a zone, IPv4 first. `running` is
    IFF_RUNNING: administratively up *and* with a carrier.
    """

    name: str
    addresses: tuple[str, ...]
    up: bool
    running: bool
    loopback: bool
    mtu: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "addresses": list(self.addresses)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Interface:
        """Inverse of `to_json`."""
        return cls(**{**data, "addresses": tuple(data["addresses"])})


def interfaces() -> tuple[Interface, ...]:
    """Every interface of this network namespace."""
    import psutil

    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(
            entry.address.split("%")[0]
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family
        )
        stat = stats.get(name)
        flags = set(getattr(stat, "flags", "").split(",")) if stat else set()
        found.append(
            Interface(
                name=name,
                addresses=addresses,
                up=bool(stat and ("up" in flags or stat.isup)),
                running="running" in flags,
                loopback="loopback" in flags or name == "lo",
                mtu=stat.mtu if stat else 0,
            )
        )
    return tuple(found)


def is_loopback(address: str) -> bool:
    """Whether a numeric address is 127.0.0.0/8 or ::1 (also v4-mapped)."""
    ip = ipaddress.ip_address(address.split("%", maxsplit=1)[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return bool((mapped or ip).is_loopback)


def is_link_local(address: str) -> bool:
    """Whether a numeric address is fe80::/10 or 169.254.0.0/16: not routable."""
    return bool(ipaddress.ip_address(address.split("%", maxsplit=1)[0]).is_link_local)
