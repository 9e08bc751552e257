"""Knock at MASTER_ADDR:MASTER_PORT, and ask whoever opens whether it is a TCPStore.

Nothing is written to the store and nobody is counted in. The question is put in the store's own
words on a bare socket (a validation, then a ping, as torch 2.4 and later do when they connect): a
millisecond and no name look-up. Only where that is not answered a real client is tried, so that a
store of another torch version is not called something else.
"""

from __future__ import annotations

import datetime
import errno
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nccl_doctor.tools.names import has_route
from nccl_doctor.tools.net import Dial, dial

DIAL_S = 3.5
"""Longer than the three ARP requests after which the kernel reports that nobody answers."""
MIN_DIAL_S = 0.5
"""With less time left than this, an attempt would say more about its hurry than about the road."""
ASK_S = 1.0
CONFIRM_S = 2.0
PAUSES_S = (0.2, 1.0)
"""First and longest pause between two knocks."""
MAX_ADDRESSES = 8

_VALIDATE, _MAGIC = 0, 0x3C85F7CE
_PING = 13
# Stores from before the validation read these bytes as a length: with this bit it is one that they
# refuse at once.
_NONCE_BIT = 0x00800000


@dataclass(frozen=True)
class StoreAnswer:
    """Who answered: `store`; `other` (it said something else, `reply`); `closed` (it hung up);
    `silent` (it accepted, and nothing came within the time).
    """

    kind: str
    reply: str = ""


def ask_store(sock: socket.socket, timeout_s: float) -> StoreAnswer:
    """Ping on a fresh connection. The socket stays open."""
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
        return StoreAnswer("other", _printable(said)) if said else _provoke(sock)
    except OSError as error:
        return StoreAnswer("closed", error.strerror or str(error))
    if said == nonce:
        return StoreAnswer("store")
    return StoreAnswer("other" if said else "closed", _printable(said))


def _provoke(sock: socket.socket) -> StoreAnswer:
    """End the line: a service of text waits for that before it says who it is."""
    try:
        sock.settimeout(0.3)
        sock.sendall(b"\r\n\r\n")
        said = sock.recv(64)
    except TimeoutError:
        return StoreAnswer("silent")
    except OSError as error:
        return StoreAnswer("closed", error.strerror or str(error))
    return StoreAnswer("other", _printable(said)) if said else StoreAnswer("closed")


def store_accepts(address: str, port: int, timeout_s: float) -> bool:
    """Whether a real TCPStore client of this torch can use what listens there; never raises.

    A client waits for its answer without a time-out, so it has a thread of its own, which is left
    behind when it does not come back: call it in a probe child.
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


_TALKATIVE = ("rejected", "refused", "dropped", "no-neighbour", "unreachable", "error")
"""Of the outcomes at several addresses, the one that says most comes first."""


def knock(
    addresses: Sequence[str], port: int, until: float, *, serves: bool = False
) -> dict[str, Any]:
    """Try every address in torch's order, again and again, until a store answers or time is up.

    Something that accepts but is not a store is asked twice, the second time with a real client;
    on the host that `serves` the store it is given all the time there is.

    Comes back about `until`, a `time.monotonic()` second.

    Returns: `first` and `last`, what the first and the last round said, each `{"address",
    "outcome", "errno", "detail", "duration_s", "answer", "reply"}` (`Dial` and `StoreAnswer`;
    `answer` is empty where there was no connection); `passed`, the [address, outcome] of the
    addresses beside it in the last round; `knocks`, how many rounds; `seconds`.
    """
    in_order = sorted(addresses, key=lambda address: ":" not in address)[:MAX_ADDRESSES]
    started, pause, knocks, strangers = time.monotonic(), PAUSES_S[0], 0, 0
    first: dict[str, Any] = {}
    while True:
        knocks += 1
        tried: list[dict[str, Any]] = []
        for address in in_order:
            tried.append(_try(address, port, until, confirm=strangers > 0))
            if tried[-1]["answer"] or time.monotonic() >= until:
                break
        last = min(tried, key=_says_most)
        first = first or last
        strangers += last["answer"] not in ("", "store")
        decided = last["answer"] == "store" or (strangers > 1 and not serves)
        if decided or until - time.monotonic() < pause + MIN_DIAL_S:
            return {
                "first": first,
                "last": last,
                "passed": [[one["address"], one["outcome"]] for one in tried if one is not last],
                "knocks": knocks,
                "seconds": round(time.monotonic() - started, 2),
            }
        time.sleep(pause)
        pause = min(2 * pause, PAUSES_S[1])


def _says_most(tried: Mapping[str, Any]) -> int:
    return -1 if tried["answer"] else _TALKATIVE.index(tried["outcome"])


def _try(address: str, port: int, until: float, *, confirm: bool) -> dict[str, Any]:
    """One connection and one question, or two with `confirm`."""

    def left(limit_s: float) -> float:
        return max(0.2, min(limit_s, until - time.monotonic()))

    answer = StoreAnswer("")
    if ":" in address and not has_route(address):  # there may be no IPv6 in this kernel at all
        call = Dial("unreachable", errno.ENETUNREACH, os.strerror(errno.ENETUNREACH), 0.0)
    else:
        call, sock = dial(address, port, left(DIAL_S))
        if sock is not None:
            with sock:
                answer = ask_store(sock, left(ASK_S))
            again = confirm and answer.kind != "store" and left(CONFIRM_S) > 0.5
            if again and store_accepts(address, port, left(CONFIRM_S)):
                answer = StoreAnswer("store")
    seen = call.to_json()
    if call.outcome in ("rejected", "dropped") and _is_unanswered_neighbour(address):
        seen["outcome"] = "no-neighbour"
    return {"address": address, **seen, "answer": answer.kind, "reply": answer.reply}


def _is_unanswered_neighbour(address: str) -> bool:
    """Whether ARP asks for the address in vain: then nobody has dropped or rejected anything.

    The kernel itself says so only after three requests; an attempt may be given up before, or may
    join another one's requests and learn too soon that they failed.
    """
    try:
        table = Path("/proc/net/arp").read_text(encoding="ascii")
    except OSError:
        return False
    rows = [line.split() for line in table.splitlines()[1:]]
    return any(row[0] == address and row[2] == "0x0" for row in rows)


def _printable(said: bytes) -> str:
    """The first line of what was said, as text."""
    line = said.splitlines()[0] if said.strip() else said
    text = line.decode("ascii", "replace")
    return text if text.isprintable() else line.hex(" ")
