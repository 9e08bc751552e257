"""One TCP echo between hosts: listeners on the addresses under test, and the caller.

A listener binds one address, port 0, and does not answer a caller without the token it posted. Then
it proves its identity with a second token, so that a proxy that accepts everything, or another host
with the same address, is not mistaken for it. A connection is

    caller: MAGIC, token         listener: its own token
    caller: 64 bytes             listener: the same 64 bytes
    caller: 1 MiB                listener: one byte for each 16 KiB that arrived
                                 listener: the same 1 MiB
"""

from __future__ import annotations

import functools
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from nccl_doctor.toolkit.net.dial import Origin, dial, hold_to
from nccl_doctor.toolkit.net.interfaces import is_link_local

MAGIC = b"ncdr-ec1"
TOKEN_BYTES = 32
SMALL_BYTES = 64
LARGE_BYTES = 1 << 20
ACK_BYTES = 1 << 14
DIAL_S = 1.3
"""Each of two dials sends its SYN at 0 and 1 s (the kernel's next one is due at 3 s): four packets,
each answered within a round trip, and no longer wait than needed."""
STALL_S = 3.0
"""No progress for this long is a stall: time for four retransmissions (0.2, 0.4, 0.8, 1.6 s)."""
LARGE_S = 8.0
"""A large echo that still moves after this long counts as slow, not as failed."""
_PATIENCE_S = 3 * STALL_S
"""The listener waits longer than the caller, so that the caller reports what stalled."""
_SERVED_S = _PATIENCE_S + LARGE_S + STALL_S
"""The longest that a caller is served, however it keeps the connection alive."""
_MAX_SERVED = 256
MAX_CALLS = 128
"""Calls at the same time; with what is served at once, well under a limit of 1024 open files."""
_PAUSE_S = 0.3
_ACKS = LARGE_BYTES // ACK_BYTES


def scoped(address: str, interface: str) -> str:
    """A link-local IPv6 address with its zone as a number, as in a sockaddr."""
    if ":" in address and is_link_local(address):
        return f"{address}%{socket.if_nametoindex(interface)}"
    return address


@dataclass(frozen=True)
class Door:
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
    `mtu` (the small echo came back, but the large one stopped).
    `stalled` is `upload` (caller to listener) or `download` for `mtu`. `uploaded` and
    `downloaded` are bytes of the large echo that certainly arrived.
    """

    outcome: str
    detail: str
    duration_s: float
    stalled: str = ""
    uploaded: int = 0
    downloaded: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data; less for a call that worked."""
        full = {**asdict(self), "duration_s": round(self.duration_s, 4)}
        if self.outcome == "ok" and not self.detail:
            return {key: full[key] for key in ("outcome", "duration_s")}
        return full


class Listeners:
    """Echo listeners on some addresses of this host, served by threads until closed."""

    def __init__(self, addresses: Sequence[str | Origin]) -> None:
        """Listen on a new ephemeral port of each address; `failed` holds what cannot be bound.

        For an `Origin`, listen on its own interface only.
        """
        self.doors: list[Door] = []
        self.failed: dict[str, str] = {}
        self._closing = threading.Event()
        self._slots = threading.BoundedSemaphore(_MAX_SERVED)
        self._selector = selectors.DefaultSelector()
        for each in addresses:
            origin = each if isinstance(each, Origin) else Origin(each)
            try:
                sock = _listen(origin)
            except OSError as error:
                self.failed[origin.address] = error.strerror or str(error)
                continue
            sock.setblocking(False)
            port = sock.getsockname()[1]
            door = Door(origin.address, port, *(secrets.token_hex(TOKEN_BYTES // 2) for _ in "12"))
            self.doors.append(door)
            self._selector.register(sock, selectors.EVENT_READ, door)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Listeners:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and free the ports."""
        self._closing.set()
        self._thread.join(timeout=5)

    def _accept(self) -> None:
        listening = [key.fileobj for key in self._selector.get_map().values()]
        try:
            while not self._closing.is_set():
                for key, _ in self._selector.select(0.1):
                    assert isinstance(key.fileobj, socket.socket)
                    # A caller without a slot waits in the backlog.
                    if not self._slots.acquire(timeout=0.1):
                        break
                    try:
                        client, _ = key.fileobj.accept()
                    except OSError:  # gone again, or no descriptor left
                        self._slots.release()
                        time.sleep(0.01)
                        continue
                    self._start(client, key.data)
        finally:
            self._selector.close()
            for sock in listening:
                assert isinstance(sock, socket.socket)
                sock.close()

    def _start(self, client: socket.socket, door: Door) -> None:
        thread = threading.Thread(target=self._serve, args=(client, door), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: this caller will call again
            self._slots.release()
            client.close()

    def _serve(self, client: socket.socket, door: Door) -> None:
        try:
            with client:
                _answer(client, door)
        except OSError:
            pass  # the caller reports the result of its call
        finally:
            self._slots.release()


def _listen(at: Origin) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in at.address else socket.AF_INET)
    try:
        hold_to(sock, at)
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    return sock


def _answer(client: socket.socket, door: Door) -> None:
    started = time.monotonic()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    shown = _receive(client, len(MAGIC) + TOKEN_BYTES, started + _PATIENCE_S)
    if not secrets.compare_digest(shown, MAGIC + door.token.encode()):
        return
    end = started + _SERVED_S
    client.sendall(door.answer.encode())
    client.sendall(_receive(client, SMALL_BYTES, end))
    content = bytearray()
    while len(content) < LARGE_BYTES:
        before = len(content) // ACK_BYTES
        _wait_until(client, end)
        part = client.recv(min(1 << 16, LARGE_BYTES - len(content)))
        if not part:
            return
        content += part
        client.sendall(b"." * (len(content) // ACK_BYTES - before))
    client.sendall(content)


def _wait_until(sock: socket.socket, end: float) -> None:
    """Let the next operation wait as long as a peer may be silent, and never beyond `end`.

    Raises:
        TimeoutError: it is over.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("out of time")
    sock.settimeout(min(_PATIENCE_S, left))


def _receive(sock: socket.socket, size: int, end: float) -> bytes:
    """Exactly `size` bytes, or fewer if the other side closed; `end` as for `_wait_until`."""
    data = bytearray()
    while len(data) < size:
        _wait_until(sock, end)
        part = sock.recv(size - len(data))
        if not part:
            break
        data += part
    return bytes(data)


def call(door: Door, dial_s: float = DIAL_S, origin: Origin | None = None) -> Call:
    """Call one listener (`origin` as of `dial`): small echo, then large; never raises OSError."""
    started = time.monotonic()
    try:
        dialled, sock = dial(door.address, door.port, dial_s, origin)
    except OSError as error:  # no socket to be had: no such family, or no descriptor left
        return Call("error", str(error), time.monotonic() - started)
    if sock is None:
        return Call(dialled.outcome, dialled.detail, dialled.duration_s)
    with sock:
        outcome, detail, stalled, up, down = _talk(sock, door)
    return Call(outcome, detail, time.monotonic() - started, stalled, up, down)


def _talk(sock: socket.socket, door: Door) -> tuple[str, str, str, int, int]:
    try:
        sock.settimeout(STALL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(MAGIC + door.token.encode())
        problem = _expect(sock, door.answer.encode(), "proof of identity")
        if not problem:
            small = os.urandom(SMALL_BYTES)
            sock.sendall(small)
            problem = _expect(sock, small, f"echo of {SMALL_BYTES} bytes")
    except OSError as error:
        problem = f"connected, then: {error}"
    if problem:
        return "intercepted", problem, "", 0, 0
    return _LargeEcho(sock).run()


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

    def run(self) -> tuple[str, str, str, int, int]:
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

    def result(
        self, outcome: str, detail: str, stalled: str = ""
    ) -> tuple[str, str, str, int, int]:
        return outcome, detail, stalled, self.acks * ACK_BYTES, self.downloaded


def call_all(
    doors: Sequence[Door], budget_s: float, origins: Sequence[Origin | None] = ()
) -> list[list[Call]]:
    """Call listeners at the same time, each a second time if the first call failed.

    Args:
        doors: the listeners, in this order if they are too many to be called at once.
        budget_s: no call begins later than this.
        origins: of each call, as for `dial`; empty for none.

    Returns: the attempts for each door, the last one being the result; if only a failed first
    attempt, or none, was made in time, the door counts as not tested.
    """
    end = time.monotonic() + budget_s

    def attempts(door: Door, origin: Origin | None) -> list[Call]:
        made: list[Call] = []
        while len(made) < 2 and time.monotonic() < end and not (made and made[-1].outcome == "ok"):
            if made:
                time.sleep(_PAUSE_S)
            made.append(call(door, origin=origin))
        return made

    if not doors:
        return []
    with ThreadPoolExecutor(min(MAX_CALLS, len(doors))) as pool:
        return list(pool.map(attempts, doors, origins or [None] * len(doors)))
