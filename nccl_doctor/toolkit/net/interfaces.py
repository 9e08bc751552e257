"""Network interfaces of this host, and the kinds of their addresses."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nccl_doctor.toolkit import host

_INSIDE = re.compile(
    r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}|nerdctl\d+|(cni-)?podman\d+"  # containers
    r"|virbr\d+|lx[cd]br\d+"  # virtual machines
    r"|nodelocaldns|kube-ipvs0"  # addresses of services, the same on every node of Kubernetes
    r"|tmfifo_net\d+|br_tmfifo"  # the BlueField card in this host: 192.168.100.1 on every host
)
_VIRTUAL = re.compile(
    _INSIDE.pattern + r"|veth|br-(int|tun)$|virbr|docker|cni|flannel|cali|cilium|lxc|weave|antrea-"
    r"|ovn-k8s|genev|vxlan|tun|tap|wg\d|wireguard|tailscale|zt|dummy"
)
_MANY = 4096
"""Addresses and networks that are remembered: rules ask for those of each host again and again."""


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


def interfaces() -> tuple[Interface, ...]:
    """Every interface of this network namespace."""
    found: dict[str, list[str]] = {}
    # Those that have IPv4 first: libraries skip entries without an address.
    for entry in host.addresses():
        found.setdefault(entry.interface, []).append(entry.address)
    for name in host.interface_names():
        found.setdefault(name, [])
    return tuple(_interface(name, addresses) for name, addresses in found.items())


def _interface(name: str, addresses: Iterable[str]) -> Interface:
    flags = host.interface_flags(name)
    return Interface(
        name=name,
        addresses=tuple(addresses),
        up=bool(flags & host.IFF_UP),
        running=bool(flags & host.IFF_RUNNING),
        loopback=bool(flags & host.IFF_LOOPBACK) or name == "lo",
        mtu=host.interface_mtu(name),
    )


def hardware_address(name: str, root: Path = host.ROOT) -> str:
    """MAC address of an interface; empty where it has none."""
    text = host.text_of(root / "sys/class/net" / name.partition(":")[0] / "address").lower()
    return text if text.strip("0:") else ""


def line_rate(name: str, root: Path = host.ROOT) -> int | None:
    """Line rate of an interface in Mbit/s; None where the kernel does not tell."""
    text = host.text_of(root / "sys/class/net" / name.partition(":")[0] / "speed")
    return int(text) if text.isdecimal() and int(text) else None


def interfaces_above(name: str, root: Path = host.ROOT) -> set[str]:
    """Interfaces that are made of this one, directly or not: bonds, bridges, VLANs."""
    found: set[str] = set()
    left = [name]
    while left:
        try:
            entries = [each.name for each in (root / "sys/class/net" / left.pop()).iterdir()]
        except OSError:
            continue
        uppers = {each.removeprefix("upper_") for each in entries if each.startswith("upper_")}
        left += uppers - found
        found |= uppers
    return found


def leads_inside(name: str) -> bool:
    """True if an interface leads only to what is in this host: containers, virtual machines, the
    addresses of services, a BlueField card.
    """
    return bool(_INSIDE.fullmatch(name))


def is_virtual(name: str) -> bool:
    """True if an interface is a tunnel, or one of containers or virtual machines, by its name.

    Other hosts may reach it, but hardly by the network of the job. A bridge that a person named,
    as OpenShift's br-ex, holds the address of the host itself.
    """
    return bool(_VIRTUAL.match(name))


@lru_cache(maxsize=_MANY)
def is_loopback(address: str) -> bool:
    """True if a numeric address is 127.0.0.0/8 or ::1 (also v4-mapped)."""
    ip = ipaddress.ip_address(address.split("%", maxsplit=1)[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return bool((mapped or ip).is_loopback)


def first_bindable(answers: Iterable[str], own: Collection[str]) -> str:
    """Address that gloo publishes: the first answer for the host's own name that it can bind.

    A link-local one counts: nss-myhostname may name it before all others. The zone is left out.
    Empty if there is none; gloo takes 127.0.0.1 then.

    Args:
        answers: in the resolver's order.
        own: addresses of this host.
    """
    bare = (answer.partition("%")[0] for answer in answers)
    # All of 127.0.0.0/8 can be bound, whatever the interface lists.
    return next((each for each in bare if each in own or is_loopback(each)), "")


@lru_cache(maxsize=_MANY)
def is_link_local(address: str) -> bool:
    """True if a numeric address is fe80::/10 or 169.254.0.0/16: not routable."""
    return bool(ipaddress.ip_address(address.split("%", maxsplit=1)[0]).is_link_local)


@lru_cache(maxsize=_MANY)
def is_alone(network: str) -> bool:
    """True if a network holds one address only (/32, /128), and so says nothing of neighbours.

    GCE, Calico, the VPC CNI of EKS and DHCPv6 give hosts such addresses.
    """
    return ipaddress.ip_network(network, strict=False).num_addresses == 1
