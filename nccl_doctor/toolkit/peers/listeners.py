"""Echo listeners on the addresses of a host: the other side of the calls of `echo`."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from nccl_doctor.toolkit.net.dial import Origin, hold_to
from nccl_doctor.toolkit.net.tcp_info import tcp_info
from nccl_doctor.toolkit.peers.calm import GROUP_BYTES, MARK, REPLY
from nccl_doctor.toolkit.peers.echo import (
    ACK_BYTES,
    LARGE_BYTES,
    LARGE_MARK,
    LARGE_S,
    MAGIC,
    SEGMENT,
    SEGMENT_MARK,
    SEGMENT_REPLY,
    SMALL_BYTES,
    STALL_S,
    TOKEN_BYTES,
    ListeningAddress,
    address_words,
    wait_until,
)
from nccl_doctor.toolkit.peers.visitors import LATE_S, Stranger, Visitors

_PATIENCE_S = 3 * STALL_S
"""The listener waits longer than the caller, so that the caller reports what stalled."""
_SERVED_S = _PATIENCE_S + LARGE_S + STALL_S
"""The longest that a caller is served, however it keeps the connection alive."""
_MAX_SERVED = 256
_LAST_S = 1.0
"""To the end of a listener, those that it serves have as long: they noted late what they noted."""


class Listeners:
    """Echo listeners on some addresses of this host, served by threads until closed."""

    def __init__(self, addresses: Sequence[str | Origin]) -> None:
        """Listen on a new ephemeral port of each address; `failed` holds what cannot be bound.

        For an `Origin`, listen on its own interface only, and on its port if it has one.
        """
        self.doors: list[ListeningAddress] = []
        self.failed: dict[str, str] = {}
        woken, self._waker = socket.socketpair()
        self._slots = threading.BoundedSemaphore(_MAX_SERVED)
        self._served: set[threading.Thread] = set()
        self._visitors = Visitors()
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
            door = ListeningAddress(
                origin.address, port, *(secrets.token_hex(TOKEN_BYTES // 2) for _ in "12")
            )
            self.doors.append(door)
            self._selector.register(sock, selectors.EVENT_READ, door)
        self._selector.register(woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._accept, args=(woken,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Listeners:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def strangers(self) -> list[Stranger]:
        """Callers so far that do not belong to the run, from `Visitors.strangers`."""
        return self._visitors.strangers()

    def late(self) -> dict[str, float]:
        """Callers so far that this host has served late, from `Visitors.late`."""
        return self._visitors.late()

    def close(self) -> None:
        """Serve those who have called already, stop listening and free the ports."""
        self._waker.close()  # which wakes the thread
        self._thread.join(timeout=5)
        end = time.monotonic() + _LAST_S
        for each in list(self._served):
            each.join(max(0.0, end - time.monotonic()))

    def _accept(self, woken: socket.socket) -> None:
        """Serve, until the other end of `woken` is closed."""
        doors = [key for key in self._selector.get_map().values() if key.fileobj is not woken]
        try:
            while True:
                ready = self._selector.select()
                if any(key.fileobj is woken for key, _ in ready):
                    break
                for key, _ in ready:
                    self._let_in(key)
            end = time.monotonic() + _LAST_S
            for key in doors:
                while time.monotonic() < end and self._let_in(key):
                    pass
        finally:
            self._selector.close()
            for key in doors:
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()

    def _let_in(self, key: selectors.SelectorKey) -> bool:
        """Begin to serve the next caller of a listener, if there is one."""
        assert isinstance(key.fileobj, socket.socket)
        # A caller without a slot waits in the backlog.
        if not self._slots.acquire(timeout=0.1):
            return False
        try:
            client, (source, *_) = key.fileobj.accept()
        except BlockingIOError:
            self._slots.release()
            return False
        except OSError:  # gone again, or no descriptor left
            self._slots.release()
            time.sleep(0.01)
            return True
        self._start(client, key.data, str(source))
        return True

    def _start(self, client: socket.socket, door: ListeningAddress, source: str) -> None:
        thread = threading.Thread(target=self._serve, args=(client, door, source), daemon=True)
        self._served.add(thread)
        try:
            thread.start()
        except RuntimeError:  # no more threads: this caller will call again
            self._served.discard(thread)
            self._slots.release()
            client.close()

    def _serve(self, client: socket.socket, door: ListeningAddress, source: str) -> None:
        caller, source = _Caller(client), source.partition("%")[0]
        right = False
        try:
            with client:
                shown = caller.shown()
                right = secrets.compare_digest(shown, MAGIC + door.token.encode())
                self._visitors.note(source, door.port, shown, known=right)
                if right:
                    caller.answer(door, source)
        except OSError:
            pass  # the caller reports the result of its call
        finally:
            if right:
                self._visitors.note_delay(source, caller.waited_s)
            self._slots.release()
            self._served.discard(threading.current_thread())


def _listen(at: Origin) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in at.address else socket.AF_INET)
    try:
        if at.port:  # as services do: what is left of an earlier connection is no hindrance
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hold_to(sock, at)
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    return sock


class _Caller:
    """A connection that is served; `waited_s`: the longest that what came on it lay without an
    answer, in seconds.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.waited_s = 0.0
        self._sock = sock
        self._started = time.monotonic()
        self._looked = 0.0

    def shown(self) -> bytes:
        """First bytes: as many as a token needs, or fewer if no more come, or no mark of the
        doctor.
        """
        data = b""
        size, end = len(MAGIC) + TOKEN_BYTES, self._started + _PATIENCE_S
        while len(data) < size and data[: len(MAGIC)] == MAGIC[: len(data)]:
            try:
                part = self._read(size - len(data), end)
            except OSError:
                break
            if not part:
                break
            data += part
        return data

    def answer(self, door: ListeningAddress, source: str) -> None:
        """The rest of the conversation.

        Raises:
            OSError: the caller said nothing for too long, or is gone.
        """
        sock, end = self._sock, self._started + _SERVED_S
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reply(door.answer.encode() + address_words(source))
        small = self._take(SMALL_BYTES, end)
        if len(small) < SMALL_BYTES:
            return
        self._reply(small)
        while (mark := self._take(1, end)) == MARK:
            if len(self._take(GROUP_BYTES - 1, end)) < GROUP_BYTES - 1:
                return
            self._reply(REPLY)
        while mark == SEGMENT_MARK:
            head = mark + self._take(SEGMENT.size - 1, end)
            size = SEGMENT.unpack(head)[1] if len(head) == SEGMENT.size else 0
            packet = self._take(size, end)
            if not packet or len(packet) < size:
                return
            self._reply(SEGMENT_REPLY)
            self._reply(packet)
            mark = self._take(1, end)
        if mark != LARGE_MARK:
            return
        content = bytearray()
        while len(content) < LARGE_BYTES:
            before = len(content) // ACK_BYTES
            part = self._read(min(1 << 16, LARGE_BYTES - len(content)), end)
            if not part:
                return
            content += part
            self._reply(b"." * (len(content) // ACK_BYTES - before))
        sock.sendall(content)  # which may wait for the road, too

    def _take(self, size: int, end: float) -> bytes:
        """Exactly `size` bytes, or fewer if the caller closed."""
        data = bytearray()
        while len(data) < size and (part := self._read(size - len(data), end)):
            data += part
        return bytes(data)

    def _read(self, most: int, end: float) -> bytes:
        wait_until(self._sock, end, _PATIENCE_S)
        part = self._sock.recv(most)
        if part:
            self._look()
        return part

    def _reply(self, few: bytes) -> None:
        self._sock.sendall(few)
        self._look()

    def _look(self) -> None:
        """Note how long ago something came: without a CPU, a thread reads or answers it late."""
        now = time.monotonic()
        # Not longer than since the last look; but the first bytes may have come before the
        # connection was accepted.
        if now - self._looked >= LATE_S:
            self.waited_s = max(self.waited_s, tcp_info(self._sock).received_ms / 1000)
        self._looked = now
