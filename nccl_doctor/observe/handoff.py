"""Sockets that one round of a check leaves open for a later one.

The child of a round ends with it. What it puts here waits as a message in the kernel, between two
sockets of the participant, which never reads it: nothing has to run, and all ends with the process.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_MOST_SOCKETS = 253
"""SCM_MAX_FD: the kernel passes no more in one message."""
_MOST_BYTES = 1 << 17


class SocketPairHandoff:
    """See `api.SocketHandoff`; made by the participant, used by the children of one check."""

    def __init__(self) -> None:
        """Open it.

        Raises:
            OSError: no more files can be opened.
        """
        self._in, self._out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @property
    def files(self) -> tuple[int, int]:
        """Descriptors that a child needs for it."""
        return self._in.fileno(), self._out.fileno()

    def put(self, value: Any, sockets: Sequence[socket.socket]) -> None:
        """See `api.SocketHandoff`."""
        self._in.setblocking(False)
        socket.send_fds(self._in, [json.dumps(value).encode()], [each.fileno() for each in sockets])

    def take(self) -> tuple[Any, list[socket.socket]] | None:
        """See `api.SocketHandoff`."""
        self._out.setblocking(False)
        try:
            data, files, flags, _ = socket.recv_fds(
                self._out, _MOST_BYTES, _MOST_SOCKETS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        if flags & socket.MSG_CTRUNC:
            for each in files:
                os.close(each)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return json.loads(data), [socket.socket(fileno=each) for each in files]
