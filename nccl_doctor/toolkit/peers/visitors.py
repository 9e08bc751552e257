"""Callers of the listeners of a host: who of them belongs to the run, and who was served late."""

from __future__ import annotations

import re
import threading
from collections import Counter
from typing import TypedDict

from nccl_doctor.toolkit.peers.echo import MAGIC

_LONGEST = 40
"""Characters that are kept of what a stranger says."""
_MOST, _MOST_NOTED = 16, 4096
"""Strangers that are told, and callers that are noted until it is clear who belongs to the run: as
many as a run has hosts.
"""
LATE_S = 1.0
"""A listener that lets bytes lie for so long has no CPU: its silence says nothing of the road. It
is a third of what a caller waits for, as the answer may be late as well."""
_TLS = b"\x16\x03"
"""How a TLS connection begins (RFC 8446, section 5.1)."""


class Stranger(TypedDict):
    """Facts of callers from one address who said the same on one port; `first` is escaped."""

    source: str
    port: int
    first: str
    times: int


class Visitors:
    """Notes of who called; to be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._others: Counter[tuple[str, int, str]] = Counter()
        self._late: dict[str, float] = {}

    def note(self, source: str, port: int, shown: bytes, *, known: bool) -> None:
        """Note a caller, what it said first, and whether it showed the token of the listener."""
        with self._lock:
            if known:
                self._known.add(source)
            # With the mark of the doctor it is one of another run, or the token of another port.
            elif not shown.startswith(MAGIC) and len(self._others) < _MOST_NOTED:
                self._others[source, port, in_words(shown)] += 1

    def note_delay(self, source: str, seconds: float) -> None:
        """Note for how long what a caller with the token said lay without an answer."""
        if seconds >= LATE_S:
            with self._lock:
                self._late[source] = max(seconds, self._late.get(source, 0.0))

    def late(self) -> dict[str, float]:
        """Address of each caller that was served late → the longest that its bytes lay, seconds."""
        with self._lock:
            return dict(sorted(self._late.items()))

    def strangers(self) -> list[Stranger]:
        """Callers that do not belong to the run, the busiest first.

        A host of the run makes many connections on which it says nothing: from where one showed its
        token, only somebody who says something else is a stranger.
        """
        with self._lock:
            found = [
                Stranger(source=source, port=port, first=first, times=times)
                for (source, port, first), times in self._others.most_common()
                if first or source not in self._known
            ]
        return found[:_MOST]


def in_words(shown: bytes) -> str:
    """First line of the bytes that a caller sent, up to a `?`, escaped and not long.

    It may hold anything: bytes that are no printable ASCII become their number in hexadecimal.
    """
    if shown.startswith(_TLS):
        return "a TLS hello"
    line = re.split(rb"[\r\n?]", shown, maxsplit=1)[0] or shown[:4]
    text = "".join(chr(c) if 32 <= c < 127 and c != 92 else f"\\x{c:02x}" for c in line)
    return text[:_LONGEST]
