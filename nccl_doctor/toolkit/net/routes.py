"""Routes of this host: gateways and filters as in /proc, and the own address for a peer."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from nccl_doctor.toolkit.host import ROOT
from nccl_doctor.toolkit.net.interfaces import is_loopback
from nccl_doctor.toolkit.net.names import look_up

_GATEWAY_FLAG = 0x2
"""RTF_GATEWAY of linux/route.h; the same in IPv6."""


class Gateway(NamedTuple):
    """The next hop of a default route; a lower metric comes first."""

    metric: int
    interface: str
    address: str


def gateways(root: Path = ROOT) -> list[Gateway]:
    """Gateways of the default routes, IPv4 before IPv6, each by metric."""
    return sorted(_ipv4(root)) + sorted(_ipv6(root))


def source_of(address: str) -> tuple[str | None, int | None]:
    """(own address that the kernel would send from, None), or (None, errno) without a route.

    Connecting a datagram socket queries the routing table and sends nothing.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))
            return str(sock.getsockname()[0]).partition("%")[0], None
    except OSError as error:
        return None, error.errno


_DEAD = {
    errno.EACCES: "prohibit",
    errno.EINVAL: "blackhole",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "throw",
}
"""Error at a connection → type of the route that leads nowhere."""


def dead_route(address: str, number: int | None, root: Path = ROOT) -> str:
    """Route that leads nowhere and so keeps this host from an address, as `ip route` shows it:
    `prohibit 10.0.0.7`. Empty if there is none in the main table; IPv4 only.

    Args:
        address: numeric.
        number: errno of a connection to it.
        root: holds proc.
    """
    if number not in _DEAD or ":" in address:
        return ""
    own = ipaddress.IPv4Address(address)
    best, has_way = None, True
    for words in _rows(root / "proc/net/route")[1:]:
        if len(words) < 8:
            continue
        target, mask = (socket.inet_ntoa(struct.pack("=I", int(words[i], 16))) for i in (1, 7))
        network = ipaddress.IPv4Network((target, mask))
        if own in network and (best is None or network.prefixlen > best.prefixlen):
            best, has_way = network, words[0] != "*"
    if best is None or has_way:
        return ""
    whole = best.prefixlen == best.max_prefixlen
    return f"{_DEAD[number]} {best.network_address if whole else best}"


def source_towards(name: str | None, limit_s: float) -> str:
    """Own address that the kernel would call a host from, by its name or address.

    The own address if that is this host; empty without a route, within loopback, or if the name
    does not resolve in `limit_s`.
    """
    for answer in look_up(name, limit_s).answers if name else ():
        source, _ = source_of(answer)
        if source and not is_loopback(source):
            return source
    return ""


def reverse_path_filter(interface: str, root: Path = ROOT) -> int:
    """The reverse path filter of an interface, IPv4 only: 1 is strict, 2 loose, 0 none."""
    # The kernel takes the greater of the two (`IN_DEV_RPFILTER`; likewise for ARP).
    return _greater("rp_filter", interface, root)


def arp_settings(interface: str, root: Path = ROOT) -> tuple[int, int]:
    """(arp_ignore, arp_announce) of an interface, IPv4 only."""
    return _greater("arp_ignore", interface, root), _greater("arp_announce", interface, root)


def _greater(name: str, interface: str, root: Path) -> int:
    return max(_setting(name, each, root) for each in ("all", interface))


def _setting(name: str, interface: str, root: Path) -> int:
    try:
        return int((root / f"proc/sys/net/ipv4/conf/{interface}/{name}").read_text())
    except (OSError, ValueError):
        return 0


def _ipv4(root: Path) -> list[Gateway]:
    found = []
    for words in _rows(root / "proc/net/route")[1:]:
        if len(words) < 8:
            continue
        target, via, flags, mask = (int(words[i], 16) for i in (1, 2, 3, 7))
        if target == mask == 0 and flags & _GATEWAY_FLAG:
            address = socket.inet_ntoa(struct.pack("=I", via))
            found.append(Gateway(int(words[6]), words[0], address))
    return found


def _ipv6(root: Path) -> list[Gateway]:
    found = []
    for words in _rows(root / "proc/net/ipv6_route"):
        if len(words) < 10 or int(words[1], 16) or not int(words[8], 16) & _GATEWAY_FLAG:
            continue
        address = str(ipaddress.IPv6Address(int(words[4], 16)))
        found.append(Gateway(int(words[5], 16), words[9], address))
    return found


def _rows(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return []
