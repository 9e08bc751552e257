"""Sign-in on the coordinator: wait for every host, place the ranks, and wait for the ranks.

A launcher has laid the ranks out already; then only ranks are awaited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor import __version__
from nccl_doctor.gather.agent.batches import Agents, is_of_agent, refused_in, sign_ins_in
from nccl_doctor.gather.context import Run
from nccl_doctor.gather.ends import Deaths
from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.examine import SETTLE_S, take_place
from nccl_doctor.gather.messages import SIGN_IN_MAX, Claimant, HostPlaces, Postings, Roster, SignIn
from nccl_doctor.gather.opening import RivalCheck
from nccl_doctor.gather.progress import Phase, rows_of_sign_in
from nccl_doctor.gather.refusals import kind_of
from nccl_doctor.gather.rounds import WITNESSES
from nccl_doctor.gather.seats import most_seats
from nccl_doctor.gather.store import OPERATION_S, ControlStore, StoreTimeout
from nccl_doctor.gather.store_client import FIRST_PAUSE_S, next_pause
from nccl_doctor.launch import identity
from nccl_doctor.model.codec import MAX_RANKS
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.model.layout import (
    Claim,
    Layout,
    agree,
    backend_of_all,
    elastic_size,
    lay_out,
)
from nccl_doctor.system.pauses import Pauses

LEAST_S = 1.0
"""Least time for the others to sign in, however long this host was busy before."""
RANKS_S = 15.0
"""Time limit for the other ranks of a host that has signed in: they are forked, not started."""
DISAGREE_S = 2.0
"""Time to wait when as many hosts are here as any of them expects, but they contradict each other:
longer waiting can only show more contradictions."""
STRANGERS_S, _AGAIN_S = 0.15, 0.5
"""Time in all for messages that only say that they are sealed; and until one is read again."""
_SMALL = 200 << 10
"""Largest sign-in after that time, in bytes of JSON."""
_EVERYWHERE_S = 1.0
"""Time between two looks for sign-ins at all seats, where agents sign in for several."""


class Join:
    """Sign-in phase of one run, on the coordinator."""

    def __init__(
        self,
        run: Run,
        box: ControlStore,
        evidence: EvidenceLog,
        deaths: Deaths,
        rivals: RivalCheck,
        *,
        posted: Postings,
        agents: Agents,
    ) -> None:
        self._run = run
        self._box = box
        self._posted = posted
        self._agents = agents
        self._evidence = evidence
        self._deaths = deaths
        self._rivals = rivals
        self._opened = 0.0
        self.until = 0.0
        """The `time.monotonic()` second at which the join time-out ends."""
        self._restarted: set[int] = set()
        self.stood_still_s = 0.0
        """Seconds of the sign-in in which this process stood still, if somebody is missing."""
        self._open = True
        """True if no place has been given for good yet."""
        self._refused = (0, 0.0)
        self._again_s: dict[str, float] = {}
        self._strangers_s = 0.0
        self._is_near = identity.is_this_host(box.host)
        self.cut_short = False
        """True if the time of the run ended it: who is missing then was not waited for."""
        self._size = grown((run.launch.nnodes or 1, 1), run.launch)
        self._in_a_batch = 1
        """Sign-ins in the last batch of an agent."""
        self._everywhere_s = 0.0
        self._not_before = 0.0
        """The `time.monotonic()` second of the last look at all seats: what is read now was not
        there then. How long reading takes is nobody's lateness."""

    def call(self) -> None:
        """Wait for all or until the join time-out, then send the list of those that are in.

        Raises:
            StoreLost: the store broke off.
        """
        run = self._run
        run.progress.people(lambda: rows_of_sign_in(self._evidence, named=not run.options.redact))
        self._opened = self._not_before = time.monotonic()
        patience = run.options.join_timeout_s
        if run.launch.launcher == OWN:  # counted from the start of this host, as on all others
            patience = max(patience - (self._opened - run.config.started), LEAST_S)
        self.until = until = self._until(patience)
        if run.launch.launcher == OWN:
            layout = self._call_hosts(until)
            patience = RANKS_S
            until = self._until(patience)
            awaited = layout.ranks_here
            heads = sum(place.nproc for place in layout.seats.values())
        else:
            awaited = set(range(run.launch.world_size or 0))
            heads = 0

        def missing() -> set[int]:
            return awaited - self._evidence.ranks_here()

        came = self._wait(
            until,
            # Heads are counted too: of hosts that claim one node rank, all ranks are to sign in.
            # Of those that were killed as they started, nobody signs in.
            lambda: (
                (
                    not missing() - self._deaths.ranks
                    and len(self._evidence.seats)
                    + len(missing() & self._deaths.ranks)
                    + self._evidence.refusals.count
                    >= heads
                )
                or self._refused_for(lambda: self._evidence.refusals.stand_for(missing()))
            ),
        )
        self.cut_short = self.cut_short or (not came and not run.left())
        self._open = False
        # Not by this host alone: if it has lost its GPUs, the job will still want them.
        run.backend = backend_of_all(self._evidence.backends(), run.backend)
        roster = Roster(
            self._tokens(),
            run.nonce,
            run.backend,
            next_s=SETTLE_S + OPERATION_S + run.between_orders(),
            hosts=self._evidence.some_hosts(WITNESSES),
            refused=self._evidence.refusals.reasons(),
        )
        self._posted.seats("roster", roster)

    def latecomers(self) -> set[int]:
        """Seats that signed in after the end of the sign-in: they took no part, but each is a fact
        (a duplicate, for example).
        """
        before = set(self._evidence.seats)
        self._admit(everywhere=True)
        return set(self._evidence.seats) - before

    def _call_hosts(self, until: float) -> Layout:
        run = self._run
        nnodes = run.launch.nnodes or 1
        awaited = set(range(nnodes)) - set(run.options.absent_nodes)
        settled: list[float] = []

        def nobody_else() -> bool:
            here = {claim.node_rank for claim in self._claims()}
            return self._evidence.refusals.stand_for((), awaited - here)

        def complete() -> bool:
            claims = self._claims()
            if self._refused_for(nobody_else):
                return True
            if agree(claims, nnodes):
                return len(claims) == nnodes or awaited <= {claim.node_rank for claim in claims}
            if len(claims) >= min(nnodes, *(claim.nnodes for claim in claims)):
                settled.append(time.monotonic())
            return bool(settled) and time.monotonic() > settled[0] + DISAGREE_S

        came = self._wait(until, complete)
        self.cut_short = not came and not run.left()
        self._open = False
        claims, elastic = self._claims(), 0
        if run.options.job.elastic is not None:
            least, _ = run.options.job.elastic
            elastic = elastic_size(claims, nnodes, least, self._evidence.refusals.count)
        layout = lay_out(claims, nnodes, elastic)
        waited_s = None
        if run.options.absent_nodes:  # the report says how long they were waited for: not so long
            waited_s = round(time.monotonic() - run.config.started, 1)
        self._evidence.lay_out(layout, waited_s)
        places = HostPlaces(
            layout.seats,
            self._tokens(),
            next_s=RANKS_S + 2 * SETTLE_S + run.between_orders(),
            hosts=self._evidence.some_hosts(WITNESSES),
            refused=self._evidence.refusals.reasons(),
        )
        self._posted.seats("layout", places)
        if not self.cut_short:  # else the other ranks of this host would be started to end at once
            take_place(self._run, layout.seats[self._run.seat], self._box)
        return layout

    def _claims(self) -> Sequence[Claim]:
        """Claims of all hosts that are here, the coordinator's first."""
        claims = [
            Claim(seat, launch.node_rank, launch.nnodes or 1, launch.local_world_size or 1)
            for seat, launch in self._evidence.launches().items()
            if launch.launcher == OWN
        ]
        return sorted(claims, key=lambda claim: (claim.seat != self._run.seat, claim.seat))

    def _until(self, patience_s: float) -> float:
        """The `time.monotonic()` second at which such a wait ends: not after the run itself."""
        return time.monotonic() + min(patience_s, self._run.left())

    def _wait(self, until: float, complete: Callable[[], bool]) -> bool:
        """Take sign-ins until all have come, or the time is over; returns whether they came."""
        began, pause, mark = time.monotonic(), FIRST_PAUSE_S, Pauses.now()
        waits_more = True
        while True:
            looked = time.monotonic() - self._strangers_s
            has_news = self._admit(everywhere=time.monotonic() >= until)
            self._deaths.look()
            self._rivals.answer()
            if time.monotonic() >= until:
                if complete():
                    return True
                stood_s = self._run.pauses.since(mark)
                if not (stood_s and waits_more):
                    self.stood_still_s += stood_s
                    return False
                until, waits_more = self._until(stood_s), False
            if complete() and not self._rivals.awaits(self._tokens().values()):
                return True
            who = self._evidence.not_here() or "others: those that are here contradict each other"
            self._run.progress.say(f"waiting for {who}", Phase.SIGN_IN, until)
            # With thousands, a look that finds nothing takes longer than the pause.
            took_s = time.monotonic() - self._strangers_s - looked
            rest = pause if has_news else max(pause, took_s)
            time.sleep(min(rest, max(0.0, until - time.monotonic())))
            pause = next_pause(pause, time.monotonic() - began)

    def _admit(self, *, everywhere: bool = False) -> bool:
        """Take the sign-ins that have come since the last look. Returns: whether any has."""
        has_news = False
        while True:
            began, step = time.monotonic(), self._in_a_batch
            everywhere = everywhere or step == 1 or began >= self._everywhere_s
            awaited = {
                f"seat/{seat}": seat for seat in self._unknown_seats(1 if everywhere else step)
            }
            there = self._box.wait(awaited, 0.0) if awaited else set()
            if everywhere:
                took_s = time.monotonic() - began
                self._everywhere_s = time.monotonic() + max(_EVERYWHERE_S, 10 * took_s)
            self._admit_those({key: awaited[key] for key in there})
            if everywhere:
                self._not_before = began
            is_news = any(self._is_known(awaited[key]) for key in there)
            has_news = has_news or is_news
            if everywhere or not is_news:
                return has_news

    def _is_known(self, seat: int) -> bool:
        known = self._evidence.knows(seat) or seat in self._restarted
        return known or self._evidence.refusals.knows(f"seat/{seat}")

    def _unknown_seats(self, step: int) -> Iterator[int]:
        """Unknown seats that may hold a sign-in: the first of each row, and those at this distance
        from it, as what an agent says stands at the first one of its seats.
        """
        first = last = -2
        for seat in range(self._seats()):
            if not self._is_known(seat):
                first, last = first if seat == last + 1 else seat, seat
                if (seat - first) % step == 0:
                    yield seat

    def _admit_those(self, there: Mapping[str, int]) -> None:
        """Take the sign-ins below these keys, each with its first seat."""
        refusals = self._evidence.refusals
        there = {key: seat for key, seat in there.items() if self._may_look(key)}
        began = time.monotonic()
        many = self._box.many(there) if there and self._is_near else {}
        for key, first in sorted(there.items(), key=lambda item: item[0] not in many):
            try:
                batch = self._read(key, many)
                sign_ins = sign_ins_in(first, batch, self._agents.known)
            except BadMessage as error:
                if self._run.config.key:
                    self._refuse(key, error)
                    self._strangers_s += time.monotonic() - began
                    began = time.monotonic()
                    continue
                for seat, reason in refused_in(first, error):
                    refusals.sign_in(f"seat/{seat}", reason)
            except ValueError as error:
                refusals.claim(key, error, Claimant())
            except StoreTimeout:  # somebody took it away again
                continue
            else:
                alone = not is_of_agent(batch)
                taken = [s for s, data in sign_ins if self._take(s, data, key, alone=alone)]
                if not alone:
                    self._agents.add(first, taken)
                    self._in_a_batch = len(sign_ins)

    def _take(self, seat: int, data: Any, key: str, *, alone: bool) -> bool:
        """Take a sign-in of the batch `key`. Returns: whether it is a new one.

        One that stands `alone` counts more than one by an agent: its sender did not hear of that.
        """
        evidence, refusals = self._evidence, self._evidence.refusals
        try:
            who = SignIn.from_json(seat, data)
            before = evidence.seat_of(who.token)
            if evidence.has_been(who) or (before is not None and not alone):
                self._restarted.add(seat)
                return False
            self._size = grown(self._size, who.launch)
        except ValueError as error:
            refusals.claim(f"seat/{seat}", error, Claimant.of(data))
            return False
        if self._open and before is not None:
            self._restarted.add(before)
            evidence.forget(before)
        elif self._open and (gone := evidence.give_way(who)):
            self._restarted.add(gone[0])
            self._deaths.replaced(gone[1])
        evidence.sign_in(seat, who, self._not_before - self._opened)
        if (version := self._box.versions[key]) != __version__:
            refusals.version(f"seat/{seat}", version, evidence.place(seat))
        return True

    def _may_look(self, key: str) -> bool:
        """True to read a sign-in: not soon again, nor too often, where it had no seal."""
        again_s = self._again_s.get(key)
        is_soon = again_s is not None and time.monotonic() < again_s
        return again_s is None or not (is_soon or self._strangers_s > STRANGERS_S)

    def _refuse(self, key: str, error: BadMessage) -> None:
        """Take a message for a stranger's. With a key it is none: it shortens no wait, and what is
        sealed takes its place.
        """
        if self._run.config.key:
            self._evidence.refusals.unsealed(
                key, kind_of(error), str(error), Claimant.of(error.value)
            )
            self._again_s[key] = time.monotonic() + _AGAIN_S
        else:
            self._evidence.refusals.claim(key, error, Claimant())

    def _read(self, key: str, many: Mapping[str, bytes]) -> Any:
        """A sign-in; `many` are the bytes of those that were read already."""
        if key in many:
            return self._box.opened(key, many[key], SIGN_IN_MAX)
        largest = SIGN_IN_MAX if self._strangers_s < STRANGERS_S else _SMALL
        return self._box.get(key, 0.0, largest=largest)

    def _seats(self) -> int:
        """Number of seats that were given out, bounded: anybody can change it."""
        count, launch = self._box.add("seats", 0), self._run.launch
        most, known = most_seats(launch), max(self._evidence.seats, default=-1)
        if known < count <= most:
            return count
        words = f"the number of participants in the store is {count}, for {launch.world_size} ranks"
        self._refuse("seats", BadMessage(words))
        return most

    def _refused_for(self, nobody_else: Callable[[], bool]) -> bool:
        """True if all that are missing were refused, and none came in some seconds since."""
        count = self._evidence.refusals.count
        if count != self._refused[0]:
            self._refused = (count, time.monotonic())
        return bool(count and time.monotonic() > self._refused[1] + DISAGREE_S and nobody_else())

    def _tokens(self) -> dict[int, str]:
        return {seat: self._evidence.token(seat) for seat in self._evidence.seats}


def grown(size: tuple[int, int], launch: Launch) -> tuple[int, int]:
    """Most nodes, and most ranks on one of them, with one more host of the own launcher.

    Raises:
        ValueError: so many ranks are not examined.
    """
    if launch.launcher != OWN:
        return size
    nodes = max(size[0], (launch.node_rank or 0) + 1)
    local = max(size[1], launch.local_world_size or 1)
    if nodes * local > MAX_RANKS:
        raise ValueError(
            f"node rank {launch.node_rank} with {launch.local_world_size} ranks, beside "
            f"{size[0]} nodes with up to {size[1]}: more than {MAX_RANKS} ranks"
        )
    return nodes, local
