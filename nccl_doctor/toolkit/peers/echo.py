"""One TCP echo between hosts: listeners on the addresses under test, and the caller.

A listener (see `listeners`) binds one address, port 0, and does not answer a caller without the
token it posted. Then it proves its identity with a second token, so that a proxy that accepts
everything, or another host with the same address, is not mistaken for it. A connection is

    caller: MAGIC, token         listener: its own token, and the caller's address as it sees it
    caller: 64 bytes             listener: the same 64 bytes
    caller: a group of segments  listener: one byte; again and again, see `calm`
    caller: "S", size, content   listener: one byte, then the same content; one packet each way, a
                                 few times
    caller: "L", 1 MiB           listener: one byte for each 16 KiB that arrived
                                 listener: the same 1 MiB
"""

from __future__ import annotations

import functools
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nccl_doctor.toolkit.net.dial import Origin, dial_twice
from nccl_doctor.toolkit.net.interfaces import is_link_local
from nccl_doctor.toolkit.net.no_time_wait import no_time_wait
from nccl_doctor.toolkit.peers.burst import connect_many
from nccl_doctor.toolkit.peers.calm import Calm, exchange

MAGIC = b"ncdr-ec4"
TOKEN_BYTES = 32
ADDRESS_BYTES = 46
"""Bytes of an address as text, filled up with zeros: INET6_ADDRSTRLEN."""
SMALL_BYTES = 64
LARGE_BYTES = 1 << 20
ACK_BYTES = 1 << 14
DIAL_S = 1.1
"""Each of two dials sends its SYN at 0 and 1 s (the kernel's next one is due at 3 s): four packets,
each answered within a round trip, and no longer wait than needed: the last has a tenth of a second.
"""
PAUSE_S = 0.3
"""The second dial begins so long after the first one, if that has no answer yet."""
STALL_S = 3.0
"""No progress for this long is a stall: time for four retransmissions (0.2, 0.4, 0.8, 1.6 s)."""
LARGE_S = 8.0
"""A large echo that still moves after this long counts as slow, not as failed."""
MAX_CALLS = 128
"""Calls at the same time; with what `listeners` serves at once, well under a limit of 1024 open
files."""
LARGE_MARK = b"L"
SEGMENT = struct.Struct("!cH")
"""Mark of the one packet, and the bytes of its content, which follow."""
SEGMENT_MARK, SEGMENT_REPLY = b"S", b"."
LARGEST_PACKET = 16384
"""Bytes of data in the largest packet that is tried: networks have an MTU of 9216 at most, and the
loopback interface one of 65536.
"""
_MOST_GROUPS, _LEAST_GROUPS = 800, 6
"""Groups of small segments in all calls of one host together, which cost it a fifth of a
millisecond each; and in one call, however many there are."""
_PACKETS = 3
"""Full packets of a call, one after the other: one may be sent again in another form, and pass."""
_LOST = 2
"""So many lost small segments show that the road loses packets of every size."""
_CRAWLS = 0.05
"""With this part of the segments sent again, as they or their answers were lost, 1 MiB takes
seconds."""
_ACKS = LARGE_BYTES // ACK_BYTES
AWAITED = 1.6
"""A call takes 16 s at the very worst: that is not to cost the others their place in the report."""


def scoped(address: str, interface: str) -> str:
    """A link-local IPv6 address with its zone as a number, as in a sockaddr."""
    if ":" in address and is_link_local(address):
        return f"{address}%{socket.if_nametoindex(interface)}"
    return address


@dataclass(frozen=True)
class ListeningAddress:
    """A listening address, with what a caller needs. The tokens must never be in facts."""

    address: str
    port: int
    token: str
    answer: str

    def to_json(self) -> dict[str, Any]:
        """Plain data, to be posted to the peers."""
        return asdict(self)


@dataclass(frozen=True)
class Call:
    """The result of one call.

    `outcome` is that of `dial.Dial` if there was no connection, else
    `ok`; `intercepted` (connected, but a wrong answer or none: not our listener);
    `mtu` (the small echo came back, but a full packet or the large echo stopped).
    `stalled` is `upload` (caller to listener) or `download` for `mtu`. `uploaded` and
    `downloaded` are bytes of the large echo that certainly arrived. `segments` and `lost` are those
    of `calm.Tally`, from the caller to the listener; a road that loses small segments is measured,
    so the call is `ok`, if it has connected, whatever became of the large echo. Of `wanted` more
    connections `stood` came about. `seen`: the address from which the listener saw the call come,
    if that is not the own one of the socket: an address translation is between.
    """

    outcome: str
    detail: str
    duration_s: float
    stalled: str = ""
    uploaded: int = 0
    downloaded: int = 0
    segments: int = 0
    lost: int = 0
    wanted: int = 0
    stood: int = 0
    seen: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data; less for a call that worked."""
        full = {**asdict(self), "duration_s": round(self.duration_s, 4)}
        if self.outcome == "ok" and not self.detail:
            keys = ("outcome", "duration_s", *(("segments", "lost") if self.lost else ()))
            keys += ("wanted", "stood") if self.stood < self.wanted else ()
            keys += ("seen",) if self.seen else ()
            return {key: full[key] for key in keys}
        return full


@dataclass(frozen=True)
class Talk:
    """Things to do in a call: so many small segments, the large echo or not, and `burst` more
    connections at once, twice if not all of them come about.
    """

    calm: Calm = field(default_factory=Calm)
    large: bool = True
    burst: int = 0


def call(door: ListeningAddress, origin: Origin | None = None, talk: Talk = Talk()) -> Call:
    """Call one listener (`origin` as of `dial`); never raises OSError."""
    return _tried(door, origin, talk)[-1]


def _tried(door: ListeningAddress, origin: Origin | None, talk: Talk) -> list[Call]:
    """The result of a call, last; before it that of a dial for which a second one was made."""
    started = time.monotonic()
    try:
        dials, sock = dial_twice(door.address, door.port, DIAL_S, PAUSE_S, origin)
    except OSError as error:  # no socket to be had: no such family, or no descriptor left
        return [Call("error", str(error), time.monotonic() - started)]
    made = [Call(d.outcome, d.detail, d.duration_s) for d in dials if d.outcome != "connected"]
    if sock is None:
        return made
    with sock:
        result = hold(sock, door, talk)
        no_time_wait(sock)
    # Where a segment is lost, so would a new connection be: none of them for want of a limit.
    is_good = result.outcome == "ok" and not result.detail and result.lost < _LOST
    if talk.burst and is_good and origin is None:
        stood = _burst(door, talk.burst)
        if stood < talk.burst:
            time.sleep(PAUSE_S)
            stood = max(stood, _burst(door, talk.burst))
        result = replace(result, wanted=talk.burst, stood=stood)
    return [*made, replace(result, duration_s=time.monotonic() - started)]


def _burst(door: ListeningAddress, count: int) -> int:
    try:
        return connect_many(door.address, door.port, count)
    except OSError:  # no descriptor left here: that says nothing of the road
        return count


def hold(sock: socket.socket, door: ListeningAddress, talk: Talk) -> Call:
    """The result of what was said on a new connection."""
    try:
        sock.settimeout(STALL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(MAGIC + door.token.encode())
        problem = _expect(sock, door.answer.encode(), "proof of identity")
        seen = ""
        if not problem:
            seen = _translated(sock)
            small = os.urandom(SMALL_BYTES)
            sock.sendall(small)
            problem = _expect(sock, small, f"echo of {SMALL_BYTES} bytes")
        if problem:
            return Call("intercepted", problem, 0.0)
        lost = exchange(sock, talk.calm)
        if lost.stopped and lost.lost < _LOST:
            return Call("intercepted", f"connected, then silent for {STALL_S:g} s", 0.0)
    except OSError as error:
        return Call("intercepted", f"connected, then: {error}", 0.0)
    lossy = lost.lost >= _LOST
    if lost.stopped:
        result = Call("ok", f"stopped for {STALL_S:g} s", 0.0)
    elif lost.again >= max(_LOST, _CRAWLS * lost.segments):
        result = Call("ok", "no large echo: it would take too long", 0.0)
    elif stopped := next(filter(None, (_full_packet(sock) for _ in range(_PACKETS))), None):
        result = stopped
    else:
        result = _LargeEcho(sock).run() if talk.large else Call("ok", "", 0.0)
    if result.outcome == "mtu" and lossy:
        result = replace(result, outcome="ok")
    return replace(result, segments=lost.segments, lost=lost.lost, seen=seen)


def _full_packet(sock: socket.socket) -> Call | None:
    """Call that ended at one packet of the largest size, there or back; None where it passed.

    A stream leaves in pieces of up to 64 KiB, which the card cuts, or nobody where both ends are on
    one machine: these pass whatever the path carries. What fits into one packet leaves as it is.
    """
    size = min(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG), LARGEST_PACKET)
    content = _content()[: size - SEGMENT.size]
    words = f"one packet of {size} bytes of data stopped for {STALL_S:g} s"
    way = "upload"
    try:
        sock.sendall(SEGMENT.pack(SEGMENT_MARK, len(content)) + content)
        if _receive(sock, len(SEGMENT_REPLY), time.monotonic() + STALL_S) == SEGMENT_REPLY:
            way = "download"
            echoed = _receive(sock, len(content), time.monotonic() + STALL_S)
            if echoed == content:
                return None
            if len(echoed) == len(content):
                return Call("intercepted", "connected, but a full packet came back corrupted", 0.0)
    except TimeoutError:
        return Call("mtu", words, 0.0, way)
    except OSError as error:
        return Call("intercepted", f"cut off at a full packet ({error})", 0.0)
    return Call("intercepted", "cut off at a full packet", 0.0)


def address_words(address: str) -> bytes:
    """An address as the listener tells it to its caller."""
    return address.partition("%")[0].encode().ljust(ADDRESS_BYTES, b"\0")


def _translated(sock: socket.socket) -> str:
    """The own address as the listener says it, if it is another one; else empty."""
    told = _receive(sock, ADDRESS_BYTES, time.monotonic() + STALL_S)
    own = str(sock.getsockname()[0])
    return "" if told == address_words(own) else told.rstrip(b"\0").decode("ascii", "replace")


def wait_until(sock: socket.socket, end: float, silent_s: float = STALL_S) -> None:
    """Let the next operation wait for `silent_s` seconds, and never beyond `end`.

    Raises:
        TimeoutError: it is over.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("out of time")
    sock.settimeout(min(silent_s, left))


def _receive(sock: socket.socket, size: int, end: float) -> bytes:
    """Exactly `size` bytes, or fewer if the other side closed; the rest as for `wait_until`."""
    data = bytearray()
    while len(data) < size:
        wait_until(sock, end)
        part = sock.recv(size - len(data))
        if not part:
            break
        data += part
    return bytes(data)


def _expect(sock: socket.socket, wanted: bytes, what: str) -> str:
    """The error of an answer, or the empty string."""
    try:
        got = _receive(sock, len(wanted), time.monotonic() + STALL_S)
    except TimeoutError:
        return f"connected, but no {what} within {STALL_S:g} s"
    if not got:
        return f"connected, but closed without {what}"
    return "" if got == wanted else f"connected, but a wrong {what}"


@functools.cache
def _random_content() -> bytes:
    return os.urandom(LARGE_BYTES)


_making = threading.Lock()
"""Needed as the cache does not block callers while the content is made: each would make its own."""


def _content() -> bytes:
    """The content of large echoes of this process; random, so that no answer can be guessed."""
    with _making:
        return _random_content()


class _LargeEcho:
    """1 MiB there and back over one connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.content = _content()
        self.sent = 0
        self.acks = 0
        self.downloaded = 0

    def run(self) -> Call:
        try:
            self.sock.sendall(LARGE_MARK)
        except OSError as error:
            return self.result("intercepted", f"{self.cut()} ({error})")
        self.sock.setblocking(False)
        end = time.monotonic() + LARGE_S
        with selectors.PollSelector() as selector:  # unlike epoll it takes no descriptor
            selector.register(self.sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while self.downloaded < LARGE_BYTES:
                if time.monotonic() > end:
                    return self.result("ok", f"slow: not done after {LARGE_S:g} s")
                ready = selector.select(STALL_S)
                if not ready:
                    way = "upload" if self.acks < _ACKS else "download"
                    return self.result("mtu", f"{way} stopped for {STALL_S:g} s", way)
                try:
                    if ready[0][1] & selectors.EVENT_WRITE:
                        self.sent += self.sock.send(self.content[self.sent : self.sent + (1 << 18)])
                        if self.sent == LARGE_BYTES:
                            selector.modify(self.sock, selectors.EVENT_READ)
                    if ready[0][1] & selectors.EVENT_READ:
                        problem = self.take(self.sock.recv(1 << 18))
                        if problem:
                            return self.result("intercepted", problem)
                except BlockingIOError:
                    continue
                except OSError as error:
                    return self.result("intercepted", f"{self.cut()} ({error})")
        return self.result("ok", "")

    def take(self, part: bytes) -> str:
        """Count and compare what arrived; return the error, or the empty string."""
        if not part:
            return self.cut()
        acks = min(len(part), _ACKS - self.acks)
        self.acks += acks
        echoed = part[acks:]
        start = self.downloaded
        self.downloaded += len(echoed)
        if part[:acks] != b"." * acks or echoed != self.content[start : self.downloaded]:
            return "connected, but the large echo came back corrupted"
        return ""

    def cut(self) -> str:
        return f"cut off after {self.acks * ACK_BYTES} bytes up, {self.downloaded} bytes down"

    def result(self, outcome: str, detail: str, stalled: str = "") -> Call:
        return Call(outcome, detail, 0.0, stalled, self.acks * ACK_BYTES, self.downloaded)


def call_all(
    doors: Sequence[ListeningAddress],
    budget_s: float,
    origins: Sequence[Origin | None] = (),
    talk: Talk | None = None,
    brief: Sequence[bool] = (),
) -> list[list[Call]]:
    """Call listeners at the same time, each a second time if the first call failed.

    Args:
        doors: the listeners, in this order if they are too many to be called at once.
        budget_s: no call begins later than this; `AWAITED` times as long, calls are waited for.
        origins: of each call, as for `dial`; empty for none.
        talk: what to do; without it the usual. With the usual number of segments, fewer of them to
            each of many listeners.
        brief: of each call, whether to leave the large echo out; empty for none.

    Returns: the attempts for each door, the last one being the result; if only a failed first
    attempt, or none, was made in time, the door counts as not tested.
    """
    end = time.monotonic() + budget_s
    groups = max(_LEAST_GROUPS, min(Calm.groups, _MOST_GROUPS // max(1, len(doors))))
    wanted = talk or Talk()
    usual = replace(wanted, calm=Calm(groups)) if wanted.calm == Calm() else wanted

    def attempts(door: ListeningAddress, origin: Origin | None, is_brief: bool) -> list[Call]:
        one = replace(usual, large=usual.large and not is_brief)
        made: list[Call] = []
        while len(made) < 2 and time.monotonic() < end and not (made and made[-1].outcome == "ok"):
            if made:
                time.sleep(PAUSE_S)
            made += _tried(door, origin, one)
        return made[-2:]

    if not doors:
        return []
    nothing, full = [None] * len(doors), [False] * len(doors)
    pool = ThreadPoolExecutor(min(MAX_CALLS, len(doors)))
    given = zip(doors, origins or nothing, brief or full, strict=True)
    calls = [pool.submit(attempts, *each) for each in given]
    done, _ = wait(calls, end + (AWAITED - 1) * budget_s - time.monotonic())
    pool.shutdown(wait=False, cancel_futures=True)
    return [each.result() if each in done else [] for each in calls]
