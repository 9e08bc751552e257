"""Connection of torch to a store, and how often it is asked for a message."""

from __future__ import annotations

import datetime
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from nccl_doctor.gather.envelope import HEADER_MAX
from nccl_doctor.system.shortage import shortage_of
from nccl_doctor.toolkit.net.free_port import no_port_left

# Thread for the calls of a store: any of them may never come back.


T = TypeVar("T")

_TICK_S = 0.1


class StoreLost(ConnectionError):
    """The store cannot be reached, broke off, or did not answer in time."""


class CallThread:
    """Runs one call at a time in a daemon thread; a call that outlives its deadline is given up."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._lost = ""
        try:
            threading.Thread(target=self._serve, name="control-store", daemon=True).start()
        except RuntimeError as error:
            scarce = shortage_of(error)
            raise StoreLost(scarce.words if scarce else str(error)) from error

    def call(
        self,
        function: Callable[[], T],
        timeout_s: float,
        tick: Callable[[], None] | None = None,
    ) -> T:
        """Result of the function. Meanwhile `tick` is called several times a second."""
        if self._lost:
            raise StoreLost(self._lost)
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._calls.put((function, answer))
        until = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            try:
                value, error = answer.get(timeout=min(left_s, _TICK_S) if tick else left_s)
                break
            except queue.Empty:
                if time.monotonic() >= until:
                    self._lost = f"no answer from the store for {timeout_s:.0f} s"
                    raise StoreLost(self._lost) from None
                if tick:
                    tick()
        if error is not None:
            self._lost = str(error).partition("\n")[0]
            raise StoreLost(self._lost) from error
        return value  # type: ignore[no-any-return]

    def end(self) -> None:
        """End the thread, once what was called before is done."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (called := self._calls.get()) is not None:
            function, answer = called
            try:
                answer.put((function(), None))
            # The base of every torch.distributed error; a torch that cannot be imported; a value
            # of which a store says that it is as large as no memory.
            except (RuntimeError, ImportError, OSError, MemoryError) as error:
                answer.put((None, error))


_CAN_WAIT = "libuvBackend"
"""What every torch has whose store can be waited for, and be used after such a wait has ended."""
_SILENT_LEVELS = ("ERROR", "FATAL", "2", "3")
"""Values of TORCH_CPP_LOG_LEVEL with which torch says nothing of a wait that ends."""
PIECE_BYTES = 900
"""With key and headers below 1200 bytes, which the smallest common tunnels let through."""
FIRST_PAUSE_S = 0.002
"""Pause between the first two looks for a message."""
_PAUSES_S = (0.03, 0.1)
"""Longest pause in a short wait, and in any: each look costs the store's host some work."""
_PART_OF_WAIT = 0.03
_LAST, _LONG, _LOOK_AGAIN = 4, 64, 500
"""Messages that are replaced, most pieces of one, and participants that look in a second."""
_PORTS_S = 0.5
"""Time after which a connection that does not come about may lack a port of this host."""
LOOKS_A_SECOND = 5000
"""Looks of a crowd together, at most, where the store cannot wait."""


def next_pause(pause_s: float, waited_s: float, crowd: int = 0) -> float:
    """Pause between two looks for a message, after one of `pause_s`: short while an answer is to
    come at once, then a part of what was waited already. In a `crowd` of many it grows longer.
    """
    short, longest = _PAUSES_S
    fair = crowd / LOOKS_A_SECOND
    return min(pause_s * 1.3, max(short, fair, waited_s * _PART_OF_WAIT), max(longest, fair))


def client(host: str, port: int, timeout_s: float) -> Any:
    """The store of torch at an address, connected."""
    from torch.distributed import TCPStore

    return TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def port_watch(host: str, port: int) -> Callable[[], None]:
    """Raises StoreLost, some time later, if this host has no free port for a connection: torch
    would try again and again.
    """
    next_s = time.monotonic() + _PORTS_S

    def look() -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _PORTS_S
            if no_port_left(host, port):
                raise StoreLost(
                    "this host has no free port to call from (net.ipv4.ip_local_port_range)"
                )

    return look


def most_pieces(largest: int) -> int:
    """Most pieces of a message whose JSON has at most that many bytes; what cannot be compressed
    grows a little.
    """
    return (largest + HEADER_MAX) // PIECE_BYTES + 2 + largest // (1 << 20)


def lets_wait(store: Any) -> bool:
    """True if the store itself is to wait for messages: who waits there hears of one at once.
    Not where torch warns of each wait that ends: there it is asked again and again.
    """
    level = os.environ.get("TORCH_CPP_LOG_LEVEL", "")
    return level in _SILENT_LEVELS and hasattr(store, _CAN_WAIT)


def absent(store: Any, names: list[str]) -> set[str]:
    """Those of some names that are not there, found by halves."""
    if not names or store.check(names):
        return set()
    if len(names) == 1:
        return set(names)
    half = len(names) // 2
    return absent(store, names[:half]) | absent(store, names[half:])


class Posted:
    """The last messages that this process has put with a key: what a stranger puts in their place
    is replaced again. What is gone stays so: rank 0 clears the store.
    """

    def __init__(self) -> None:
        self._last: deque[list[tuple[str, bytes]]] = deque(maxlen=_LAST)
        self._next = 0.0

    def note(self, pieces: list[tuple[str, bytes]]) -> None:
        """Remember a message, of (name, piece) as they were put; not a long one."""
        if 0 < len(pieces) <= _LONG:
            self._last.append(pieces)

    def is_due(self, crowd: int) -> bool:
        """True to look again; a crowd does so more rarely."""
        now = time.monotonic()
        if not self._last or now < self._next:
            return False
        self._next = now + max(1.0, crowd / _LOOK_AGAIN)
        return True

    def restore(self, store: Any) -> None:
        """Replace what is another's."""
        for pieces in self._last:
            for name, piece in pieces:
                if store.compare_set(name, piece, piece) != piece:
                    store.set(name, piece)
