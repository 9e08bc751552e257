"""Connection between a rank and the agent of its host: JSON messages over a Unix socket.

The socket has an abstract name, which no file system holds and which ends with its process. The
kernel says whose process is at the other end: one of another user is not talked to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import struct
import time
from typing import Any

from nccl_doctor.model.launch import OWN, Launch

SEND_S = 1.0
"""Time for the other end to take a message: it is much smaller than what the kernel keeps."""
_LARGEST = 64 << 20
_BACKLOG = 64
_PAUSE_S = 0.05
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")


class AgentLost(ConnectionError):
    """The other end of a connection is gone, or sent what is no message."""


class AgentConnection:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._got = bytearray()
        self._ended = False

    def fileno(self) -> int:
        """Descriptor, for `select`."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close this end."""
        self._sock.close()

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            AgentLost: the other end is gone, or does not read.
        """
        data = json.dumps(message).encode()
        try:
            self._sock.settimeout(SEND_S)
            self._sock.sendall(_LENGTH.pack(len(data)) + data)
            self._sock.setblocking(False)
        except OSError as error:
            raise AgentLost(str(error)) from error

    def received(self) -> list[Any]:
        """Messages that have come since.

        Raises:
            AgentLost: the other end is gone, and all its messages were taken.
        """
        self._read()
        messages = []
        while len(self._got) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._got)
            if length > _LARGEST:
                raise AgentLost(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._got) < end:
                break
            try:
                messages.append(json.loads(self._got[_LENGTH.size : end]))
            except ValueError as error:
                raise AgentLost("a message that is not JSON") from error
            del self._got[:end]
        if self._ended and not messages:
            raise AgentLost("the other end is gone")
        return messages

    def wait(self, patience_s: float) -> None:
        """Wait until something may have come, or for so many seconds."""
        if not self._ended:
            select.select([self._sock], [], [], max(0.0, patience_s))

    def _read(self) -> None:
        while not self._ended:
            try:
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                raise AgentLost(str(error)) from error
            self._ended = not data
            self._got += data


def name_of(launch: Launch) -> str:
    """Abstract name of the socket of a host: the same for all ranks that were started together
    there, and for no others of this network namespace.
    """
    if launch.launcher == OWN:  # all are forked by one process, the first of them without its place
        place: tuple[object, ...] = (os.getppid(),)
    else:
        place = (launch.node_rank, (launch.rank or 0) - (launch.local_rank or 0), launch.run_id)
    started = (launch.master_addr, launch.master_port, launch.restart_count, os.getuid())
    digest = hashlib.sha256(repr((*place, *started)).encode()).hexdigest()
    return f"\0nccl-doctor-{digest[:32]}"


def listener_at(name: str) -> socket.socket | None:
    """Socket that listens at a name; None if another one does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        return None
    sock.setblocking(False)
    return sock


def accept(listener: socket.socket) -> AgentConnection | None:
    """Connection of a process of this user that waits; None if there is none."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    return _of_our_user(sock)


def connect(name: str, patience_s: float) -> AgentConnection | None:
    """Connection to the process that listens at a name, or will within these seconds; else None."""
    until = time.monotonic() + patience_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):
            sock.settimeout(SEND_S)
            sock.connect(name)
            return _of_our_user(sock)
        sock.close()
        if time.monotonic() >= until:
            return None
        time.sleep(_PAUSE_S)


def _of_our_user(sock: socket.socket) -> AgentConnection | None:
    said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(said)
    if user != os.getuid():
        sock.close()
        return None
    return AgentConnection(sock)
