"""Questions to the kernel over netlink, as `ip route get`, `ip link` and `ip neigh` ask; no packet
is sent.

The kernel itself answers, so its rules (`ip rule`), VRFs, marks and filters count as they are. No
program `ip` and no privilege is needed; where netlink is forbidden, there is no answer. Sources:
rtnetlink(7), `inet_rtm_getroute` in net/ipv4/route.c, `neigh_dump_info` in net/core/neighbour.c,
`rtnl_fill_ifinfo` in net/core/rtnetlink.c.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from nccl_doctor.toolkit.net.interfaces import is_link_local

_HEADER = struct.Struct("=IHHII")
"""struct nlmsghdr of linux/netlink.h."""
_ROUTE = struct.Struct("=8BI")
"""struct rtmsg of linux/rtnetlink.h."""
_PART = struct.Struct("=HH")
"""struct rtattr."""
_NEIGHBOUR = struct.Struct("=B3xiHBB")
"""struct ndmsg of linux/neighbour.h."""
_LINK = struct.Struct("=BxHiII")
"""struct ifinfomsg of linux/rtnetlink.h."""
_ERROR, _DONE, _REQUEST, _DUMP = 2, 3, 0x1, 0x300
_GET_ROUTE, _NEW_ROUTE, _GET_NEIGHBOUR, _NEW_NEIGHBOUR = 26, 24, 30, 28
_GET_LINK, _NEW_LINK = 18, 16
_MASTER, _LINK_INFO, _SLAVE_KIND = 10, 18, 4
"""IFLA_MASTER, IFLA_LINKINFO and, within that, IFLA_INFO_SLAVE_KIND of linux/if_link.h."""
_VRF = b"vrf"
_DST, _SRC, _IIF, _OIF, _GATEWAY, _PREFSRC, _METRICS = 1, 2, 3, 4, 5, 7, 8
_MTU = 2
"""RTAX_MTU, within _METRICS."""
_WAIT_S = 1.0
_LARGEST = 1 << 16
_MOST_PARTS = 256
"""Each has some hundred neighbours: more than any table holds."""
_LINK_ADDRESS = 2
"""NDA_LLADDR; NDA_DST is 1, as RTA_DST."""
_KNOWN = 0x02 | 0x04 | 0x08 | 0x10
"""NUD_REACHABLE, _STALE, _DELAY, _PROBE: some machine answered."""
_PERMANENT = 0x80
"""NUD_PERMANENT; the kernel makes such entries itself only for multicast and broadcast."""
_SOUGHT = 0x01 | 0x20
"""NUD_INCOMPLETE, NUD_FAILED: none did."""
_NO_ANSWER = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_ODD = (struct.error, ValueError)
"""Errors at an answer that is cut off, or whose addresses have another length."""


class Way(NamedTuple):
    """The kernel's plan for one packet.

    `errno` is 0 if it has a way: out of `interface`, by `gateway` (empty: the host is a neighbour),
    from `source`. `mtu` is one that a route names or that the path has taught; None for that of
    the interface.
    """

    interface: str = ""
    gateway: str = ""
    source: str = ""
    mtu: int | None = None
    errno: int = 0


def way_to(address: str, source: str = "", within: str = "") -> Way | None:
    """The way of a packet that this host sends; None where the kernel may not be asked.

    Args:
        address: numeric.
        source: the own address that it is sent from; if empty, the kernel chooses.
        within: the VRF of the interface with that address, from `vrf_of`. Its tables are asked, as
            for a socket that is bound to it.
    """
    return _ask(address, source, "", within)


def vrf_of(interface: str) -> str:
    """The VRF that an interface belongs to; empty if none, or if the kernel may not be asked."""
    found = _master_of(interface)
    return found[0] if found is not None and found[1] == _VRF else ""


def leads_back(address: str, peer: str, interface: str) -> bool | None:
    """True if answers to a peer leave by the interface on which its packets come; None where the
    kernel may not be asked.

    Args:
        address: own one, from which the answers are sent.
        peer: numeric.
        interface: on which the packets come.
    """
    if is_link_local(peer):  # of the link of that very interface
        return True
    way = way_to(peer, address, vrf_of(interface))
    return None if way is None else way.interface == interface


def way_in(address: str, source: str, interface: str) -> Way | None:
    """The way of a packet that arrives; None where the kernel may not be asked.

    If `address` is an own one, a way means that the kernel takes the packet, and `errno` that it
    drops it: by its reverse path filter, or as it has no way back at all.

    Args:
        address: to which it is sent.
        source: of the sender.
        interface: on which it arrives.
    """
    return _ask(address, source, interface)


class Fixed(NamedTuple):
    """Entry of the neighbour table that was made by hand: the kernel asks no machine."""

    mac: str
    interface: str


def neighbours() -> dict[str, str]:
    """Address → hardware address that answered for it, of all neighbours that the kernel knows; an
    empty text where it asked for one, and nothing answered. Empty where it may not be asked.
    """
    found: dict[str, str] = {}
    for address, mac, state, _ in _neighbours():
        if state & (_KNOWN | _SOUGHT):  # an address may be sought on several interfaces
            found[address] = (mac if state & _KNOWN else "") or found.get(address, "")
    return found


def fixed_neighbours() -> dict[str, Fixed]:
    """Address → the entry, of those that were made by hand or by a program, and not by an answer.

    Empty where the kernel may not be asked.
    """
    found = {}
    for address, mac, state, index in _neighbours():
        if state & _PERMANENT and mac:
            with suppress(OSError):
                found[address] = Fixed(mac, socket.if_indextoname(index))
    return found


def _neighbours() -> list[tuple[str, str, int, int]]:
    """Address, hardware address, state and index of the interface, of every neighbour."""
    body = _NEIGHBOUR.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    head = _HEADER.pack(_HEADER.size + len(body), _GET_NEIGHBOUR, _REQUEST | _DUMP, 1, 0)
    found: list[tuple[str, str, int, int]] = []
    with (
        suppress(OSError, *_ODD),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock,
    ):
        sock.settimeout(_WAIT_S)
        sock.sendto(head + body, (0, 0))
        for _ in range(_MOST_PARTS):
            if not _add_neighbours(found, sock.recv(_LARGEST)):
                break
    return found


def _add_neighbours(found: list[tuple[str, str, int, int]], answer: bytes) -> bool:
    """True if more parts of the answer are to come."""
    at = 0
    while at + _HEADER.size <= len(answer):
        size, kind, *_ = _HEADER.unpack_from(answer, at)
        if kind in (_DONE, _ERROR) or size < _HEADER.size:
            return False
        if kind == _NEW_NEIGHBOUR:
            family, index, state, _, _ = _NEIGHBOUR.unpack_from(answer, at + _HEADER.size)
            inner = at + _HEADER.size + _NEIGHBOUR.size
            parts = dict(_parts(answer[inner : at + size], 0))
            is_ip = family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and _DST in parts:
                mac = parts.get(_LINK_ADDRESS, b"").hex(":")
                found.append((socket.inet_ntop(family, parts[_DST]), mac, state, index))
        at += size + -size % 4
    return True


def _master_of(interface: str) -> tuple[str, bytes] | None:
    """(name, kind) of what an interface is a part of: a bond, a bridge, a VRF; None if it is none's
    part, or the kernel may not be asked.
    """
    with suppress(OSError, *_ODD):
        body = _LINK.pack(socket.AF_UNSPEC, 0, socket.if_nametoindex(interface), 0, 0)
        answer = _reply(_HEADER.pack(_HEADER.size + len(body), _GET_LINK, _REQUEST, 1, 0) + body)
        size, kind, *_ = _HEADER.unpack_from(answer)
        if kind == _NEW_LINK:
            parts = dict(_parts(answer[:size], _HEADER.size + _LINK.size))
            said = dict(_parts(parts.get(_LINK_INFO, b""), 0)).get(_SLAVE_KIND, b"")
            (index,) = struct.unpack("=I", parts.get(_MASTER, b""))
            return socket.if_indextoname(index), said.rstrip(b"\0")
    return None


def _reply(question: bytes) -> bytes:
    """The first message of the answer."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(_WAIT_S)
        sock.sendto(question, (0, 0))
        return sock.recv(_LARGEST)


def _ask(address: str, source: str, interface: str, within: str = "") -> Way | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError, *_ODD):  # no such interface, no address, or netlink is forbidden
        return _read(family, _reply(_question(family, address, source, interface, within)))
    return None


def _question(family: int, address: str, source: str, interface: str, within: str) -> bytes:
    bits = 128 if family == socket.AF_INET6 else 32
    parts = [_part(_DST, socket.inet_pton(family, address.partition("%")[0]))]
    if source:
        parts.append(_part(_SRC, socket.inet_pton(family, source.partition("%")[0])))
    for kind, name in ((_IIF, interface), (_OIF, within)):
        if name:
            parts.append(_part(kind, struct.pack("=I", socket.if_nametoindex(name))))
    body = _ROUTE.pack(family, bits, bits if source else 0, 0, 0, 0, 0, 0, 0) + b"".join(parts)
    return _HEADER.pack(_HEADER.size + len(body), _GET_ROUTE, _REQUEST, 1, 0) + body


def _part(kind: int, data: bytes) -> bytes:
    size = _PART.size + len(data)
    return _PART.pack(size, kind) + data + bytes(-size % 4)


def _read(family: int, answer: bytes) -> Way | None:
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind == _ERROR:
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        return None if not code or -code in _NO_ANSWER else Way(errno=-code)
    if kind != _NEW_ROUTE:
        return None
    parts = dict(_parts(answer, _HEADER.size + _ROUTE.size))

    def text(part: int) -> str:
        return socket.inet_ntop(family, parts[part]) if part in parts else ""

    index = struct.unpack_from("=I", parts[_OIF])[0] if _OIF in parts else 0
    metrics = dict(_parts(parts.get(_METRICS, b""), 0))
    mtu = struct.unpack_from("=I", metrics[_MTU])[0] if _MTU in metrics else None
    name = ""
    with suppress(OSError):
        name = socket.if_indextoname(index)
    return Way(name, text(_GATEWAY), text(_PREFSRC), mtu)


def _parts(data: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    while at + _PART.size <= len(data):
        size, kind = _PART.unpack_from(data, at)
        if size < _PART.size:
            return
        yield kind, data[at + _PART.size : at + size]
        at += size + -size % 4
