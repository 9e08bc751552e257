"""The ICMP message that ended a connection attempt: who sent it, and what it says.

connect(2) gives only an error number, and one number has several causes: EHOSTUNREACH is a firewall
that rejects, a router that does not find the host, or this kernel, whose ARP requests nobody
answers. The message tells them apart. Linux keeps it for the socket since 5.9 (commit 45af29ca761c,
"tcp: allow traceroute -Mtcp for unpriv users"); before that, and in gVisor, it is not known.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass

_RECVERR = {
    socket.AF_INET: (socket.IPPROTO_IP, 11),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 25),
}
"""(level, option) of IP_RECVERR and IPV6_RECVERR, which the module socket does not have."""
_ERROR = struct.Struct("=IBBBBII")
"""struct sock_extended_err of linux/errqueue.h; the sender's sockaddr follows."""
_ADDRESS_AT = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""(offset, length) of the address in a sockaddr_in and a sockaddr_in6."""
_ORIGIN = {socket.AF_INET: 2, socket.AF_INET6: 3}
"""SO_EE_ORIGIN_ICMP and SO_EE_ORIGIN_ICMP6."""

_LOST = {
    socket.AF_INET: {(3, code) for code in (0, 1, 6, 7, 8, 11, 12)} | {(11, 0)},
    socket.AF_INET6: {(1, 0), (1, 2), (1, 3), (3, 0)},
}
"""(type, code) that say "I cannot deliver this" and not "this is forbidden": RFC 792, RFC 1122
section 3.2.2.1, RFC 4443; the last of each is a packet that went in circles."""
_NO_HOST = {socket.AF_INET: {(3, 1), (3, 7)}, socket.AF_INET6: {(1, 3)}}


@dataclass(frozen=True)
class Icmp:
    """`sender`: a numeric address. `cannot_deliver`: it does not say that the packet is forbidden.

    `no_host`: the sender looked for the host in its own network, and nobody answered.
    """

    sender: str
    type: int
    code: int
    cannot_deliver: bool
    no_host: bool

    def is_from(self, address: str) -> bool:
        """True if the host that was called sent it; the kernel names no zone (`%eth0`)."""
        return self.sender == address.partition("%")[0]


def ask_for_message(sock: socket.socket, wanted: bool = True) -> None:
    """Let the kernel keep the message for this socket, or no longer.

    Before the attempt; switch it off for a connection, which could not survive a message then.
    """
    level, option = _RECVERR[sock.family]
    with contextlib.suppress(OSError):
        sock.setsockopt(level, option, int(wanted))


def message(sock: socket.socket) -> Icmp | None:
    """The message that ended an attempt, None if there is none or the kernel keeps none."""
    sock.setblocking(False)
    try:
        _, parts, _, _ = sock.recvmsg(1, 256, socket.MSG_ERRQUEUE)
    except OSError:
        return None
    for level, option, data in parts:
        if (level, option) == _RECVERR[sock.family]:
            return _read(sock.family, data)
    return None


def _read(family: socket.AddressFamily, data: bytes) -> Icmp | None:
    start, length = _ADDRESS_AT[family]
    if len(data) < _ERROR.size + start + length:
        return None
    _, origin, kind, code, *_ = _ERROR.unpack_from(data)
    if origin != _ORIGIN[family]:
        return None
    packed = data[_ERROR.size + start : _ERROR.size + start + length]
    said = (kind, code)
    sender = socket.inet_ntop(family, packed)
    return Icmp(sender, kind, code, said in _LOST[family], said in _NO_HOST[family])
