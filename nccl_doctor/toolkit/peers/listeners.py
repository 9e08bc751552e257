"""Echo listeners on the addresses of a host: the other side of the calls of `echo`."""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from nccl_doctor.toolkit.net.dial import Origin, hold_to
from nccl_doctor.toolkit.peers.calm import GROUP_BYTES, MARK, REPLY
from nccl_doctor.toolkit.peers.echo import (
    ACK_BYTES,
    LARGE_BYTES,
    LARGE_MARK,
    LARGE_S,
    MAGIC,
    SMALL_BYTES,
    STALL_S,
    TOKEN_BYTES,
    Door,
    address_words,
    receive,
    wait_until,
)
from nccl_doctor.toolkit.peers.visitors import Stranger, Visitors

_PATIENCE_S = 3 * STALL_S
"""The listener waits longer than the caller, so that the caller reports what stalled."""
_SERVED_S = _PATIENCE_S + LARGE_S + STALL_S
"""The longest that a caller is served, however it keeps the connection alive."""
_MAX_SERVED = 256


class Listeners:
    """Echo listeners on some addresses of this host, served by threads until closed."""

    def __init__(self, addresses: Sequence[str | Origin]) -> None:
        """Listen on a new ephemeral port of each address; `failed` holds what cannot be bound.

        For an `Origin`, listen on its own interface only, and on its port if it has one.
        """
        self.doors: list[Door] = []
        self.failed: dict[str, str] = {}
        woken, self._waker = socket.socketpair()
        self._slots = threading.BoundedSemaphore(_MAX_SERVED)
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
            door = Door(origin.address, port, *(secrets.token_hex(TOKEN_BYTES // 2) for _ in "12"))
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

    def close(self) -> None:
        """Stop listening and free the ports."""
        self._waker.close()  # which wakes the thread
        self._thread.join(timeout=5)

    def _accept(self, woken: socket.socket) -> None:
        """Serve, until the other end of `woken` is closed."""
        listening = [key.fileobj for key in self._selector.get_map().values()]
        try:
            while True:
                ready = self._selector.select()
                if any(key.fileobj is woken for key, _ in ready):
                    break
                for key, _ in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    # A caller without a slot waits in the backlog.
                    if not self._slots.acquire(timeout=0.1):
                        break
                    try:
                        client, (source, *_) = key.fileobj.accept()
                    except OSError:  # gone again, or no descriptor left
                        self._slots.release()
                        time.sleep(0.01)
                        continue
                    self._start(client, key.data, str(source))
        finally:
            self._selector.close()
            for sock in listening:
                assert isinstance(sock, socket.socket)
                sock.close()

    def _start(self, client: socket.socket, door: Door, source: str) -> None:
        thread = threading.Thread(target=self._serve, args=(client, door, source), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: this caller will call again
            self._slots.release()
            client.close()

    def _serve(self, client: socket.socket, door: Door, source: str) -> None:
        started = time.monotonic()
        try:
            with client:
                shown = _shown(client, started + _PATIENCE_S)
                right = secrets.compare_digest(shown, MAGIC + door.token.encode())
                self._visitors.note(source.partition("%")[0], door.port, shown, known=right)
                if right:
                    _answer(client, door, source, started)
        except OSError:
            pass  # the caller reports the result of its call
        finally:
            self._slots.release()


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


def _shown(client: socket.socket, end: float) -> bytes:
    """First bytes of a caller: as many as a token needs, or fewer if it sends no more, or no mark
    of the doctor.
    """
    data = b""
    size = len(MAGIC) + TOKEN_BYTES
    while len(data) < size and data[: len(MAGIC)] == MAGIC[: len(data)]:
        try:
            wait_until(client, end, _PATIENCE_S)
            part = client.recv(size - len(data))
        except OSError:
            break
        if not part:
            break
        data += part
    return data


def _answer(client: socket.socket, door: Door, source: str, started: float) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def take(size: int, end: float) -> bytes:
        return receive(client, size, end, _PATIENCE_S)

    end = started + _SERVED_S
    client.sendall(door.answer.encode() + address_words(source))
    client.sendall(take(SMALL_BYTES, end))
    while (mark := take(1, end)) == MARK:
        if len(take(GROUP_BYTES - 1, end)) < GROUP_BYTES - 1:
            return
        client.sendall(REPLY)
    if mark != LARGE_MARK:
        return
    content = bytearray()
    while len(content) < LARGE_BYTES:
        before = len(content) // ACK_BYTES
        wait_until(client, end, _PATIENCE_S)
        part = client.recv(min(1 << 16, LARGE_BYTES - len(content)))
        if not part:
            return
        content += part
        client.sendall(b"." * (len(content) // ACK_BYTES - before))
    client.sendall(content)
