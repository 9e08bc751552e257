"""Many connections to one listener at once, as a job makes them: how many of them come about.

A rule that lets a few new connections pass in a second (`limit rate`, `connlimit`, SYN protection)
lets each single test pass.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time

from nccl_doctor.toolkit.net.no_time_wait import no_time_wait

LIMIT_S = 2.0
"""Time for the first packet, and for the one that the kernel sends again after a second."""
_AT_A_TIME = threading.BoundedSemaphore(4)
"""Bursts of this process at once, so that neither its descriptors nor a queue of listening sockets
(128 before Linux 5.4) run out."""


def connect_many(address: str, port: int, count: int, limit_s: float = LIMIT_S) -> int:
    """Number of connections, of `count` begun at once, that stand within `limit_s` seconds.

    Raises:
        OSError: this process gets no more sockets, or this host has no port left for them.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made: list[socket.socket] = []
    with _AT_A_TIME:
        end = time.monotonic() + limit_s
        try:
            for _ in range(count):
                made.append(socket.socket(family, socket.SOCK_STREAM))
            return _standing(made, (address, port), end)
        finally:
            for sock in made:
                no_time_wait(sock)
                sock.close()


def _standing(sockets: list[socket.socket], at: tuple[str, int], end: float) -> int:
    standing = 0
    with selectors.PollSelector() as waiting:  # unlike epoll it takes no descriptor
        for sock in sockets:
            sock.setblocking(False)
            problem = sock.connect_ex(at)
            if problem == errno.EINPROGRESS:
                waiting.register(sock, selectors.EVENT_WRITE)
            elif problem == errno.EADDRNOTAVAIL:
                raise OSError(problem, "no port is left for another connection")
            standing += problem == 0
        is_over = False
        while waiting.get_map() and not is_over:
            left = end - time.monotonic()
            is_over = left <= 0  # one more look: this process may have had to wait for a processor
            for key, _ in waiting.select(max(0.0, left)):
                waiting.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                standing += key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    return standing
