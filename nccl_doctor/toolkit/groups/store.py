"""A TCPStore of torch at a socket that this program has bound."""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any


def serve_store(listener: socket.socket, address: str, timeout: datetime.timedelta) -> Any:
    """The store, served at a listening socket, which it takes over.

    Before torch 2.8 the server of libuv, which is the default, takes no socket that is open already
    (NotImplementedError with torch 2.4.1 and 2.6.0; pytorch pull request 150215); the older does.

    Args:
        listener: bound, and listening.
        address: of this host, by which the store's own client connects.
        timeout: of the operations of that client.

    Raises:
        RuntimeError: torch's own, as `DistNetworkError` and `DistStoreError`.
    """
    from torch.distributed import TCPStore

    def serve(**options: bool) -> Any:
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=os.dup(listener.fileno()),
            **options,
        )

    with listener:
        port = listener.getsockname()[1]
        try:
            return serve()
        except RuntimeError:  # NotImplementedError is one
            return serve(use_libuv=False)
