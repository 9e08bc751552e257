"""The kernel's counters of one TCP connection: round trips, segments sent, segments sent again, and
how long ago the last one came.

`struct tcp_info` of include/uapi/linux/tcp.h only grows at its end, and `getsockopt` returns as
much of it as the running kernel has: a missing field is 0.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import asdict, dataclass
from typing import Any

_SIZE = 512
_UNANSWERED = 2
"""Offset of tcpi_retransmits, one byte."""
_OFFSETS = {  # of the u32 fields; the comment is the kernel that brought it
    "mss": 16,
    "received_ms": 52,  # last_data_recv
    "rtt_us": 68,
    "rttvar_us": 72,
    "retransmits": 100,
    "segments": 156,  # data_segs_out, 4.6
    "delivered": 192,  # 4.18
    "duplicates": 216,  # dsack_dups, 4.19
}


@dataclass(frozen=True)
class TcpInfo:
    """Counters of one socket since it was connected, of its sending side but for `received_ms`.

    Attributes:
        mss: bytes of payload in a full segment.
        received_ms: milliseconds since payload last arrived, whether or not it has been read.
        rtt_us, rttvar_us: the smoothed round-trip time, and its mean deviation.
        segments: those with payload that were sent, the ones sent again included.
        retransmits: those sent again.
        delivered: those that the other side acknowledged.
        duplicates: those sent again that the other side already had, as it reported.
        unanswered: time-outs in a row until now, without an answer since.
    """

    mss: int = 0
    received_ms: int = 0
    rtt_us: int = 0
    rttvar_us: int = 0
    retransmits: int = 0
    segments: int = 0
    delivered: int = 0
    duplicates: int = 0
    unanswered: int = 0

    @classmethod
    def parse(cls, raw: bytes) -> TcpInfo:
        """Read what `getsockopt(TCP_INFO)` returned."""
        return cls(
            unanswered=raw[_UNANSWERED] if len(raw) > _UNANSWERED else 0,
            **{
                name: struct.unpack_from("=I", raw, offset)[0]
                for name, offset in _OFFSETS.items()
                if offset + 4 <= len(raw)
            },
        )

    @property
    def lost(self) -> int:
        """Segments that were certainly lost: sent again, and not because an answer was late."""
        return max(0, self.retransmits - self.duplicates)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with `lost`."""
        return {**asdict(self), "lost": self.lost}


def tcp_info(sock: socket.socket) -> TcpInfo:
    """The kernel's counters of a socket.

    Raises:
        OSError: it is not a TCP socket.
    """
    return TcpInfo.parse(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE))
