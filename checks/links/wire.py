"""One connection between two hosts that take turns: access, frames, and deadlines."""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import struct
import time
from typing import Any

from nccl_doctor.toolkit.net.dial import dial
from nccl_doctor.toolkit.net.tcp_info import TcpInfo, tcp_info
from nccl_doctor.toolkit.peers.echo import MAGIC, TOKEN_BYTES, ListeningAddress

STALL_S = 3.0
"""No progress for this long is a stall: time for four retransmissions (0.2, 0.4, 0.8, 1.6 s)."""
_MOST_CALLERS = 256
"""Callers that have not yet said who they are; of more, the oldest ones have to go."""
LARGEST = 1 << 20
"""Bytes of payload in the largest frame."""
HEADER = struct.Struct("!cI")
"""Kind of frame, and bytes of payload."""

_HELLO = struct.Struct(f"!{len(MAGIC)}s{TOKEN_BYTES}sI")
_REPLY = b"R"


class Stalled(Exception):
    """Raised if nothing moves for too long, the connection breaks, or data makes no sense."""


class Wire:
    """A connected socket with a deadline for all operations."""

    def __init__(self, sock: socket.socket, limit_s: float) -> None:
        """Take over the socket; nothing lasts longer than `limit_s` seconds from now."""
        self._sock = sock
        self._end = time.monotonic() + limit_s
        self._sink = bytearray(LARGEST)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, what: bytes, payload: bytes | memoryview = b"") -> None:
        """Send one frame, header and payload in one call, so that a small one is one segment.

        Raises:
            Stalled: as all methods here.
        """
        header = HEADER.pack(what, len(payload))
        try:
            self._sock.settimeout(self._patience())
            done = self._sock.sendmsg([header, payload])
            if done < len(header):
                self._sock.sendall(header[done:])
            self._sock.sendall(memoryview(payload)[max(0, done - len(header)) :])
        except OSError as error:
            raise Stalled(str(error)) from error

    def reply(self, value: Any) -> None:
        """Answer a request with plain data."""
        self.send(_REPLY, json.dumps(value).encode())

    def ask(self, what: bytes, payload: bytes | memoryview = b"") -> Any:
        """Send one frame and wait for the reply to it."""
        self.send(what, payload)
        kind, size = self.next()
        answer = self.take(size)
        if kind != _REPLY:
            raise Stalled(f"a frame {kind!r} in place of a reply")
        try:
            return json.loads(bytes(answer))
        except ValueError as error:
            raise Stalled("a reply that is no JSON") from error

    def next(self) -> tuple[bytes, int]:
        """Wait for the header of the next frame."""
        what, size = HEADER.unpack(self.take(HEADER.size))
        return what, size

    def take(self, size: int) -> memoryview:
        """Read so many bytes; they are valid until the next call."""
        if size > len(self._sink):
            raise Stalled(f"a frame of {size} bytes")
        whole = memoryview(self._sink)[:size]
        view = whole
        while len(view):
            try:
                self._sock.settimeout(self._patience())
                count = self._sock.recv_into(view)
            except OSError as error:
                raise Stalled(str(error)) from error
            if not count:
                raise Stalled("the other side closed")
            view = view[count:]
        return whole

    def keep_unsent_below(self, size: int) -> None:
        """Limit the data in this host's send buffer, which a slow link takes seconds to send."""
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)

    def info(self) -> TcpInfo:
        """The kernel's counters of this connection."""
        return tcp_info(self._sock)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _patience(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise Stalled("out of time")
        return min(STALL_S, left)


class Gate:
    """A listener on one address that admits one partner at a time, in the order its host chooses.

    A caller without the posted token gets no answer.
    """

    def __init__(self, address: str) -> None:
        """Listen on a fresh port.

        Raises:
            OSError: the address is not one of this host.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._sock = socket.create_server((address, 0), family=family, backlog=1024)
        tokens = (secrets.token_hex(TOKEN_BYTES // 2) for _ in "12")
        self.door = ListeningAddress(address, self._sock.getsockname()[1], *tokens)
        self._early: dict[int, socket.socket] = {}
        self._unknown: dict[socket.socket, tuple[bytearray, float]] = {}

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc: object) -> None:
        for sock in (self._sock, *self._early.values(), *self._unknown):
            sock.close()

    def admit(self, seat: int, timeout_s: float) -> socket.socket | None:
        """Wait for one partner's call; others that call early are kept for their turn.

        Whoever connects has to say who it is within `STALL_S`, and nobody waits for it meanwhile.
        """
        end = time.monotonic() + timeout_s
        while seat not in self._early and (left := end - time.monotonic()) > 0:
            try:
                self._hear(left)
            except OSError:
                return None
        client_or_none = self._early.pop(seat, None)
        if client_or_none is not None:
            try:
                client_or_none.settimeout(STALL_S)
                client_or_none.sendall(self.door.answer.encode())
            except OSError:
                client_or_none.close()
                return None
        return client_or_none

    def _hear(self, limit_s: float) -> None:
        """Take the next call, or more of what callers say of themselves."""
        now = time.monotonic()
        for client in [client for client, (_, by) in self._unknown.items() if by <= now]:
            self._dismiss(client)
        nearest = min((by for _, by in self._unknown.values()), default=now + limit_s)
        with selectors.PollSelector() as selector:
            for sock in (self._sock, *self._unknown):
                selector.register(sock, selectors.EVENT_READ)
            ready = selector.select(min(limit_s, nearest - now))
        for key, _ in ready:
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj is not self._sock:
                self._listen_to(key.fileobj)
                continue
            client, _ = self._sock.accept()
            client.setblocking(False)
            self._unknown[client] = bytearray(), now + STALL_S
            if len(self._unknown) > _MOST_CALLERS:
                self._dismiss(next(iter(self._unknown)))

    def _listen_to(self, client: socket.socket) -> None:
        """Read more of an introduction; keep the caller if that is all, and right."""
        if client not in self._unknown:
            return
        said, _ = self._unknown[client]
        try:
            part = client.recv(_HELLO.size - len(said))
        except OSError:
            part = b""
        said += part
        if part and len(said) < _HELLO.size:
            return
        caller = self._introduction(bytes(said))
        if caller is None or caller in self._early:
            self._dismiss(client)
        else:
            del self._unknown[client]
            self._early[caller] = client

    def _dismiss(self, client: socket.socket) -> None:
        del self._unknown[client]
        client.close()

    def _introduction(self, said: bytes) -> int | None:
        """The seat of a caller that shows the token."""
        if len(said) != _HELLO.size:
            return None
        magic, token, seat = _HELLO.unpack(said)
        known = secrets.compare_digest(magic + token, MAGIC + self.door.token.encode())
        return int(seat) if known else None


def call(door: ListeningAddress, seat: int, timeout_s: float) -> socket.socket | str:
    """Call a partner's gate, and wait until it admits this host.

    Returns: the socket, or the reason as text.
    """
    dialled, sock = dial(door.address, door.port, min(STALL_S, timeout_s))
    if sock is None:
        return dialled.detail or dialled.outcome
    try:
        sock.settimeout(timeout_s)
        sock.sendall(_HELLO.pack(MAGIC, door.token.encode(), seat))
        answer = sock.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        if answer == door.answer.encode():
            return sock
        problem = "another service answered" if answer else "the partner closed the connection"
    except OSError:
        problem = f"the partner had no time within {timeout_s:g} s"
    sock.close()
    return problem
