"""Packets that a path carries which loses larger ones, by connections whose segments are limited.

A router that is to say "fragmentation needed" does not, or a firewall eats what it says: TCP then
sends the same large packet again and again. A connection that is told a smaller largest segment
before it opens (TCP_MAXSEG, tcp(7)) sends smaller packets, and the other side does, too.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from nccl_doctor.toolkit.peers.calm import Calm
from nccl_doctor.toolkit.peers.echo import STALL_S, ListeningAddress, Talk, hold

_SIZES = (
    *(
        9000,
        8950,
        8896,
        8000,
        4352,
        1500,
        1480,
        1460,
        1450,
        1440,
        1420,
        1400,
        1380,
        1350,
        1300,
        1280,
    ),
    *(1240, 1200, 1100, 1000, 900, 800, 576),
)
"""Bytes of IP packets to try: of jumbo frames and Ethernet, and below them those of tunnels (50
less for VXLAN, 1480 of IPIP, 1420 of WireGuard, …) down to what every network carries."""
_LIMIT_S, _MORE_S = STALL_S + 2.0, 0.7
_HEADERS = {socket.AF_INET: 40, socket.AF_INET6: 60}
"""Bytes of IP and TCP; options of TCP count as a part of the segment."""


def carried(door: ListeningAddress, mtu: int) -> int:
    """Bytes of the largest packets, of some sizes below the MTU, with which a full packet and the
    large echo come back; 0 if with none.

    Args:
        door: a listener that has answered, and with which the large echo stopped.
        mtu: bytes, of the interface.
    """
    sizes = [size for size in _SIZES if size < mtu]
    if not sizes:
        return 0
    pool = ThreadPoolExecutor(len(sizes))
    tried = {pool.submit(_passes, door, size): size for size in sizes}
    begun = time.monotonic()
    until, largest, left = begun + _LIMIT_S, 0, set(tried)
    while left and (patience := until - time.monotonic()) > 0:
        done, left = wait(left, patience, FIRST_COMPLETED)
        passed = [tried[each] for each in done if each.result()]
        if passed and not largest:  # the others that pass take about as long
            took = time.monotonic() - begun
            until = min(until, begun + took + max(_MORE_S, took))
        largest = max([largest, *passed])
    pool.shutdown(wait=False, cancel_futures=True)
    return largest


def _passes(door: ListeningAddress, size: int) -> bool:
    try:
        ((family, kind, _, _, address), *_) = socket.getaddrinfo(
            door.address, door.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, size - _HEADERS[family])
            sock.settimeout(STALL_S)
            sock.connect(address)
            end = hold(sock, door, Talk(Calm(0)))
    except OSError:
        return False
    return end.outcome == "ok" and not end.detail
