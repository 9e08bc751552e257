"""Queueing disciplines of this host that delay, limit or lose what it sends (`tc qdisc`).

The kernel is asked over netlink, so no program `tc` is needed. Sources: `tc_fill_qdisc` in
net/sched/sch_api.c, tc(8).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.codec import Node
from nccl_doctor.model.commands import shell
from nccl_doctor.model.fixes import Fix, Step, look

SHAPING = ("netem", "tbf", "htb", "hfsc", "cbq", "cake")
"""Kinds that hold packets back. The kernel's own (mq, fq_codel, pfifo_fast, noqueue) do not."""
_HEADER = struct.Struct("=IHHII")
_TC = struct.Struct("=B3xiIII")
"""struct tcmsg of linux/rtnetlink.h."""
_PART = struct.Struct("=HH")
_GET, _NEW, _REQUEST_DUMP, _ERROR, _DONE = 38, 36, 0x301, 2, 3
_ROOT = 0xFFFFFFFF
_KIND = 1
_WAIT_S = 1.0
_MOST_PARTS = 64


def shapers() -> dict[str, str]:
    """Interface → kind of its root discipline, of those that hold packets back.

    Empty where the kernel may not be asked.
    """
    head = _HEADER.pack(_HEADER.size + _TC.size, _GET, _REQUEST_DUMP, 1, 0)
    found: dict[str, str] = {}
    with (
        suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock,
    ):
        sock.settimeout(_WAIT_S)
        sock.sendto(head + _TC.pack(socket.AF_UNSPEC, 0, 0, 0, 0), (0, 0))
        for _ in range(_MOST_PARTS):
            if not read_part(found, sock.recv(1 << 16)):
                break
    return found


def read_part(found: dict[str, str], answer: bytes) -> bool:
    """True if more parts of the answer are to come; what this one says is added."""
    at = 0
    while at + _HEADER.size <= len(answer):
        size, kind, *_ = _HEADER.unpack_from(answer, at)
        if kind in (_DONE, _ERROR) or size < _HEADER.size:
            return False
        if kind == _NEW:
            _, index, _, parent, _ = _TC.unpack_from(answer, at + _HEADER.size)
            name = _kind(answer[at + _HEADER.size + _TC.size : at + size])
            if parent == _ROOT and name in SHAPING:
                with suppress(OSError):
                    found[socket.if_indextoname(index)] = name
        at += size + -size % 4
    return True


def _kind(parts: bytes) -> str:
    size, kind = _PART.unpack_from(parts)
    is_name = kind == _KIND and size >= _PART.size
    return parts[_PART.size : size].rstrip(b"\0").decode("ascii", "replace") if is_name else ""


def shaped_at(cluster: Cluster, seats: Iterable[int]) -> list[tuple[str, str, str]]:
    """Host, interface and discipline, of the hosts of these seats, by check `interfaces`. Pure."""
    ends = set(seats)
    found = []
    for rank, facts in cluster.facts("interfaces"):
        held = facts.get("shapers")
        if rank.seat in ends and isinstance(held, Mapping):
            names = Node("shapers", held)
            found += [(rank.host.label, nic, names.get(nic, str)) for nic in sorted(held)]
    return found


def in_words(found: Iterable[tuple[str, str, str]]) -> str:
    """The end of a message that names them; empty if there are none."""
    kinds = sorted({f"{kind} on {nic}" for _, nic, kind in found})
    return f"; tc holds packets back: {', '.join(kinds)}" if kinds else ""


def without_shapers(found: Iterable[tuple[str, str, str]], other: str) -> Fix:
    """The fix that takes them away, and `other` in place of it, if that is not the cause."""
    steps = (
        Step(
            shell("tc qdisc del dev {} root", nic),
            on=(host,),
        )
        for host, nic, _ in found
    )
    noted = (
        look(shell("tc -s qdisc show dev {}", nic), "note down first what it is", on=(host,))
        for host, nic, _ in found
    )
    meant = Fix(*other.steps) if isinstance(other, Fix) and other.steps else f"else: {other}"
    return Fix(*noted, *steps, alternatives=[meant])
