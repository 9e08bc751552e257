"""True if this host has a free port to call from."""

from __future__ import annotations

import contextlib
import errno
import socket


def no_port_left(address: str, port: int) -> bool:
    """True if the kernel finds no local port for a connection to this numeric address.

    A packet is sent only where no port is free to listen on either: whoever counts connections,
    such as a firewall, is to count those of the job alone.
    """
    with contextlib.suppress(OSError):  # also that of a name in place of an address
        kind, numeric = socket.SOCK_STREAM, socket.AI_NUMERICHOST
        family, _, _, _, there = socket.getaddrinfo(address, port, type=kind, flags=numeric)[0]
        with socket.socket(family, kind) as sock:
            sock.setblocking(False)
            try:
                sock.bind(("", 0))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return sock.connect_ex(there) == errno.EADDRNOTAVAIL
    return False
