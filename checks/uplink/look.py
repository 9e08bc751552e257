"""The interfaces of this host, its gateway, and who answers it."""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nccl_doctor.toolkit.nccl.interface_choice import subnet_prefixes
from nccl_doctor.toolkit.net.dial import arp_flags, dial
from nccl_doctor.toolkit.net.interfaces import (
    interfaces,
    is_link_local,
    is_loopback,
    leads_inside,
)
from nccl_doctor.toolkit.net.names import look_up
from nccl_doctor.toolkit.net.ports import port_range
from nccl_doctor.toolkit.net.routes import gateways, source_of

LOOK_UP_S = 1.0
GATEWAY_S = 0.2
CALL_S = 1.5
"""Two SYNs, at 0 and 1 s: one lost packet is no lost host."""
MAX_NICS = 64
MAX_ADDRESSES = 4
MAX_AT_ONCE = 64

_ANSWERS = ("connected", "refused")
_SAYS_MOST = ("answers", "untested", "silent", "no-neighbour", "unreachable")


def nics_here(root: Path) -> list[dict[str, Any]]:
    """Interfaces that have an address by which another machine may be reached.

    `running` means: up, and with a carrier. `changes` counts how often the carrier came or went
    since the interface exists; None where the kernel does not say.
    """
    return [
        {
            "name": nic.name,
            "addresses": list(nic.addresses),
            "up": nic.up,
            "running": nic.running,
            "changes": _changes(root / "sys/class/net" / nic.name / "carrier_changes"),
        }
        for nic in interfaces()
        if not (nic.loopback or leads_inside(nic.name))
        and any(not is_link_local(address) for address in nic.addresses)
    ][:MAX_NICS]


def _changes(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def nic_towards(master: str, nics: Sequence[Mapping[str, Any]], limit_s: float) -> str:
    """Name of the interface that has MASTER_ADDR, or leads to it, or would if it were up.

    Empty where that is not known, or the name does not resolve in `limit_s`.
    """
    by_address = {address: nic["name"] for nic in nics for address in nic["addresses"]}
    nets = [
        (ipaddress.ip_network(f"{own}/{bits}", strict=False), by_address[own])
        for own, bits in subnet_prefixes().items()
        if own in by_address
    ]
    for answer in look_up(master, limit_s).answers if master else ():
        source, _ = source_of(answer)
        nic = by_address.get(answer) or by_address.get(source or "")
        if nic:
            return str(nic)
        address = ipaddress.ip_address(answer.partition("%")[0])
        for net, name in nets:
            if address in net:
                return str(name)
    return ""


def gateway(root: Path) -> dict[str, Any] | None:
    """Address and interface of the default route (IPv4), that of the lowest metric."""
    for each in gateways(root):
        if ":" not in each.address:
            return {"address": each.address, "interface": each.interface, "outcome": "untested"}
    return None


def call_gateway(known: Mapping[str, Any], port: int, root: Path) -> str:
    """True if the gateway answers: a router refuses a port where nothing listens, or drops."""
    return _call(known["address"], port or 9, GATEWAY_S, root)


def call_all(hosts: Mapping[str, Sequence[str]], port: int, root: Path) -> list[dict[str, Any]]:
    """Call every host that is not this one, at each of its addresses, all at once.

    Args:
        hosts: name → addresses, or a name to look up.
        port: a port to call; a random one of those that jobs need is called as well.
        root: the folder below which /proc is read.
    """
    own = {address for nic in interfaces() for address in nic.addresses}
    low, high = port_range(root)
    ports = [each for each in (port, random.randint(low, high)) if each]
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        found = list(pool.map(_addresses, hosts.values()))
        theirs = {
            name: [address for address in addresses if address not in own][:MAX_ADDRESSES]
            for name, addresses in zip(hosts, found, strict=True)
        }
        calls = {
            name: [
                pool.submit(_call, address, each, CALL_S, root)
                for address in addresses
                for each in ports
            ]
            for name, addresses in theirs.items()
        }
        return [
            {
                "host": name,
                "addresses": theirs[name],
                "outcome": min((call.result() for call in made), key=_SAYS_MOST.index),
            }
            for name, made in calls.items()
            if made
        ]


def _addresses(told: Sequence[str]) -> list[str]:
    """Addresses of a host, what is a name among them looked up."""
    found: list[str] = []
    for each in told:
        try:
            found.append(str(ipaddress.ip_address(each)))
        except ValueError:
            found += look_up(each, LOOK_UP_S).answers
    return [address for address in found if not (is_loopback(address) or is_link_local(address))]


def _call(address: str, port: int, limit_s: float, root: Path) -> str:
    """The outcome of one connection attempt; what a local rule or a router said is no answer of
    the host, and no proof that it gives none.
    """
    call, sock = dial(address, port, limit_s)
    if sock is not None:
        sock.close()
    if call.outcome in _ANSWERS or (call.icmp is not None and call.icmp.is_from(address)):
        return "answers"
    if arp_flags(address, root) == 0:
        return "no-neighbour"
    if call.outcome in ("no-neighbour", "unreachable"):
        return call.outcome
    return "silent" if call.outcome == "dropped" else "untested"
