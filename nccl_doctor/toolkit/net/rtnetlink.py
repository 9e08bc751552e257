"""Questions to the kernel's routing over netlink, as `ip route get` asks them; they send no packet.

The kernel itself answers, so its rules (`ip rule`), VRFs, marks and filters count as they are. No
program `ip` and no privilege is needed; where netlink is forbidden, there is no answer. Source:
rtnetlink(7), `inet_rtm_getroute` in net/ipv4/route.c.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_HEADER = struct.Struct("=IHHII")
"""struct nlmsghdr of linux/netlink.h."""
_ROUTE = struct.Struct("=8BI")
"""struct rtmsg of linux/rtnetlink.h."""
_PART = struct.Struct("=HH")
"""struct rtattr."""
_ERROR, _GET_ROUTE, _NEW_ROUTE, _REQUEST = 2, 26, 24, 1
_DST, _SRC, _IIF, _OIF, _GATEWAY, _PREFSRC, _METRICS = 1, 2, 3, 4, 5, 7, 8
_MTU = 2
"""RTAX_MTU, within _METRICS."""
_WAIT_S = 1.0
_LARGEST = 1 << 16
_NO_ANSWER = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


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


def way_to(address: str, source: str = "") -> Way | None:
    """The way of a packet that this host sends; None where the kernel may not be asked.

    Args:
        address: numeric.
        source: the own address that it is sent from; if empty, the kernel chooses.
    """
    return _ask(address, source, "")


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


def _ask(address: str, source: str, interface: str) -> Way | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        question = _question(family, address, source, interface)
    except OSError:
        return None  # no such interface, or no address
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
            sock.settimeout(_WAIT_S)
            sock.sendto(question, (0, 0))
            answer = sock.recv(_LARGEST)
    except OSError:
        return None
    with suppress(struct.error):
        return _read(family, answer)
    return None


def _question(family: int, address: str, source: str, interface: str) -> bytes:
    bits = 128 if family == socket.AF_INET6 else 32
    parts = [_part(_DST, socket.inet_pton(family, address.partition("%")[0]))]
    if source:
        parts.append(_part(_SRC, socket.inet_pton(family, source.partition("%")[0])))
    if interface:
        parts.append(_part(_IIF, struct.pack("=I", socket.if_nametoindex(interface))))
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
