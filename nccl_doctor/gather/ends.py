"""Ends of participants before the run is over: killed, left by a signal, or silent.

Else the coordinator would wait for an answer until a deadline, and then know only that none came.
The records lie in the store of the run: who can write there can also sign in.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from nccl_doctor.gather.context import Key
from nccl_doctor.gather.envelope import OPEN, Seal
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.examine import below_round
from nccl_doctor.gather.messages import SignIn
from nccl_doctor.gather.opening import MEETING, opened, prefix_of
from nccl_doctor.gather.peers import say_left
from nccl_doctor.gather.store import ControlStore, StoreLost, StoreTimeout
from nccl_doctor.launch import identity
from nccl_doctor.model.check import Check
from nccl_doctor.model.codec import MAX_PID, MAX_SEATS, Node, Number, between, decode
from nccl_doctor.model.findings import Round
from nccl_doctor.model.layout import Address
from nccl_doctor.toolkit.net.sock_diag import connections_at

KILLED_TELL_S = 4.0
"""Time limit to reach the store: the process that tells it delays the end of another."""
LOOK_S = 0.25
_MOST = 10_000
_NAME = 20


def death_of(pid: int, rank: int | None, signal_name: str) -> dict[str, Any]:
    """Record of the death of a process of this host, as the store has it."""
    return {"pid": pid, "rank": rank, "signal": signal_name, "host": identity.host_key()}


def tell_killed(
    meeting: Address, death: Mapping[str, Any], key: Key | None = None, run_id: str = ""
) -> None:
    """Tell the coordinator that a participant was killed. `run_id` is the run that it signed in
    for; by default the one that is open.

    Raises:
        StoreLost: the store cannot be reached.
        StoreTimeout, BadMessage: the run was not opened by somebody who has the key.
    """
    seal = Seal(key.secret) if key else OPEN
    store = ControlStore(*meeting, timeout_s=KILLED_TELL_S, prefix=MEETING, seal=seal)
    run_id = run_id or opened(store, KILLED_TELL_S)
    box = store.beside(prefix_of(run_id), seal_of(key, run_id))
    box.put(f"death/{box.add('deaths', 1) - 1}", dict(death), KILLED_TELL_S)


def seal_of(key: Key | None, run_id: str) -> Seal:
    """Seal of the messages of a run: with a key of a file, which other runs have too, its name is
    part of it.
    """
    if key is None:
        return OPEN
    return Seal(key.secret, run_id if key.lasts else "")


def _signal_name(name: str) -> str:
    if not name.startswith(("SIG", "signal ")) or len(name) > _NAME:
        raise ValueError(" is no name of a signal")
    return name


SignalName = Annotated[str, _signal_name]


@dataclass(frozen=True)
class Death:
    """Process that was killed: the key of its host, its id and rank, and the signal."""

    host: str
    pid: Annotated[int, between(0, MAX_PID)]
    rank: Number | None
    signal: SignalName


class Deaths:
    """Deaths that parents reported; the coordinator looks for news while it waits for others."""

    def __init__(self, box: ControlStore, evidence: EvidenceLog) -> None:
        self._box = box
        self._evidence = evidence
        self._deaths: list[Death] = []
        self._replaced: Counter[tuple[str, int]] = Counter()
        self._read = 0
        self._next = 0.0

    @property
    def ranks(self) -> set[int]:
        """Ranks that were killed."""
        return {death.rank for death in self._deaths if death.rank is not None}

    def of(self, seat: int) -> str | None:
        """Signal that killed a participant, or None."""
        who = self._evidence.who(seat) if self._deaths else None
        if who is None:
            return None
        killed = (who.host_key, who.pid)
        signals = [each.signal for each in self._deaths if (each.host, each.pid) == killed]
        return signals[-1] if len(signals) > self._replaced[killed] else None

    def replaced(self, who: SignIn) -> None:
        """Take a later start of this participant, whose place it has, for another process, even if
        it has the same process id, as in a container that was started again.
        """
        self._replaced[who.host_key, who.pid] += 1

    def look(self) -> bool:
        """Look into the store, some times a second. Returns whether there is news."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK_S
        known = self._read
        number = min(self._box.add("deaths", 0), _MOST)
        while self._read < number and self._box.wait([f"death/{self._read}"], 0.0):
            key = f"death/{self._read}"
            self._read += 1
            with contextlib.suppress(ValueError, StoreTimeout):  # it is no record of ours
                self._deaths.append(decode(Death, Node("death", self._box.get(key, 0.0))))
        return self._read > known


# Participants that a signal ended before the run did: they tell the coordinator as they leave,
# and the coordinator tells all others.
#
# Each says so in its own report and by its exit code; the report of the run must not say
# otherwise.


LEFT_TELL_S = 1.0
"""Time limit for it: the others may have left already, and the store with them."""


class Stop(NamedTuple):
    """Message of rank 0, in place of any other: the signal that ends it."""

    stopped: SignalName = ""


@dataclass(frozen=True)
class Departure:
    """Seat of a participant that left, and the signal that it received."""

    seat: Annotated[int, between(0, MAX_SEATS)]
    signal: SignalName


def tell_left(box: ControlStore, seat: int, signal_name: str) -> None:
    """Tell the coordinator that this participant leaves; nothing is said if the store is gone.

    Over a connection of its own: the main thread may be stuck in the other one.
    """
    with contextlib.suppress(StoreLost):
        own = another_connection(box)
        number = own.add("departures", 1) - 1
        own.put(f"departure/{number}", {"seat": seat, "signal": signal_name}, LEFT_TELL_S)


def another_connection(box: ControlStore) -> ControlStore:
    """Another connection to the store of the run.

    Raises:
        StoreLost: it is gone.
    """
    return ControlStore(box.host, box.port, timeout_s=LEFT_TELL_S, prefix=box.prefix, seal=box.seal)


def signal_of_rank_0(data: object) -> str:
    """Signal that ended rank 0, if that is what its message says; ValueError for none of ours."""
    return decode(Stop, Node("rank 0", data if isinstance(data, dict) else {})).stopped


def departures(box: ControlStore, most: int) -> Iterator[Departure]:
    """Departures that reached the store of the run, `most` at most: anybody can raise their number.

    Raises:
        StoreLost: the store broke off.
    """
    for number in range(min(box.add("departures", 0), most)):
        key = f"departure/{number}"
        if box.wait([key], 0.0):
            with contextlib.suppress(ValueError, StoreTimeout):  # it is no record of ours
                yield decode(Departure, Node("departure", box.get(key, 0.0)))


# Watch for hosts in a round that no longer ask the store for anything: dead, stopped or cut off.
#
# Who takes part asks several times a second whether the round is over (`examine.hold`). On the
# host of the store the kernel tells for each connection how long ago something came in. So a host
# whose processes are stopped, killed or cut off is known without a message more, and long before
# the deadline of a round in which all others wait for it.


QUIET_S = 10.0
"""Longer than a question is under way on a road that loses a quarter of its segments."""
_LOOK_S = 1.0
_MOST_RANKS = 1024
"""With more, each asks less often, and a look takes tenths of a second."""


class Heartbeats:
    """The members of a round of whose hosts the store has heard nothing for too long.

    A host that was never heard may have other addresses than it tells, and is not one of them.
    """

    def __init__(self, box: ControlStore, evidence: EvidenceLog, quiet_s: float = QUIET_S) -> None:
        self._box = box
        self._quiet_s = quiet_s
        self._evidence = evidence
        self._is_near = identity.is_this_host(box.host)
        self._heard: dict[str, float] = {}
        self._next = 0.0
        self._round: tuple[Check, Round] | None = None
        self._began = 0.0
        self.seats: frozenset[int] = frozenset()
        """As of the last look; of one that is heard again, the answer is waited for."""

    def begin(self, check: Check, round_: Round) -> None:
        """Watch the members of this round from now on."""
        self._round, self._began, self.seats = (check, round_), time.monotonic(), frozenset()

    def look(self) -> bool:
        """Ask the kernel, at most once a second, and tell the others of their groups, so that
        nobody waits for what the quiet ones would have posted. Returns: whether there are more.
        """
        now = time.monotonic()
        if now < self._next or not self._is_near or len(self._evidence.seats) > _MOST_RANKS:
            return False
        self._next = now + _LOOK_S
        owners, told = self._owners(), connections_at(self._box.port)
        for each in told:
            if host := owners.get(each.remote):
                self._heard[host] = max(self._heard.get(host, 0.0), now - each.silent_s)
        if self._round is None or not told:  # not even our own: the kernel does not answer
            return False
        check, round_ = self._round
        members = (seat for group in round_.groups for seat in group)
        before, self.seats = self.seats, frozenset(s for s in members if self._is_quiet(s, now))
        for group in round_.groups:
            for seat in (self.seats - before) & set(group):
                say_left(self._box, below_round(check, round_, group), seat)
        return not self.seats <= before

    def _is_quiet(self, seat: int, now: float) -> bool:
        who = self._evidence.who(seat)
        if who is None or who.host_key not in self._heard:
            return False
        return now - max(self._heard[who.host_key], self._began) > self._quiet_s

    def _owners(self) -> Mapping[str, str]:
        """Address → the key of the one host that has it, if it is not this one."""
        keys: dict[str, set[str]] = defaultdict(set)
        for seat in self._evidence.seats:
            if who := self._evidence.who(seat):
                for address in who.addresses:
                    keys[address].add(who.host_key)
        own = identity.host_key()
        return {a: key for a, found in keys.items() if len(found) == 1 for key in found - {own}}
