"""JSON messages over a `torch.distributed.TCPStore`: the whole control plane.

A star over one store, no collective, so nothing in it can deadlock. Every operation has a deadline
that holds even when the store's host is frozen: the store client blocks in C++ without one, so it
runs in a thread that can be given up.

Messages are compressed JSON, never pickle, in an envelope (`gather.envelope`), and travel in pieces
that fit into a small packet, each acknowledged before the next is sent: a path that swallows large
packets (an MTU black hole) must not swallow the report about itself. The many pieces of a long
message are asked for all at once, on a connection of its own: if that is lost, one by one.

Whoever reaches the port can write anything here, so nothing is believed that is read: the number of
pieces, their length and the depth of what they hold are bounded, and what is wrong is a
`BadMessage`, which costs nobody the connection.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from nccl_doctor.gather.envelope import LARGEST, OPEN, BadMessage, Seal, unwrap, wrap
from nccl_doctor.gather.store_worker import StoreLost, Worker
from nccl_doctor.toolkit.net.free_port import no_port_left

PIECE_BYTES = 900
"""With key and headers below 1200 bytes, which the smallest common tunnels let through."""
_AT_ONCE = 16
"""Pieces that are asked for at once; their names fit into a small packet too."""
_MANY_AT_ONCE = 256
_MANY_S = 3.0
"""Pieces that are asked for at once on a connection of its own, and the time limit for them."""
OPERATION_S = 10.0
"""Time limit of one store operation, which takes a millisecond unless its host is frozen or cut
off.
"""
_POLL_S = 0.05
FIRST_PAUSE_S = 0.002
"""Pause between the first two looks for a message."""
_PAUSES_S = (0.03, 0.1)
"""Longest pause in a short wait, and in any: each look costs the store's host some work."""
_PART_OF_WAIT = 0.03
CROWD = 128
"""Participants from which on each is asked less often whether it is to wait on."""
_CAN_WAIT = "libuvBackend"
"""What every torch has whose store can be waited for, and be used after such a wait has ended."""
_SILENT_LEVELS = ("ERROR", "FATAL", "2", "3")
"""Values of TORCH_CPP_LOG_LEVEL with which torch says nothing of a wait that ends."""
_ASK_S = 0.25
"""Longest wait of the store until it is asked whether to wait on."""
_WAITS_S = (2.0, 8.0)
"""The same of a crowd, shortest and longest, and where nobody asks."""
_PORTS_S = 0.5
"""Time after which a connection that does not come about may lack a port of this host."""
_LOOKS_A_SECOND = 5000
"""Looks of a crowd together, at most, where the store cannot wait."""


def next_pause(pause_s: float, waited_s: float, crowd: int = 0) -> float:
    """Pause between two looks for a message, after one of `pause_s`: short while an answer is to
    come at once, then a part of what was waited already. In a `crowd` of many it grows longer.
    """
    short, longest = _PAUSES_S
    fair = crowd / _LOOKS_A_SECOND
    return min(pause_s * 1.3, max(short, fair, waited_s * _PART_OF_WAIT), max(longest, fair))


class StoreTimeout(TimeoutError):
    """The store answers, but the message did not come in time."""


class ControlStore:
    """Connection to the store of the run; every key has the prefix `prefix`."""

    def __init__(
        self, host: str, port: int, *, timeout_s: float, prefix: str, seal: Seal = OPEN
    ) -> None:
        """Connect, retrying until `timeout_s` seconds have passed.

        What is put is sealed with `seal`, and what is got must be.

        Raises:
            StoreLost: nobody answered as a TCPStore in time, or this host has no port to call from.
        """
        self.host, self.port, self.prefix = host, port, prefix
        self.seal = seal
        self.versions: dict[str, str] = {}
        """Version of nccl-doctor that wrote each message, of those that were got."""
        self.crowd = 0
        """Number of participants that wait for their messages as this one does."""
        self._worker = Worker()
        # A client retries on its own clock and may take up to twice its timeout.
        self._store = self._worker.call(
            partial(_client, host, port, timeout_s), timeout_s + 1.0, _port_watch(host, port)
        )
        self._is_narrow = False

    def beside(self, prefix: str, seal: Seal) -> ControlStore:
        """The same connection, for keys with another prefix and messages with another seal."""
        other = copy.copy(self)
        other.prefix, other.seal, other.versions = prefix, seal, {}
        return other

    def put(self, key: str, value: Any, timeout_s: float = OPERATION_S) -> None:
        """Publish a JSON-able value.

        Raises:
            StoreLost: the store did not take it in time.
            ValueError: it is larger than `LARGEST`.
        """
        pieces = self._pieces(key, value)

        def send() -> None:
            for name, piece in pieces:
                self._store.set(name, piece)
                self._store.check([name])  # its answer acknowledges the piece

        self._worker.call(send, timeout_s)

    def put_many(self, messages: Mapping[str, Any]) -> None:
        """Publish messages many at once, in large packets: only for who is on the host of the
        store.

        Raises:
            StoreLost, ValueError: as `put`.
        """
        if not hasattr(self._store, "multi_set"):
            for key, value in messages.items():
                self.put(key, value)
            return
        pieces = [each for key, value in messages.items() for each in self._pieces(key, value)]
        for at in range(0, len(pieces), _MANY_AT_ONCE):
            names, values = map(list, zip(*pieces[at : at + _MANY_AT_ONCE], strict=True))
            send = partial(self._store.multi_set, names, values)
            self._worker.call(send, OPERATION_S)
            self._worker.call(partial(self._store.check, names[-1:]), OPERATION_S)

    def _pieces(self, key: str, value: Any) -> list[tuple[str, bytes]]:
        """(name, piece) of a message. The first piece is the last: who sees it can read all."""
        name = self.prefix + key
        data = wrap(name, value, self.seal)
        first, *rest = (data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES))
        pieces = [(f"{name}#{index}", piece) for index, piece in enumerate(rest, start=1)]
        return [*pieces, (name, (len(rest) + 1).to_bytes(4, "big") + first)]

    def get(
        self,
        key: str,
        timeout_s: float,
        tick: Callable[[], None] = lambda: None,
        largest: int = LARGEST,
        leave: Callable[[], bool] | None = None,
    ) -> Any:
        """Wait for a message of at most `largest` bytes, or until `leave`.

        Raises:
            StoreTimeout: it did not come.
            StoreLost: the store is gone.
            BadMessage: what came is no message of ours; says why.
        """
        if not self.wait([key], timeout_s, tick, leave):
            raise StoreTimeout(f"no value for {key} after {timeout_s:.1f} s")
        name = self.prefix + key

        first = self._worker.call(lambda: self._store.get(name), OPERATION_S)
        count = int.from_bytes(first[:4], "big")
        if count > largest // PIECE_BYTES + 64:  # what cannot be compressed grows
            raise BadMessage(f"it has {count} pieces: more than {largest} bytes")
        names = [f"{name}#{index}" for index in range(1, count)]
        many = self._many(names) if count > _AT_ONCE else []

        def receive() -> bytes | str:
            """The whole message, or what is wrong with it."""
            pieces = [first[4:], *many]
            for start in range(len(many), len(names), _AT_ONCE):
                asked = names[start : start + _AT_ONCE]
                if not self._store.check(asked):  # the store would wait for a piece that is missing
                    return "a piece of it is missing"
                pieces += [self._store.get(each) for each in asked]
            if max(map(len, pieces)) > PIECE_BYTES:
                return f"a piece of it is longer than {PIECE_BYTES} bytes"
            return b"".join(pieces)

        data = self._worker.call(receive, OPERATION_S) if names else receive()
        if isinstance(data, str):
            raise BadMessage(data)
        value, self.versions[key] = unwrap(name, data, self.seal, largest)
        return value

    def many(self, keys: Collection[str], largest: int = LARGEST) -> dict[str, Any]:
        """Those of some messages that have come, each as `get` returns it, or as the `BadMessage`
        that it is; not the longest ones.

        Many come at once, in large packets: only for who is on the host of the store.
        """
        found: dict[str, Any] = {}
        in_order = sorted(keys)
        for at in range(0, len(in_order), _AT_ONCE):
            for key, data in self._whole(in_order[at : at + _AT_ONCE]).items():
                try:
                    found[key], self.versions[key] = unwrap(
                        self.prefix + key, data, self.seal, largest
                    )
                except BadMessage as error:
                    found[key] = error
        return found

    def _whole(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Some messages, put together; without very long ones, and those that lack a piece or have
        a wrong one: who asks for one of them finds out.
        """
        found: dict[str, list[bytes]] = {}
        more: list[tuple[str, str]] = []
        firsts = self._at_once([self.prefix + key for key in keys])
        for key, data in zip(keys, firsts, strict=False):
            rest = int.from_bytes(data[:4], "big") - 1
            if 0 <= rest <= _MANY_AT_ONCE:
                found[key] = [data[4:]]
                more += [(key, f"{self.prefix}{key}#{index}") for index in range(1, rest + 1)]
        for at in range(0, len(more), _MANY_AT_ONCE):
            some = more[at : at + _MANY_AT_ONCE]
            pieces = self._at_once([name for _, name in some])
            for (key, _), piece in zip(some, pieces or [b""] * len(some), strict=True):
                found[key].append(piece)
        return {
            key: b"".join(whole)
            for key, whole in found.items()
            if min(map(len, whole)) > 0 and max(map(len, whole)) <= PIECE_BYTES
        }

    def _at_once(self, names: Sequence[str]) -> Sequence[bytes]:
        """Values of all of these; none if one is missing: the store would wait for it."""

        def receive() -> list[bytes]:
            return list(self._store.multi_get(names)) if self._store.check(names) else []

        return self._worker.call(receive, OPERATION_S) if names else []

    def wait(
        self,
        keys: Iterable[str],
        timeout_s: float,
        tick: Callable[[], None] = lambda: None,
        leave: Callable[[], bool] | None = None,
    ) -> set[str]:
        """Wait until all messages have come, or for `timeout_s`, or until `leave`; returns the keys
        of those that have.

        It lets the store wait, if it can, and so hears of a message at once; else the longer it
        takes, the more rarely it asks. `tick` is called several times a second, and `leave` is
        asked as often; by one of a crowd after each wait of the store.
        """
        wanted = list(keys)
        names = [self.prefix + key for key in wanted]
        left = [names[at : at + _AT_ONCE] for at in range(0, len(names), _AT_ONCE)]
        lets_wait = self._lets_wait()
        began = time.monotonic()
        until = began + timeout_s
        pause = FIRST_PAUSE_S

        def have_come() -> bool:
            """Whether all have; what has come is not asked for again."""
            while left and self._store.check(left[0]):
                left.pop(0)
            return not left

        while True:
            rest_s = until - time.monotonic()
            most_s = rest_s if leave is None or self.crowd >= CROWD else min(rest_s, _ASK_S)
            if lets_wait and left and rest_s > 0 and self._wait_there(left[0], most_s, tick):
                left.pop(0)
            if not left or self._worker.call(have_come, OPERATION_S):
                return set(wanted)
            rest_s = until - time.monotonic()
            if rest_s <= 0 or (leave is not None and leave()):
                away = self._worker.call(
                    lambda: self._away([each for some in left for each in some]), OPERATION_S
                )
                return {key for key, name in zip(wanted, names, strict=True) if name not in away}
            tick()
            if not lets_wait:
                time.sleep(min(pause, rest_s))
                pause = next_pause(pause, time.monotonic() - began, self.crowd)

    def _lets_wait(self) -> bool:
        """Whether the store itself is to wait for messages: who waits there hears of one at once.
        Not where torch warns of each wait that ends: there it is asked again and again.
        """
        level = os.environ.get("TORCH_CPP_LOG_LEVEL", "")
        return level in _SILENT_LEVELS and hasattr(self._store, _CAN_WAIT)

    def _wait_there(self, names: list[str], most_s: float, tick: Callable[[], None]) -> bool:
        """Let the store wait for these names, for a time. Returns: whether they came; if not,
        whether the time was over or the store is gone, the next question shows.
        """
        shortest, longest = _WAITS_S
        limit_s = min(most_s, longest, max(shortest, self.crowd / _LOOKS_A_SECOND))
        limit = datetime.timedelta(seconds=max(limit_s, 0.001))  # 0 would be no limit

        def wait() -> bool:
            try:
                self._store.wait(names, limit)
            except RuntimeError:
                return False
            return True

        return self._worker.call(wait, limit_s + OPERATION_S, tick)

    def _many(self, names: Sequence[str]) -> list[bytes]:
        """The values of many names, or the first of them; none where that did not work before.

        They come in large packets, which not every path lets through: only this connection is lost.
        """
        if self._is_narrow or not hasattr(self._store, "multi_get"):
            return []
        found: list[bytes] = []
        worker = Worker()
        try:
            store = worker.call(partial(_client, self.host, self.port, _MANY_S), _MANY_S)
            for start in range(0, len(names), _MANY_AT_ONCE):
                asked = list(names[start : start + _MANY_AT_ONCE])
                if not worker.call(partial(store.check, asked), _MANY_S):
                    break  # a piece is missing; who asks for them one by one says so
                found += worker.call(partial(store.multi_get, asked), _MANY_S)
        except StoreLost:
            self._is_narrow = True
        finally:
            worker.end()
        return found

    def _away(self, names: list[str]) -> set[str]:
        """Those of some names that are not there, found by halves."""
        if not names or self._store.check(names):
            return set()
        if len(names) == 1:
            return set(names)
        half = len(names) // 2
        return self._away(names[:half]) | self._away(names[half:])

    def add(self, key: str, amount: int) -> int:
        """Add to a shared counter; returns the new value. `add(key, 0)` reads it."""
        name = self.prefix + key
        return int(self._worker.call(lambda: self._store.add(name, amount), OPERATION_S))

    def forget(self, keys: Iterable[str]) -> None:
        """Delete keys, so that a later run in the same store starts afresh."""
        names = [self.prefix + key for key in keys]
        self._worker.call(lambda: [self._store.delete_key(name) for name in names], OPERATION_S)

    def outlive(self, timeout_s: float) -> None:
        """Wait until the store is gone, or for `timeout_s`."""
        until = time.monotonic() + timeout_s
        with contextlib.suppress(StoreLost):
            while time.monotonic() < until:
                self.add("outlived", 0)
                time.sleep(_POLL_S)

    def raw(self, name: str) -> Any:
        """A `torch.distributed.PrefixStore` below this store, for a process group."""
        from torch.distributed import PrefixStore

        return PrefixStore(f"{self.prefix}{name}", self._store)


def _client(host: str, port: int, timeout_s: float) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _port_watch(host: str, port: int) -> Callable[[], None]:
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


__all__ = ["ControlStore", "StoreLost", "StoreTimeout"]
