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
`BadMessage`, which costs nobody the connection. With a key, the names say nothing to who does not
have it, what is not sealed is as if it were not there, and its pieces are not even asked for.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from nccl_doctor.gather.envelope import (
    CLAIM_MAX,
    LARGEST,
    OPEN,
    BadMessage,
    Budget,
    Seal,
    may_be_sealed,
    unwrap,
    wrap,
)
from nccl_doctor.gather.store_client import (
    FIRST_PAUSE_S,
    LOOKS_A_SECOND,
    PIECE_BYTES,
    CallThread,
    Posted,
    StoreLost,
    absent,
    client,
    lets_wait,
    most_pieces,
    next_pause,
    port_watch,
)

_AT_ONCE = 16
"""Pieces that are asked for at once; their names fit into a small packet too."""
_MANY_AT_ONCE, _MANY_S = 256, 3.0
"""Pieces that are asked for at once on a connection of its own, and the time limit for them."""
OPERATION_S = 10.0
"""Time limit of one store operation: a millisecond, unless its host is frozen or cut off."""
_POLL_S = 0.05
CROWD = 128
"""Participants from which on each is asked less often whether it is to wait on."""
_ASK_S = 0.25
"""Longest wait of the store until it is asked whether to wait on."""
_WAITS_S = (2.0, 8.0)
"""The same of a crowd, shortest and longest, and where nobody asks."""


STRANGER_S = 0.1
"""Time until a message of a stranger is read again: it may have been replaced."""


class StoreTimeout(TimeoutError):
    """The store answers, but the message did not come in time."""


class ControlStore:
    """Connection to the store of the run; every key has the prefix `prefix`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float,
        prefix: str,
        seal: Seal = OPEN,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Connect, retrying until `timeout_s` seconds have passed.

        What is put is sealed with `seal`, and what is got must be. `look` is called several times a
        second meanwhile; what it raises ends the wait.

        Raises:
            StoreLost: nobody answered as a TCPStore in time, or this host has no port to call from.
        """
        self.host, self.port, self.prefix = host, port, prefix
        self.seal = seal
        self.versions: dict[str, str] = {}
        """Version of nccl-doctor that wrote each message, of those that were got."""
        self.crowd = 0
        """Number of participants that wait for their messages as this one does."""
        self.budget: Budget | None = None
        """What messages may take together that are read here without a key."""
        self._is_public = False
        self._posted = Posted()
        self._worker = CallThread()
        watch = port_watch(host, port)

        def tick() -> None:
            watch()
            if look:
                look()

        # A client retries on its own clock and may take up to twice its timeout.
        self._store = self._worker.call(
            partial(client, host, port, timeout_s), timeout_s + 1.0, tick
        )
        self._is_narrow = False

    def beside(self, prefix: str, seal: Seal) -> ControlStore:
        """The same connection, for keys with another prefix and messages with another seal."""
        other = copy.copy(self)
        other.prefix, other.seal, other.versions = prefix, seal, {}
        return other

    def public(self) -> ControlStore:
        """The same by the names that everybody knows: of what is said to or by who has no key."""
        (other := self.beside(self.prefix, self.seal))._is_public = True
        return other

    def name(self, key: str) -> str:
        """Name of a key in the store."""
        return (OPEN if self._is_public else self.seal).name(self.prefix + key)

    def put(self, key: str, value: Any, timeout_s: float = OPERATION_S) -> None:
        """Publish a JSON-able value.

        Raises:
            StoreLost: the store did not take it in time.
            ValueError: it is larger than `LARGEST`.
        """
        pieces = self._pieces(key, value)

        self._posted.note(pieces if self.seal.secret else [])

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
        name = self.name(key)
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
        until = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            if not self.wait([key], left_s, tick, leave):
                raise StoreTimeout(f"no value for {key} after {timeout_s:.1f} s")
            try:
                return self.opened(key, self._whole_of(self.name(key), largest), largest)
            except BadMessage:
                # With a key, one of a stranger is none: that of the run takes its place.
                is_over = time.monotonic() >= until or (leave is not None and leave())
                if self.seal.secret is None or is_over:
                    raise
            tick()
            time.sleep(STRANGER_S)

    def opened(self, key: str, data: bytes, largest: int = LARGEST) -> Any:
        """Content of a message, given its bytes.

        Raises:
            BadMessage: it is no message of ours; says why.
        """
        value, self.versions[key] = unwrap(self.name(key), data, self.seal, largest, self.budget)
        return value

    def _whole_of(self, name: str, largest: int) -> bytes:
        """A message, put together. Where it must be sealed and does not say so, only as much as may
        be a claim.
        """
        first = self._worker.call(lambda: self._store.get(name), OPERATION_S)
        count, start = int.from_bytes(first[:4], "big"), first[4:]
        if len(start) > PIECE_BYTES:
            raise BadMessage(f"a piece of it is longer than {PIECE_BYTES} bytes")
        if self.seal.secret is not None and not may_be_sealed(start.partition(b"\n")[0]):
            largest = CLAIM_MAX
        if count > most_pieces(largest):
            raise BadMessage(f"it has {count} pieces: more than {largest} bytes")
        names = [f"{name}#{index}" for index in range(1, count)]
        many = self._many(names) if count > _AT_ONCE else []

        def receive() -> bytes | str:
            """The whole message, or what is wrong with it."""
            pieces = [start, *many]
            if max(map(len, pieces)) > PIECE_BYTES:
                return f"a piece of it is longer than {PIECE_BYTES} bytes"
            for at in range(len(many), len(names), _AT_ONCE):
                asked = names[at : at + _AT_ONCE]
                if not self._store.check(asked):  # the store would wait for a piece that is missing
                    return "a piece of it is missing"
                for each in asked:
                    pieces.append(self._store.get(each))
                    if len(pieces[-1]) > PIECE_BYTES:
                        return f"a piece of it is longer than {PIECE_BYTES} bytes"
            return b"".join(pieces)

        data = self._worker.call(receive, OPERATION_S) if names else receive()
        if isinstance(data, str):
            raise BadMessage(data)
        return data

    def many(self, keys: Collection[str]) -> dict[str, bytes]:
        """Those of some messages that have come, for `opened`; not the longest ones. Many come at
        once, in large packets: only for who is on the host of the store.
        """
        found: dict[str, bytes] = {}
        in_order = sorted(keys)
        for at in range(0, len(in_order), _AT_ONCE):
            found |= self._whole(in_order[at : at + _AT_ONCE])
        return found

    def _whole(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Some messages, put together; without very long ones, and those that lack a piece or have
        a wrong one: who asks for one of them finds out.
        """
        found: dict[str, list[bytes]] = {}
        more: list[tuple[str, str]] = []
        firsts = self._at_once([self.name(key) for key in keys])
        for key, data in zip(keys, firsts, strict=False):
            rest = int.from_bytes(data[:4], "big") - 1
            if 0 <= rest <= _MANY_AT_ONCE and len(data) <= 4 + PIECE_BYTES:
                found[key] = [data[4:]]
                more += [(key, f"{self.name(key)}#{index}") for index in range(1, rest + 1)]
        step = self._most_at_once
        for at in range(0, len(more), step):
            some = more[at : at + step]
            pieces = self._at_once([name for _, name in some])
            for (key, _), piece in zip(some, pieces or [b""] * len(some), strict=True):
                found[key].append(piece)
        return {
            key: b"".join(whole)
            for key, whole in found.items()
            if min(map(len, whole)) > 0 and max(map(len, whole)) <= PIECE_BYTES
        }

    @property
    def _most_at_once(self) -> int:
        """Pieces that are asked for at once: few where anybody can have made them longer."""
        return _AT_ONCE if self.seal.secret is None else _MANY_AT_ONCE

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

        It lets the store wait, if it can; else the longer it takes, the more rarely it asks. `tick`
        is called several times a second; `leave` too, by one of a crowd after each such wait.
        """
        wanted = list(keys)
        names = [self.name(key) for key in wanted]
        left = [names[at : at + _AT_ONCE] for at in range(0, len(names), _AT_ONCE)]
        can_wait = lets_wait(self._store)
        began = time.monotonic()
        until = began + timeout_s
        pause = FIRST_PAUSE_S

        def have_come() -> bool:
            """True if all have; what has come is not asked for again."""
            while left and self._store.check(left[0]):
                left.pop(0)
            return not left

        while True:
            if self._posted.is_due(self.crowd):
                self._worker.call(partial(self._posted.restore, self._store), OPERATION_S)
            rest_s = until - time.monotonic()
            most_s = rest_s if leave is None or self.crowd >= CROWD else min(rest_s, _ASK_S)
            if can_wait and left and rest_s > 0 and self._wait_there(left[0], most_s, tick):
                left.pop(0)
            if not left or self._worker.call(have_come, OPERATION_S):
                return set(wanted)
            rest_s = until - time.monotonic()
            if rest_s <= 0 or (leave is not None and leave()):
                away = self._worker.call(
                    lambda: absent(self._store, [each for some in left for each in some]),
                    OPERATION_S,
                )
                return {key for key, name in zip(wanted, names, strict=True) if name not in away}
            tick()
            if not can_wait:
                time.sleep(min(pause, rest_s))
                pause = next_pause(pause, time.monotonic() - began, self.crowd)

    def _wait_there(self, names: list[str], most_s: float, tick: Callable[[], None]) -> bool:
        """Let the store wait for these names, for a time. Returns: whether they came; if not,
        whether the time was over or the store is gone, the next question shows.
        """
        shortest, longest = _WAITS_S
        limit_s = min(most_s, longest, max(shortest, self.crowd / LOOKS_A_SECOND))
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
        worker = CallThread()
        try:
            store = worker.call(partial(client, self.host, self.port, _MANY_S), _MANY_S)
            for start in range(0, len(names), self._most_at_once):
                asked = list(names[start : start + self._most_at_once])
                if not worker.call(partial(store.check, asked), _MANY_S):
                    break  # a piece is missing; who asks for them one by one says so
                found += worker.call(partial(store.multi_get, asked), _MANY_S)
                if max(map(len, found[start:])) > PIECE_BYTES:
                    break  # who puts them together says so
        except StoreLost:
            self._is_narrow = True
        finally:
            worker.end()
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a shared counter; returns the new value. `add(key, 0)` reads it."""
        name = self.name(key)
        return int(self._worker.call(lambda: self._store.add(name, amount), OPERATION_S))

    def forget(self, keys: Iterable[str]) -> None:
        """Delete keys, so that a later run in the same store starts afresh."""
        names = [self.name(key) for key in keys]
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

        return PrefixStore(self.name(name), self._store)


__all__ = ["PIECE_BYTES", "ControlStore", "StoreLost", "StoreTimeout"]
