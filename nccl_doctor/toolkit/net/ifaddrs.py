"""getifaddrs(3): the list of interfaces that NCCL and gloo use, read without another package."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40
_SIOCGIFMTU = 0x8921
_WHERE: dict[int, tuple[int, int]] = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Family → (offset, size) in bytes of the address in its sockaddr, from ip(7) and ipv6(7)."""


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other_end", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


@dataclass(frozen=True)
class Entry:
    """One entry: an address of an interface, or the interface itself (`family` AF_PACKET).

    `address` is numeric, without a zone, and empty for other families than IPv4 and IPv6; `prefix`
    is the length of its subnet prefix in bits, None where there is none.
    """

    name: str
    flags: int
    family: int
    address: str
    prefix: int | None


def entries() -> list[Entry]:
    """All entries of this network namespace, in the order of the C library.

    Raises:
        OSError: the kernel gives no list.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        return list(_read(first))
    finally:
        libc.freeifaddrs(first)


def mtu(name: str) -> int:
    """Bytes that an interface sends in one packet; 0 if not known."""
    request = struct.pack("16s24x", os.fsencode(name)[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer = fcntl.ioctl(sock, _SIOCGIFMTU, request)
    except OSError:
        return 0
    return int(struct.unpack_from("i", answer, 16)[0])


def _read(at: ctypes._Pointer[_IfAddrs]) -> Iterator[Entry]:
    while at:
        one = at.contents
        if one.address:
            family = ctypes.c_ushort.from_address(one.address).value
            raw, mask = _bytes(one.address, family), _bytes(one.netmask, family)
            yield Entry(
                name=os.fsdecode(one.name),
                flags=one.flags,
                family=family,
                address=socket.inet_ntop(family, raw) if raw else "",
                prefix=bin(int.from_bytes(mask, "big")).count("1") if mask else None,
            )
        at = one.next


def _bytes(sockaddr: int | None, family: int) -> bytes:
    """The address in a sockaddr; empty if there is none."""
    if not sockaddr or family not in _WHERE:
        return b""
    offset, size = _WHERE[family]
    return ctypes.string_at(sockaddr + offset, size)
