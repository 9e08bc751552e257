"""One TCP connection attempt, and the class of its result.

The only module that classifies connection errors, so that every check uses the same terms.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .icmp import Icmp, ask_for_message, message

SILENCE_S = 130.0
"""Until the kernel gives an attempt up: 127 s with net.ipv4.tcp_syn_retries=6, 131 s since 6.5."""
_ARP_SECONDS = 0.8
"""EHOSTUNREACH earlier than this came by an ICMP message; the kernel's own neighbour look-up fails
only after about three seconds (three ARP requests, net.ipv4.neigh.*.retrans_time_ms = 1000)."""

_CLASSES = {
    errno.ECONNREFUSED: "refused",
    errno.ENETUNREACH: "unreachable",
    errno.ENETDOWN: "unreachable",
    errno.EADDRNOTAVAIL: "unreachable",
    errno.ETIMEDOUT: "dropped",
    errno.EACCES: "rejected",
    errno.EPERM: "rejected",
    errno.ECONNRESET: "refused",
}


class Origin(NamedTuple):
    """An own address, the interface to use, and the port; if empty, the routing table chooses the
    interface, and the kernel the port.
    """

    address: str
    interface: str = ""
    port: int = 0


@dataclass(frozen=True)
class Dial:
    """The result of one TCP connection attempt.

    `outcome` is one of
    `connected`; `refused` (a reset: the host answers, nothing listens there);
    `dropped` (no answer at all within the time: a silent firewall, or a host that is off);
    `rejected` (an ICMP "prohibited", "port unreachable" from the host itself, or a local rule: a
    firewall that answers);
    `unreachable` (this host has no route); `no-neighbour` (no host has that address on the local
    network); `turned-back` (a router on the way answers that it cannot deliver: it has no route,
    or does not find the host); `error` (anything else, see `errno`).
    `icmp` is the message that ended the attempt, where there was one and the kernel tells.
    """

    outcome: str
    errno: int | None
    detail: str
    duration_s: float
    icmp: Icmp | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data; `icmp` only if there is one."""
        full = asdict(self)
        return full if self.icmp else {key: full[key] for key in full if key != "icmp"}


def dial(
    address: str, port: int, timeout_s: float, origin: Origin | None = None
) -> tuple[Dial, socket.socket | None]:
    """Try one TCP connection to a numeric address; never raises OSError once there is a socket.

    If `origin` is None the routing table chooses the interface.

    Returns: the result, and the connected socket (blocking, timeout `timeout_s`) or None.
    """
    (only,), sock = dial_twice(address, port, timeout_s, None, origin)
    return only, sock


def dial_twice(
    address: str,
    port: int,
    timeout_s: float,
    pause_s: float | None,
    origin: Origin | None = None,
) -> tuple[list[Dial], socket.socket | None]:
    """The same, with a second attempt beside the first one if that has no answer after `pause_s`
    seconds (None: without one): as many packets in half the time. `timeout_s` is for each of them.

    Returns: the results in the order in which they came, without one that another one's connection
    made needless; and the connected socket or None.
    """
    first = _Connecting(address, port, origin)
    ended: list[Dial] = []
    again_at = None if pause_s is None else first.started + pause_s
    with selectors.PollSelector() as waiting:  # unlike epoll it takes no descriptor
        under_way = {first}
        waiting.register(first.sock, selectors.EVENT_WRITE, first)
        while under_way:
            now = time.monotonic()
            if again_at is not None and now >= again_at:
                again_at = None
                with contextlib.suppress(OSError):  # no descriptor is left: one has to do
                    second = _Connecting(address, port, origin)
                    under_way.add(second)
                    waiting.register(second.sock, selectors.EVENT_WRITE, second)
            until = min(each.started + timeout_s for each in under_way)
            wake_at = until if again_at is None else min(until, again_at)
            ready = {key.data for key, _ in waiting.select(max(0.0, wake_at - now))}
            now = time.monotonic()
            for each in [*under_way]:
                if each not in ready and now < each.started + timeout_s:
                    continue
                waiting.unregister(each.sock)
                under_way.remove(each)
                ended.append(each.end(is_ready=each in ready))
                if ended[-1].outcome == "connected":
                    for other in under_way:
                        other.sock.close()
                    each.sock.settimeout(timeout_s)
                    return ended, each.sock
    return ended, None


class _Connecting:
    """One attempt under way.

    Raises:
        OSError: there is no socket.
    """

    def __init__(self, address: str, port: int, origin: Origin | None) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.address = address
        self.is_held = origin is not None
        self.started = time.monotonic()
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        try:
            if origin is not None:
                hold_to(self.sock, origin)
            ask_for_message(self.sock)
            self.number = self.sock.connect_ex(sockaddr(address, port))
        except OSError as error:
            self.number = error.errno or errno.EIO

    def end(self, *, is_ready: bool) -> Dial:
        """The result; it closes the socket unless that is connected."""
        number = self.number
        if is_ready and number == errno.EINPROGRESS:
            number = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        took = time.monotonic() - self.started
        if number == 0:
            ask_for_message(self.sock, wanted=False)
            return Dial("connected", None, "", took)
        with self.sock:
            if number in (errno.EINPROGRESS, errno.ETIMEDOUT):
                return Dial("dropped", errno.ETIMEDOUT, "no answer", took)
            said = message(self.sock)
        outcome = _outcome(number, self.address, took, said, held=self.is_held)
        return Dial(outcome, number, str(OSError(number, os.strerror(number))), took, said)


def _outcome(number: int, address: str, took_s: float, said: Icmp | None, *, held: bool) -> str:
    """Class of an error, by the ICMP message behind it if the kernel has one.

    Args:
        number: errno.
        address: that was called.
        took_s: seconds until the error came.
        said: the message.
        held: the socket was bound, so that this host's usual routes prove nothing.
    """
    lost = number in (errno.EHOSTUNREACH, errno.ENETUNREACH)
    if said is not None and lost and said.cannot_deliver:
        if not (said.is_from(address) or _is_own(said.sender)):
            return "turned-back"
        # From here: nobody answers ARP. From the host itself: it is there, and rejects.
    elif lost and said is None and not has_route(address):
        return "unreachable"  # no packet has left
    elif number == errno.ENETUNREACH and said is None and not held:
        return "turned-back"  # there is a route here, so another one said it
    if number == errno.EHOSTUNREACH:
        return "rejected" if took_s < _ARP_SECONDS else "no-neighbour"
    if number == errno.ENETUNREACH and said is not None:
        return "rejected"
    if number == errno.ECONNREFUSED and said is not None and said.is_from(address):
        return "rejected"  # its TCP answers with a reset: this is the plain REJECT of a firewall
    return _CLASSES.get(number, "error")


def _is_own(address: str) -> bool:
    """True if a numeric address is one of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind(sockaddr(address, 0))
    except OSError:
        return False
    return True


def has_route(address: str) -> bool:
    """True if this host has a route to a numeric address, by its own tables; sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(sockaddr(address, 9))  # a datagram socket only looks the route up
    except OSError:
        return False
    return True


def arp_flags(address: str, root: Path = Path("/")) -> int | None:
    """Flags of a neighbour in the ARP table: 0 while it does not answer, None if it is unknown."""
    try:
        table = (root / "proc/net/arp").read_text(encoding="ascii")
        rows = (line.split() for line in table.splitlines()[1:])
        return next((int(row[2], 16) for row in rows if row[:1] == [address]), None)
    except (OSError, ValueError, IndexError):  # none, or not a table of neighbours
        return None


def sockaddr(address: str, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
    """Address of a socket: of the zone in `fe80::1%3`, Python takes what is given apart only."""
    bare, _, zone = address.partition("%")
    return (bare, port, 0, int(zone)) if zone.isdecimal() else (address, port)


def hold_to(sock: socket.socket, origin: Origin) -> None:
    """Bind a socket to an own address, and to its interface if one is named: packets then use no
    other one. Before Linux 5.7 only root may do that; else the routing table decides.

    Raises:
        OSError: the address or the interface does not exist.
    """
    if origin.interface:
        with contextlib.suppress(PermissionError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, origin.interface.encode())
    sock.bind(sockaddr(origin.address, origin.port))
