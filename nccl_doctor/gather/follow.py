"""Following the coordinator: learn who is in, take part in its rounds, until it ends the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from nccl_doctor.gather.context import Run
from nccl_doctor.gather.ends import signal_of_rank_0
from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.examine import SETTLE_S, hold, now_and_then, take_place
from nccl_doctor.gather.messages import (
    Finish,
    HostPlaces,
    Order,
    Roster,
    is_paged,
    order_from,
    own_part,
    page_of,
    whole,
)
from nccl_doctor.gather.progress import Phase
from nccl_doctor.gather.refusals import KINDS, kind_of
from nccl_doctor.gather.store import STRANGER_S, ControlStore, StoreLost, StoreTimeout
from nccl_doctor.gather.views import HostReports
from nccl_doctor.model import kinds
from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.model.codec import Node, decode
from nccl_doctor.model.findings import Kind, Round, Where
from nccl_doctor.model.launch import OWN
from nccl_doctor.system.pauses import Pauses, in_words

T = TypeVar("T")


class CannotFollow(Exception):
    """A participant cannot follow rank 0, or no longer: what it found, and where. Without a place
    it is this host; `on_road`: the link between this host and the store.
    """

    def __init__(
        self, kind: Kind, words: str, where: Where | None = None, *, on_road: bool = False
    ) -> None:
        super().__init__(words)
        self.kind, self.words, self.where, self.on_road = kind, words, where, on_road


class Stopped(CannotFollow):
    """A signal ended rank 0 of this run."""


class OpenedAgain(Exception):
    """Rank 0 has opened another run: this one is of an earlier start of the ranks."""


class Follower:
    """One participant that is not the coordinator, once it has signed in for a run."""

    def __init__(
        self, run: Run, box: ControlStore, token: str, evidence: EvidenceLog, views: HostReports
    ) -> None:
        self._run, self._box, self._token = run, box, token
        self._evidence, self._views = evidence, views
        self._again: Callable[[], bool] | None = None
        self._groups: dict[str, list[int]] = {}
        self._paged = False
        """True if an order has pages, and this participant waits for its own."""

    def watch(self, again: Callable[[], bool]) -> None:
        """Leave this run as soon as `again` is true: rank 0 has opened another one."""
        self._again = now_and_then(again, self._run.launch.world_size)

    def follow(self) -> Finish:
        """Take part in the run, to its end, which rank 0 tells; returns it.

        Raises:
            Lost: rank 0 does not answer, does not want this one, or cannot be understood.
            OpenedAgain: this participant is to sign in for another run.
            StoreLost: the store broke off.
        """
        patience = self._begin()
        number = 0
        while True:
            order = self._order(number, patience)
            if isinstance(order, Finish):
                leave(self._run, self._box)
                return order
            self._run.put_off(order.more_s)
            groups = order.round.groups  # on a page, of this seat only
            if groups if self._paged else any(self._run.seat in group for group in groups):
                outcome = self._take_part_in(order.check, order.round, number)
                self._box.put(f"evidence/{number}/{self._run.seat}", outcome.to_json())
            patience = order.next_s
            number += 1

    def _begin(self) -> float:
        """Wait until the sign-in is over; returns how long to wait for the first order."""
        run, box = self._run, self._box
        patience = run.options.join_timeout_s + 3 * SETTLE_S
        speaks_for_host = run.launch.launcher == OWN and run.launch.local_rank == 0
        for key in ("layout", "roster") if speaks_for_host else ("roster",):
            patience = min(patience, run.left())
            until = time.monotonic() + patience
            run.progress.say("signed in; waiting for the others", Phase.SIGN_IN, until)
            try:
                told = self._read(until, partial(self._places, key))
            except CannotFollow as lost:
                if isinstance(lost, Stopped) and self._again is not None:
                    self._wait_for_another_run(until)  # it was rank 0 of an earlier start
                leave(run, box)
                raise
            except StoreTimeout:
                raise CannotFollow(
                    kinds.COORDINATOR_LOST,
                    f"signed in, but rank 0 did not begin the examination within {patience:.0f} s",
                    Where(ranks=(0,)),
                ) from None
            if not told.admits(run.seat, self._token):
                if self._again is not None:
                    self._wait_for_another_run(until)
                leave(run, box)
                if reason := told.refused.get(run.seat):
                    kind = KINDS.get(reason.code, kinds.MESSAGE_REFUSED)
                    raise CannotFollow(kind, f"rank 0 did not take this sign-in: {reason.message}")
                raise CannotFollow(
                    kinds.COORDINATOR_LOST,
                    "the store at MASTER_ADDR:MASTER_PORT belongs to another run, or this "
                    "participant signed in too late",
                    on_road=True,
                )
            run.hosts = told.hosts
            if isinstance(told, HostPlaces):
                take_place(run, told.places[run.seat], box)
            else:
                run.nonce, run.backend = told.nonce, told.backend
                self._views.run_id = run.nonce
            patience = told.next_s
        return patience

    def _places(self, key: str, left_s: float) -> HostPlaces | Roster:
        """Participants that are in, and their places."""
        data = self._get(key, left_s)
        self._paged = is_paged(data)
        node = Node(f"rank 0: {key}", whole(self._box, key, data, self._run.seat))
        return decode(HostPlaces, node) if key == "layout" else decode(Roster, node)

    def _read(self, until: float, read: Callable[[float], T]) -> T:
        """A message of rank 0. What is malformed may be a stranger's: that of rank 0 takes its
        place, in time.

        Raises:
            Lost: it did not.
            StoreTimeout: nothing came.
        """
        while True:
            left_s = max(0.0, until - time.monotonic())
            try:
                return read(left_s)
            except ValueError as error:
                if not left_s:
                    raise misread(error) from error
            time.sleep(STRANGER_S)

    def _get(self, key: str, patience: float) -> Any:
        """Wait for a message of rank 0, unless another run is opened."""
        again = False

        def look() -> bool:
            nonlocal again
            again = again or (self._again is not None and self._again())
            return again

        gone = look if self._again is not None else None
        try:
            data = self._box.get(key, patience, self._run.progress.tick, leave=gone)
        except StoreTimeout:
            if again:
                raise OpenedAgain from None
            raise
        if name := signal_of_rank_0(data):
            words = f"received {name} and left before the end"
            raise Stopped(kinds.RUN_INTERRUPTED, words, Where(ranks=(0,)))
        return data

    def _wait_for_another_run(self, until: float) -> None:
        """Wait, as one that is not admitted: this is the run of an earlier start of the ranks, and
        the next one comes, or rank 0 says that this participant came too late.
        """
        left = min(until - time.monotonic(), self._run.left())
        with contextlib.suppress(StoreTimeout, BadMessage):
            self._get(f"late/{self._run.seat}", max(0.0, left))

    def _order(self, number: int, patience: float) -> Order | Finish:
        """Wait for an order."""
        run = self._run
        waits, mark = min(patience, run.left_to_follow()), Pauses.now()
        until = time.monotonic() + waits
        if number:
            run.progress.say("waiting for the next round of rank 0", until=until)

        def read(left_s: float) -> Order | Finish:
            key = f"order/{number}"
            data = self._get(page_of(key, run.seat) if self._paged else key, left_s)
            if self._paged:
                data = own_part(self._box, key, data, run.seat, self._groups)
            return order_from(data)

        try:
            return self._read(until, read)
        except Stopped:
            leave(run, self._box)
            raise
        except StoreTimeout:
            if stood_s := run.pauses.since(mark):
                words = f"no answer from rank 0, but this process itself {in_words(stood_s)}"
                raise CannotFollow(kinds.COORDINATOR_LOST, words) from None
            if waits < patience - 2 * SETTLE_S:  # it is not overdue yet
                words = "the time of this run (--timeout) was over before rank 0 ended it"
                raise CannotFollow(kinds.COORDINATOR_LOST, words, Where()) from None
            words = f"no answer from rank 0 for {waits:.0f} s"
            raise CannotFollow(kinds.COORDINATOR_LOST, words, Where(ranks=(0,))) from None

    def _take_part_in(self, name: str, round_: Round, number: int) -> Outcome:
        run, box = self._run, self._box
        check = next((check for check in run.registry.checks if check.name == name), None)
        if check is None:
            reason = f"no check {name} here: version, plug-ins or --select differ from rank 0"
            return Outcome(OutcomeStatus.UNTESTED, reason=reason)
        outcome = hold(run, box, check, round_, number=number)
        self._evidence.record(run.seat, check.name, round_.name, outcome)
        return outcome


def leave(run: Run, box: ControlStore) -> None:
    """Let rank 0 know that this participant has read what it needs: rank 0 clears the store."""
    with contextlib.suppress(StoreLost):  # the store may go as soon as it has it
        box.put(f"bye/{run.seat}", True)


def misread(error: ValueError) -> CannotFollow:
    """Reason to leave, as rank 0's messages cannot be read, or are not rank 0's."""
    kind = kind_of(error)
    store = "the store at MASTER_ADDR:MASTER_PORT belongs to another run, or a stranger writes "
    who = f"{store}there: " if kind is kinds.MESSAGE_REFUSED else "a message as of rank 0: "
    return CannotFollow(kind, f"{who}{error}")
