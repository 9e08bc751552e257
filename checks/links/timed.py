"""A short timed exchange between hosts over TCP: latency and bandwidth, in both directions.

Two hosts measure over one connection. The one that called leads first, then the other one:

    PING  64 bytes, answered with as much: the round-trip time
    BURST as much as passes in a set time; then END, answered with bytes and seconds on arrival:
          the bandwidth, timed where it counts; and with how that side's CPU was
    OVER  now the other one leads
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from socket import socket
from typing import Any

from nccl_doctor.toolkit.cpu_wait import CpuWatch
from nccl_doctor.toolkit.net.interfaces import line_rate
from nccl_doctor.toolkit.net.tcp_info import TcpInfo
from nccl_doctor.toolkit.peers.echo import ListeningAddress
from nccl_doctor.toolkit.peers.schedule import Slots

from .wire import LARGEST, Gate, Stalled, Wire, call

_PING, _BURST, _END = b"P", b"B", b"E"
_OVER = b"O"

_PING_BYTES = 64
_MOST_PINGS, _LEAST_PINGS, _PING_S = 40, 5, 0.05
_FIRST_BLOCK = 1 << 14
_QUICK_S = 0.001
"""After a block that the kernel took faster than this, the next one is twice as large."""
_LEAST_S = 1.5
"""Time that a meeting begins with at the least: one over 50 Mbit/s takes about a second."""
_NO_TIME = "no time was left"
_WARM_SHARE = 0.25
"""Share of the burst in which the connection finds its speed, and a token bucket runs empty."""


@dataclass(frozen=True)
class Pace:
    """Limits of the parts of a meeting; a good one takes 0.3 s.

    A burst ends after `burst_s` seconds, or sooner where so many bytes went: more would tell
    nothing more about a fast link, and takes the CPUs from whoever shares them.
    """

    burst_s: float = 0.1
    burst_bytes: int = 64 << 20
    limit_s: float = 4.0


@dataclass
class Sent:
    """The measurement from this side to the other one.

    Attributes:
        pings_us: round-trip times.
        bytes, seconds: what arrived of the burst after it had warmed up, by the receiver's clock.
        tcp: counters of the whole connection.
        cpu: part (`echo`, `burst`) → reports of a `CpuWatch`, of this side and of the other one.
        stalled: the part in which the exchange stopped; what came before it is valid.
    """

    pings_us: list[float] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0
    tcp: TcpInfo = field(default_factory=TcpInfo)
    cpu: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    stalled: str = ""

    @property
    def rate(self) -> float:
        """Bytes per second of the burst; 0 if it was not measured."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data: `rtt_us` is the median, `rate` bytes per second; None where not measured."""
        return {
            "rtt_us": round(statistics.median(self.pings_us), 1) if self.pings_us else None,
            "rate": round(self.rate) if self.seconds else None,
            "tcp": self.tcp.to_json(),
            "cpu": self.cpu,
            "stalled": self.stalled,
        }


def hold_meetings(
    slots: Slots,
    seat: int,
    gate: Gate,
    doors: Mapping[int, Mapping[str, Any]],
    *,
    pace: Pace,
    deadline: float,
) -> dict[int, dict[str, Any]]:
    """Measure with every partner of a timetable in turn.

    Each participant waits only for its own next partner, so a slow pair delays no more than needed.
    The wait for a busy partner is longer than a meeting takes, and a little longer each time, so
    that a participant that waits for a missing partner is itself still waited for.

    Args:
        slots: the same for all.
        seat: of this participant.
        gate: its own.
        doors: seat → `ListeningAddress` of each participant's gate, as plain data; other keys are
            ignored.
        pace: of each exchange.
        deadline: `time.monotonic()` second at which the last meeting has ended.

    Returns: partner's seat → `Sent` *to* that partner as plain data, or `{"problem": words}` if
    there was no exchange.
    """
    found: dict[int, dict[str, Any]] = {}
    mine = [(i, each) for i, slot in enumerate(slots) for each in slot if seat in each]
    for index, (first, second) in mine:
        partner = second if seat == first else first
        left_s = deadline - _LEAST_S - time.monotonic()
        patience = min(pace.limit_s * (2 + index / 2), left_s)
        if patience <= 0:
            found[partner] = {"problem": _NO_TIME}
            continue
        met: socket | str
        if partner not in doors:  # it was waited for, and will not call either
            met = "the partner was not listening"
        elif seat != first:
            met = gate.admit(partner, patience) or "the partner did not call"
        else:
            door = {each.name: doors[partner][each.name] for each in fields(ListeningAddress)}
            met = call(ListeningAddress(**door), seat, patience)
        if isinstance(met, str):
            found[partner] = {"problem": met}
            continue
        with met:
            limited = replace(pace, limit_s=min(pace.limit_s, deadline - time.monotonic()))
            sent = exchange(met, limited, leads=seat == first).to_json()
        # What stops in a shorter time than planned says nothing of the link.
        cut_off = sent["stalled"] and limited != pace
        found[partner] = {"problem": _NO_TIME} if cut_off else sent
    return found


def exchange(sock: socket, pace: Pace, *, leads: bool) -> Sent:
    """Measure with one partner, in both directions.

    Args:
        sock: connected to it.
        pace: of the direction that this side leads.
        leads: whether this side is the first to send.

    Returns: the measurement in the direction from here to there; never raises OSError.
    """
    sent = Sent(stalled="the other direction")
    wire = Wire(sock, pace.limit_s)
    try:
        if not leads:
            _follow(wire)
        _Leader(wire, pace, sent).run()
        if leads:
            _follow(wire)
    except Stalled:
        pass  # what stopped is recorded; the partner reports the other direction
    return sent


class _Leader:
    """The sending side of one direction."""

    def __init__(self, wire: Wire, pace: Pace, sent: Sent) -> None:
        self.wire, self.pace, self.sent = wire, pace, sent

    def run(self) -> None:
        parts = {"echo": self._ping, "burst": self._burst}
        try:
            for self.sent.stalled, part in parts.items():
                part()
            self.wire.send(_OVER)
            self.sent.stalled = ""
        finally:
            self.sent.tcp = self.wire.info()

    def _ping(self) -> None:
        watch = CpuWatch()
        payload = bytes(_PING_BYTES)
        now = time.monotonic()
        end = now + _PING_S
        pings = self.sent.pings_us
        try:
            while len(pings) < _LEAST_PINGS or (len(pings) < _MOST_PINGS and now < end):
                self.wire.ask(_PING, payload)
                before, now = now, time.monotonic()
                pings.append((now - before) * 1e6)
        finally:
            self.sent.cpu["echo"] = [watch.report()]

    def _burst(self) -> None:
        watch = CpuWatch()
        block = memoryview(bytes(LARGEST))
        size = _FIRST_BLOCK
        self.wire.keep_unsent_below(size)
        now = time.monotonic()
        end, left = now + self.pace.burst_s, self.pace.burst_bytes
        try:
            while now < end and left > 0:
                self.wire.send(_BURST, block[:size])
                left -= size
                before, now = now, time.monotonic()
                if now - before < _QUICK_S and size < LARGEST:
                    size *= 2
                    self.wire.keep_unsent_below(size)
            counts = self.wire.ask(_END)
        finally:
            self.sent.cpu["burst"] = [watch.report()]
        self.sent.bytes, self.sent.seconds = counts["bytes"], counts["seconds"]
        for name, report in counts["cpu"].items():
            self.sent.cpu[name].append(report)


def _follow(wire: Wire) -> None:
    """The receiving side of one direction."""
    watch = CpuWatch()
    cpu = {}
    arrived: list[tuple[float, int]] = []
    total = 0
    while True:
        what, size = wire.next()
        if what == _BURST and not arrived:
            cpu["echo"], watch = watch.report(), CpuWatch()
            arrived.append((time.monotonic(), 0))
        wire.take(size)
        if what == _BURST:
            total += size
            arrived.append((time.monotonic(), total))
        elif what == _PING:
            wire.reply("." * (size - 2))
        elif what == _END:
            cpu["burst"] = watch.report()
            count, seconds = warm_part(arrived)
            wire.reply({"bytes": count, "seconds": seconds, "cpu": cpu})
        elif what == _OVER:
            return


def warm_part(arrived: Sequence[tuple[float, int]]) -> tuple[int, float]:
    """(bytes, seconds) after the first quarter of a burst.

    Args:
        arrived: (second, bytes until then), in order; the first one is (begin, 0).
    """
    if len(arrived) < 2:
        return 0, 0.0
    begin, end = arrived[0][0], arrived[-1][0]
    warm = begin + _WARM_SHARE * (end - begin)
    cold = max(count for second, count in arrived if second <= warm)
    return arrived[-1][1] - cold, max(end - warm, 1e-6)


def nic_speed(interface: str, root: Path) -> int | None:
    """Line rate in Mbit/s; None if it is not known, or the interface is not hardware."""
    is_hardware = (root / "sys/class/net" / interface / "device").exists()
    return line_rate(interface, root) if is_hardware else None
