"""Test whether the service at MASTER_ADDR:MASTER_PORT is a TCPStore.

Nothing is written to the store and no worker is counted. The request uses the store's own protocol
on a bare socket (a validation, then a ping, as torch 2.4 and later do when they connect): a
millisecond and no name look-up. Only if it is not answered a real client is tried, so that the
store of another torch version is recognised too.
"""

from __future__ import annotations

import datetime
import secrets
import socket
import struct
import threading
from dataclasses import dataclass

_VALIDATE, _MAGIC = 0, 0x3C85F7CE
_PING = 13
# Stores from before the validation read these bytes as a length: with this bit it is one that they
# refuse at once.
_NONCE_BIT = 0x00800000


@dataclass(frozen=True)
class StoreAnswer:
    """The kind of answer: `store`; `other` (another text, in `reply`); `closed` (the connection was
    closed); `silent` (it was accepted, and nothing came within the time).
    """

    kind: str
    reply: str = ""


def ask_store(sock: socket.socket, timeout_s: float) -> StoreAnswer:
    """The answer to a ping on a new connection. The socket stays open."""
    nonce = struct.pack("<I", secrets.randbits(32) | _NONCE_BIT)
    said = b""
    sock.settimeout(timeout_s)
    try:
        sock.sendall(struct.pack("<BI", _VALIDATE, _MAGIC) + struct.pack("<B", _PING) + nonce)
        while len(said) < len(nonce) and nonce.startswith(said):
            piece = sock.recv(64)
            if not piece:
                break
            said += piece
    except TimeoutError:
        return StoreAnswer("other", _printable(said)) if said else _provoke(sock, nonce)
    except OSError as error:
        return StoreAnswer("closed", error.strerror or str(error))
    if said == nonce:
        return StoreAnswer("store")
    return StoreAnswer("other" if said else "closed", _printable(said))


def _provoke(sock: socket.socket, nonce: bytes) -> StoreAnswer:
    """The answer after the end of a line, which services with a text protocol wait for. The `nonce`
    is that of a store, which comes late where the road loses packets.
    """
    try:
        sock.settimeout(0.3)
        sock.sendall(b"\r\n\r\n")
        said = sock.recv(64)
    except TimeoutError:
        return StoreAnswer("silent")
    except OSError as error:
        return StoreAnswer("closed", error.strerror or str(error))
    if said == nonce:
        return StoreAnswer("store")
    return StoreAnswer("other", _printable(said)) if said else StoreAnswer("closed")


def store_accepts(address: str, port: int, timeout_s: float) -> bool:
    """True if a real TCPStore client of this torch can use the service; never raises.

    A client waits for its answer without a time-out, so it has its own thread, which is left
    behind if it does not return: call this in a probe child.
    """
    accepted = threading.Event()

    def connect() -> None:
        from torch.distributed import TCPStore

        patience = datetime.timedelta(seconds=timeout_s)
        try:
            store = TCPStore(
                address, port, is_master=False, wait_for_workers=False, timeout=patience
            )
            store.check(["nccl-doctor/knock"])
        except (RuntimeError, ValueError):  # torch's network errors are RuntimeErrors
            return
        accepted.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s + 0.5)
    return accepted.is_set()


def _printable(said: bytes) -> str:
    """The first line of a reply, as text."""
    line = said.splitlines()[0] if said.strip() else said
    text = line.decode("ascii", "replace")
    return text if text.isprintable() else line.hex(" ")
