"""A calm exchange over a connection of two hosts: what the road between them loses.

The caller sends a few small segments, and goes on when they are answered: so little traffic that no
queue overflows and no limit is reached. What is lost here, the road lost. The segments are small
enough for every MTU: what loses only large packets is another fault.

The kernel counts what it sent again. What the other side did not need (it reports it: D-SACK) comes
from a busy machine or a lost answer, and does not count.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from nccl_doctor.toolkit.net.tcp_info import tcp_info

TOGETHER = 8
"""Segments under way at once: enough that a lost one is noticed by the next, and fewer than a new
connection may send (10, RFC 6928)."""
SEGMENT_BYTES = 512
"""With headers it fits into 576 bytes, which every network carries (RFC 791)."""
GROUP_BYTES = TOGETHER * SEGMENT_BYTES
MARK = b"C"
"""First byte of a group of segments."""
REPLY = b"c"
_SEGMENT = b"." * SEGMENT_BYTES


@dataclass(frozen=True)
class Calm:
    """Length of an exchange: `groups` of segments at most, and none after `limit_s` seconds, or
    after `lossy_s` where some were lost: each of these costs a wait, and few say nothing.
    """

    groups: int = 50
    limit_s: float = 0.5
    lossy_s: float = 1.5


@dataclass(frozen=True)
class Tally:
    """Segments sent from here to there, and how the road treated them.

    Attributes:
        segments: those that were sent, the ones sent again included.
        lost: those that the other side never had.
        again: those sent again for whatever reason: they were lost, or the answer to them was.
        stopped: whether no answer came any more, for as long as the socket waits.
    """

    segments: int = 0
    lost: int = 0
    again: int = 0
    stopped: bool = False


def exchange(sock: socket.socket, calm: Calm) -> Tally:
    """Send groups of segments; the other side answers each with `REPLY`.

    Args:
        sock: connected, with a time-out, without Nagle's algorithm.
        calm: how many, how long.

    Raises:
        OSError: the connection broke.
    """
    before = tcp_info(sock)
    started = time.monotonic()
    stopped = False
    for _ in range(calm.groups):
        for number in range(TOGETHER):
            # End of record: while the window is small, the kernel would join small segments.
            data = (MARK + _SEGMENT[1:]) if number == 0 else _SEGMENT
            sock.sendmsg([data], [], socket.MSG_EOR)
        try:
            answered = sock.recv(1)
        except TimeoutError:
            stopped = True
            break
        if answered != REPLY:
            raise OSError(f"a wrong answer to small segments: {answered!r}")
        if time.monotonic() > started + calm.limit_s and (
            time.monotonic() > started + calm.lossy_s or tcp_info(sock).lost == before.lost
        ):
            break
    after = tcp_info(sock)
    lost = max(0, after.lost - before.lost)
    again = after.retransmits - before.retransmits
    return Tally(after.segments - before.segments, lost, again, stopped)
