"""The agent process of a host; see the package.

It knows nothing of checks and judges nothing. Whatever goes wrong in it ends it: then its ranks go
on by themselves, meet the same trouble, and have the words for it. Its own loop never waits for the
store, which threads do, so that its beat stops only if it is dead or stopped.
"""

from __future__ import annotations

import json
import math
import os
import queue
import select
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nccl_doctor.gather.agent.batches import (
    AGENT_RANKS_MAX,
    BATCH_MAX,
    answers_key,
    batch_of_answers,
    batch_of_sign_ins,
)
from nccl_doctor.gather.agent.connection import AgentConnection, AgentLost, accept
from nccl_doctor.gather.context import Key
from nccl_doctor.gather.ends import seal_of
from nccl_doctor.gather.examine import SETTLE_S
from nccl_doctor.gather.messages import SIGN_IN_MAX
from nccl_doctor.gather.opening import prefix_of
from nccl_doctor.gather.server import bound_resolver
from nccl_doctor.gather.store import CROWD, ControlStore, StoreTimeout

BEAT_S = 0.5
SIGN_INS_S = 5.0
"""Time for the ranks of the host to sign in after the first of them; later ones do it alone."""
CONNECT_S = 10.0
MARGIN_S = 1.0
"""Time before rank 0 gives a round up, at which those that answered are no longer to wait for those
of their host that did not."""
_ORDER, _ANSWER = "order/", "evidence/"


@dataclass
class _AgentRank:
    """One rank of the agent. `at`: number of the order that it waits for."""

    connection: AgentConnection
    sign_in: Any = None
    seat: int = -1
    at: int = -1
    has_left: bool = False


class _StoreThread:
    """A connection of its own, and a thread that does one call at a time."""

    def __init__(self, connect: Callable[[], ControlStore]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._connect = connect
        self._box: ControlStore | None = None

    def do(self, work: Callable[[ControlStore], Any]) -> Future[Any]:
        """Result of the work, some day."""
        return self._pool.submit(self._done, work)

    def _done(self, work: Callable[[ControlStore], Any]) -> Any:
        if self._box is None:
            self._box = self._connect()
        return work(self._box)


class Agent:
    """Signs in and answers for the ranks that connect at `listener`, until all have left."""

    def __init__(self, listener: socket.socket, key: Key | None) -> None:
        self._listener, self._key = listener, key
        self._ranks: list[_AgentRank] = []
        self._run = ""
        self._store: tuple[str, int] | None = None
        self._of, self._sign_ins_by = 0, math.inf
        self._first: int | None = None
        self._signs_in = False
        self._main = _StoreThread(self._box)
        self._of_pages: dict[str, _StoreThread] = {}
        self._done: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], None]]]
        self._done = queue.SimpleQueue()
        self._wake, self._waker = os.pipe()
        self._wanted: dict[str, list[_AgentRank]] = {}
        self._read: dict[str, Any] = {}
        self._answers: dict[int, dict[int, Any]] = {}
        self._posted: set[int] = set()
        self._limits: dict[int, float] = {}
        self._has_left = False

    def serve(self) -> None:
        """Serve until the last rank has left.

        Raises:
            StoreLost, BadMessage, ValueError: the ranks have to go on without it.
        """
        bound_resolver()
        beat = 0.0
        while not (self._signs_in and not self._ranks):
            sockets = [rank.connection.fileno() for rank in self._ranks]
            select.select([self._listener.fileno(), self._wake, *sockets], [], [], BEAT_S)
            self._take_connections()
            for rank in list(self._ranks):
                self._receive(rank)
            self._take_results()
            if not self._signs_in and self._ranks and self._all_are_here():
                self._sign_in()
            self._post_answers()
            self._post_goodbye()
            if time.monotonic() >= beat:
                beat = time.monotonic() + BEAT_S
                for rank in list(self._ranks):
                    self._tell(rank, {"beat": True})

    def _box(self) -> ControlStore:
        assert self._store is not None
        seal = seal_of(self._key, self._run)
        box = ControlStore(
            *self._store, timeout_s=CONNECT_S, prefix=prefix_of(self._run), seal=seal
        )
        box.crowd = CROWD  # one of many that ask
        return box

    # -- the ranks ------------------------------------------------------------------------------

    def _take_connections(self) -> None:
        while connection := accept(self._listener):
            if self._signs_in:  # too late to be one of its ranks
                connection.close()
            else:
                self._ranks.append(_AgentRank(connection))

    def _receive(self, rank: _AgentRank) -> None:
        try:
            for message in rank.connection.received():
                self._take(rank, message)
        except (AgentLost, ValueError, KeyError, TypeError):
            self._lose(rank)

    def _take(self, rank: _AgentRank, message: Mapping[str, Any]) -> None:
        if "sign_in" in message:
            self._take_sign_in(rank, message)
        elif rank.seat < 0:
            raise ValueError("it has not signed in")
        elif "want" in message:
            self._want(rank, str(message["want"]), float(message["patience_s"]))
        else:
            key = str(message["post"])
            if key.startswith(_ANSWER):
                number = int(key.split("/")[1])
                self._answers.setdefault(number, {})[rank.seat] = message["value"]
            else:
                rank.has_left = True

    def _take_sign_in(self, rank: _AgentRank, message: Mapping[str, Any]) -> None:
        host, port = message["store"]
        store, run = (str(host), int(port)), str(message["run"])
        if self._store is None:
            self._store, self._run = store, run
            self._of = int(message["of"])
            self._sign_ins_by = time.monotonic() + SIGN_INS_S
        if (store, run) != (self._store, self._run) or self._signs_in:
            self._lose(rank)
            return
        rank.sign_in = message["sign_in"]

    def _all_are_here(self) -> bool:
        ready = sum(rank.sign_in is not None for rank in self._ranks)
        return ready >= self._of > 0 or (ready > 0 and time.monotonic() >= self._sign_ins_by)

    def _tell(self, rank: _AgentRank, message: Mapping[str, Any]) -> None:
        try:
            rank.connection.send(message)
        except AgentLost:
            self._lose(rank)

    def _lose(self, rank: _AgentRank) -> None:
        rank.connection.close()
        if rank in self._ranks:
            self._ranks.remove(rank)

    # -- the store ------------------------------------------------------------------------------

    def _ask(
        self, thread: _StoreThread, work: Callable[[ControlStore], Any], then: Callable[[Any], None]
    ) -> None:
        def over(future: Future[Any]) -> None:
            self._done.put((future, then))
            os.write(self._waker, b"\0")

        thread.do(work).add_done_callback(over)

    def _take_results(self) -> None:
        while not self._done.empty():
            future, then = self._done.get()
            then(future.result())
        if select.select([self._wake], [], [], 0)[0]:
            os.read(self._wake, 1 << 12)

    def _sign_in(self) -> None:
        self._signs_in = True
        for rank in [rank for rank in self._ranks if rank.sign_in is None]:
            self._lose(rank)
        if len(self._ranks) > AGENT_RANKS_MAX:
            raise ValueError(f"{len(self._ranks)} ranks, more than {AGENT_RANKS_MAX}")
        ranks = list(self._ranks)
        batch = batch_of_sign_ins([rank.sign_in for rank in ranks])
        _check_size(batch, SIGN_IN_MAX)

        def work(box: ControlStore) -> int:
            first = box.add("seats", len(ranks)) - len(ranks)
            box.put(f"seat/{first}", batch)
            return first

        def then(first: int) -> None:
            self._first = first
            for seat, rank in enumerate(ranks, first):
                rank.seat = seat
                self._tell(rank, {"seat": seat})

        self._ask(self._main, work, then)

    def _want(self, rank: _AgentRank, key: str, patience_s: float) -> None:
        """Read a message of rank 0, once for all that want it."""
        if key.startswith(_ORDER):
            rank.at = max(rank.at, int(key.split("/")[1]))
        if key in self._read:
            self._tell(rank, {"key": key, "value": self._read[key]})
            return
        if key in self._wanted:
            self._wanted[key].append(rank)
            return
        self._wanted[key] = [rank]

        def work(box: ControlStore) -> dict[str, Any]:
            try:
                return {"key": key, "value": box.get(key, patience_s)}
            except StoreTimeout:
                return {"key": key}

        def then(told: dict[str, Any]) -> None:
            if "value" in told:
                self._read[key] = told["value"]
                if key.startswith(_ORDER):
                    self._note_limit(int(key.split("/")[1]), told["value"])
            for each in self._wanted.pop(key):
                self._tell(each, told)

        self._ask(self._thread_for(key), work, then)

    def _thread_for(self, key: str) -> _StoreThread:
        """The thread that reads a message. A rank may wait for the next order on its page, while
        another has yet to read the last one on its own: neither is to be behind the other.
        """
        page = key.partition("/page/")[2]
        if not key.startswith(_ORDER) or key.endswith("/shared"):
            return self._main
        return self._of_pages.setdefault(page, _StoreThread(self._box))

    def _note_limit(self, number: int, order: Any) -> None:
        """Note until when the answers of a round are waited for."""
        seconds = order.get("deadline_s") if isinstance(order, dict) else None
        if isinstance(seconds, (int, float)):
            limit = time.monotonic() + seconds + SETTLE_S - MARGIN_S
            self._limits.setdefault(number, limit)

    def _post_answers(self) -> None:
        """Post the answers of a round once all have given theirs, or take no part in it."""
        if self._first is None:
            return
        for number in sorted(self._answers):
            answers, is_late = self._answers[number], number in self._posted
            thinking = any(
                rank.seat not in answers and rank.at <= number and not rank.has_left
                for rank in self._ranks
            )
            if thinking and not is_late and time.monotonic() < self._limits.get(number, math.inf):
                continue
            del self._answers[number]
            self._posted.add(number)
            batches = {answers_key(number, self._first): batch_of_answers(answers)}
            _check_size(batches, BATCH_MAX)
            if is_late:
                batches = {f"{_ANSWER}{number}/{seat}": each for seat, each in answers.items()}
            self._put(batches, [f"{_ANSWER}{number}/{seat}" for seat in answers])

    def _post_goodbye(self) -> None:
        """Say goodbye for all, once all have."""
        if self._first is None or self._has_left or not self._ranks:
            return
        if all(rank.has_left for rank in self._ranks):
            self._has_left = True
            byes = [f"bye/{rank.seat}" for rank in self._ranks]
            self._put({f"bye/{self._first}": True}, byes)

    def _put(self, batches: Mapping[str, Any], posted: list[str]) -> None:
        """Put batches into the store, and tell the ranks which of their posts they were."""

        def work(box: ControlStore) -> None:
            for key, value in batches.items():
                box.put(key, value)

        def then(_: Any) -> None:
            for rank in list(self._ranks):
                for key in posted:
                    if key.endswith(f"/{rank.seat}"):
                        self._tell(rank, {"posted": key})

        self._ask(self._main, work, then)


def _check_size(batch: Any, largest: int) -> None:
    """Raises ValueError for a batch that rank 0 would not take."""
    if (size := len(json.dumps(batch))) > largest:
        raise ValueError(f"a batch of {size} bytes, more than {largest}")
