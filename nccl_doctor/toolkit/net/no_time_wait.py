"""Connections that free their port at once.

Whoever closes a TCP connection first keeps its port for a minute (TIME_WAIT). An examination makes
so many that on a host with few ports none would be left for the job, or for the examination itself.
So connections on which everything was said and heard are reset.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

_AT_ONCE = struct.pack("ii", 1, 0)
_FILES = "/proc/self/fd"


def no_time_wait(sock: socket.socket) -> None:
    """Let the close of this socket reset its connection: what was not heard yet is lost.

    Raises:
        OSError: it is no TCP socket, or was closed.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


@contextlib.contextmanager
def calls_without_time_wait(port: int) -> Iterator[None]:
    """The same for all connections that this process makes to this port meanwhile, in whatever
    library.
    """
    before = _files()
    yield
    for number in _files() - before:
        with contextlib.suppress(OSError):  # closed again, or no socket
            mine = os.dup(number)
            try:
                sock = socket.socket(fileno=mine)
            except OSError:
                os.close(mine)
                continue
            with sock:
                if sock.family != socket.AF_UNIX and sock.getpeername()[1] == port:
                    no_time_wait(sock)


def _files() -> set[int]:
    """Numbers of the open files, without that of the folder while it is read."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(_FILES):
            with contextlib.suppress(OSError):
                os.fstat(int(name))
                found.add(int(name))
    return found
