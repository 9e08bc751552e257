"""TCP connections of this network namespace and their counters, as `ss -ti` reads them.

The kernel tells them over netlink, to every user and of every user's connections; where netlink or
inet_diag is missing, there is no answer. Sources: sock_diag(7), include/uapi/linux/inet_diag.h,
`inet_diag_dump_icsk` in net/ipv4/inet_diag.c.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from nccl_doctor.toolkit.net.tcp_info import TcpInfo

_HEADER = struct.Struct("=IHHII")
"""struct nlmsghdr of linux/netlink.h."""
_ENDS = struct.Struct("!HH16s16sIQ")
"""struct inet_diag_sockid: ports and addresses in network order; the rest is not used here."""
_QUESTION = struct.Struct("=BBBxI")
"""struct inet_diag_req_v2 up to its id: family, protocol, extensions, states."""
_STATE = struct.Struct("=BBBB")
_REST_BYTES = 20
"""expires, rqueue, wqueue, uid, inode of struct inet_diag_msg."""
_PART = struct.Struct("=HH")
"""struct rtattr."""
_SOCK_DIAG = 4
"""NETLINK_SOCK_DIAG."""
_BY_FAMILY, _REQUEST, _DUMP, _ERROR, _DONE = 20, 0x1, 0x300, 2, 3
_INFO = 2
"""INET_DIAG_INFO; it is asked for with bit 1."""
_LAST_DATA_RECV = 52
"""Offset of tcpi_last_data_recv in struct tcp_info: a u32 of milliseconds."""
_ESTABLISHED = 1
_WAIT_S = 1.0
_LARGEST = 1 << 16
_MOST_PARTS = 4096
"""Each has some hundred connections."""
_ODD = (struct.error, ValueError)


class Connection(NamedTuple):
    """An established connection: numeric addresses of both ends, its counters here, and the seconds
    since something came in.
    """

    local: str
    remote: str
    tcp: TcpInfo
    silent_s: float


def connections_at(port: int) -> list[Connection]:
    """Established connections with this port at either end; empty where the kernel tells none."""
    found: list[Connection] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for here, there in ((port, 0), (0, port)):
            with suppress(OSError, *_ODD):
                found += _dump(family, here, there)
    return found


def _dump(family: int, here: int, there: int) -> Iterator[Connection]:
    ends = _ENDS.pack(here, there, bytes(16), bytes(16), 0, 0)
    body = _QUESTION.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 1 << _ESTABLISHED) + ends
    head = _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST | _DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as sock:
        sock.settimeout(_WAIT_S)
        sock.sendto(head + body, (0, 0))
        for _ in range(_MOST_PARTS):
            answer, at = sock.recv(_LARGEST), 0
            while at + _HEADER.size <= len(answer):
                size, kind, *_ = _HEADER.unpack_from(answer, at)
                if kind in (_DONE, _ERROR) or size < _HEADER.size:
                    return
                if kind == _BY_FAMILY:
                    yield _read(answer[at + _HEADER.size : at + size])
                at += size + -size % 4


def _read(message: bytes) -> Connection:
    family, *_ = _STATE.unpack_from(message)
    _, _, local, remote, *_ = _ENDS.unpack_from(message, _STATE.size)
    at, info, silent_ms = _STATE.size + _ENDS.size + _REST_BYTES, TcpInfo(), 0
    while at + _PART.size <= len(message):
        size, kind = _PART.unpack_from(message, at)
        if size < _PART.size:
            break
        if kind == _INFO:
            raw = message[at + _PART.size : at + size]
            info = TcpInfo.parse(raw)
            (silent_ms,) = struct.unpack_from("=I", raw, _LAST_DATA_RECV)
        at += size + -size % 4
    return Connection(_text(family, local), _text(family, remote), info, silent_ms / 1000)


def _text(family: int, address: bytes) -> str:
    """The address; that of IPv4 also where an IPv6 socket carries it."""
    if family == socket.AF_INET:
        return socket.inet_ntop(family, address[:4])
    return socket.inet_ntop(socket.AF_INET6, address).removeprefix("::ffff:")
