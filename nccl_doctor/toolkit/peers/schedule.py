"""Schedules of the calls between hosts: every pair of a few, and some pairs of many. Pure.

The time and the data of all pairs grow with the square of the hosts. A host that is bad shows in
any of its pairs, so a few partners for each are enough to find it. A bad link between two good
hosts may be missed: each run chooses other pairs.

A rail is the NIC of one number on each host: a network of its own on many clusters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.findings import Level
from nccl_doctor.toolkit.leaves import leaf_switches

ALL_PAIRS = 64
"""Hosts up to which every pair meets; above, only at level full."""
LARGE = 4
"""Matchings of many hosts in which a large message is exchanged too."""
_LEAST = 8
_MORE = 4

Meeting = tuple[int, int]
"""Two seats; the first one calls."""

Slots = list[list[Meeting]]
"""Meetings that are held one after the other; those of one slot have no seat in common."""


def partners_enough(count: int) -> int:
    """Number of partners of each of so many hosts with which all are connected, and a bad one is
    seen by many: log2 of the hosts and 4 more, 8 at least.
    """
    return max(_LEAST, math.ceil(math.log2(max(2, count))) + _MORE)


@dataclass(frozen=True)
class Schedule:
    """Schedule of many hosts, the same for all who make it from the same data.

    Attributes:
        seats: of one participant of each host.
        seed: of this run: another one has other pairs.
        leaves: seat → number of its leaf switch; empty where that is not known.
        all_pairs: whether every pair meets.
        rails: seat → numbers of its rails; empty where all have the same ones, or nobody asks.
    """

    seats: tuple[int, ...]
    seed: str = ""
    leaves: Mapping[int, int] = field(default_factory=dict)
    all_pairs: bool = True
    rails: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def slots(self) -> Slots:
        """Meetings of all hosts: matchings in a random order, then what they left out: a meeting on
        each rail of each host, and on each rail of each two leaf switches.
        """
        if self.all_pairs:
            return tournament(self.seats)
        mixed = random.Random(self.seed).sample(self.seats, len(self.seats))
        slots = tournament(mixed, partners_enough(len(mixed)))
        return slots + in_slots(self._left_out(slots))

    def partners(self, seat: int) -> dict[int, bool]:
        """Partners of a seat, in the order of its meetings, and whether a large message is for
        them too.
        """
        found: dict[int, bool] = {}
        for number, slot in enumerate(self.slots):
            for first, second in slot:
                if seat in (first, second):
                    found[second if seat == first else first] = self.all_pairs or number < LARGE
        return found

    def _left_out(self, slots: Slots) -> list[Meeting]:
        """Meetings that these slots lack; where all have the same rails, each meeting is on all."""
        met = _Met(self.leaves, self.rails)
        for slot in slots:
            for meeting in slot:
                met.add(meeting)
        having: dict[int, dict[int, list[int]]] = {}
        """Rail → leaf switch (-1: not known) → seats that have it."""
        for seat in self.seats:
            for rail in met.rails(seat):
                having.setdefault(rail, {}).setdefault(self.leaves.get(seat, -1), []).append(seat)
        more: list[Meeting] = []

        def meet(meeting: Meeting) -> None:
            more.append(meeting)
            met.add(meeting)

        for rail, below in sorted(having.items()):
            numbers = sorted(below.keys() - {-1})
            for at, one in enumerate(numbers):
                for other in numbers[at + 1 :]:
                    if (rail, one, other) not in met.leaves:
                        ours, theirs = below[one], below[other]
                        meet((ours[other % len(ours)], theirs[one % len(theirs)]))
            holders = [seat for seats in below.values() for seat in seats]
            for at, seat in enumerate(holders):
                if len(holders) > 1 and (rail, seat) not in met.ends:
                    meet((seat, holders[(at + 1) % len(holders)]))
        return more

    def to_params(self) -> dict[str, Any]:
        """Parameter of a round whose participants follow it; see `schedule_of`."""
        if self.all_pairs and len(self.seats) <= ALL_PAIRS:
            return {}
        leaves = {str(seat): number for seat, number in self.leaves.items()}
        told: dict[str, Any] = {"seed": self.seed, "leaves": leaves, "all_pairs": self.all_pairs}
        if self.rails:
            told["rails"] = {str(seat): list(rails) for seat, rails in self.rails.items()}
        return {"schedule": told}


class _Met:
    """The rails and leaf switches between which there are meetings so far."""

    def __init__(self, leaves: Mapping[int, int], rails: Mapping[int, tuple[int, ...]]) -> None:
        self._leaf, self._rails = leaves, rails
        self.ends: set[tuple[int, int]] = set()
        """(rail, seat) that met the same rail of another seat."""
        self.leaves: set[tuple[int, int, int]] = set()
        """(rail, leaf switch, another one with a greater number)."""

    def rails(self, seat: int) -> tuple[int, ...]:
        """Numbers of the rails of a seat; one for all where they are not known."""
        return self._rails.get(seat, ()) if self._rails else (0,)

    def add(self, meeting: Meeting) -> None:
        """Take note of a meeting, on every rail that both have."""
        a, b = meeting
        mine, theirs = self.rails(a), self.rails(b)
        one, other = self._leaf.get(a), self._leaf.get(b)
        for rail in mine if mine == theirs else set(mine).intersection(theirs):
            self.ends.update(((rail, a), (rail, b)))
            if one is not None and other is not None:
                self.leaves.add((rail, min(one, other), max(one, other)))


def plan_schedule(
    cluster: Cluster,
    seats: Sequence[int],
    most: int = ALL_PAIRS,
    *,
    rails: Mapping[int, tuple[int, ...]] | None = None,
    more_at_full: bool = True,
) -> Schedule:
    """Schedule of the hosts of these seats: every pair of up to `most`, or at level full.

    Args:
        cluster: whose ranks tell their leaf switches.
        seats: of one participant of each host.
        most: hosts up to which every pair meets.
        rails: seat → numbers of its rails, if they are to be tried.
        more_at_full: whether every pair meets at level full, however many there are.
    """
    every = len(seats) <= most or (more_at_full and cluster.level is Level.FULL)
    leaves, _ = leaf_switches(cluster, seats)
    if rails and len(set(rails.values())) == 1 and set(seats) <= rails.keys():
        rails = None  # each meeting is on all of them
    return Schedule(tuple(seats), cluster.run_id, leaves, every, rails or {})


def schedule_of(group: Sequence[int], params: Mapping[str, Any]) -> Schedule | None:
    """Schedule that a round gives its participants; None where all meet at once."""
    told = params.get("schedule")
    if told is None:
        return None
    leaves = {int(seat): number for seat, number in told["leaves"].items()}
    rails = {int(seat): tuple(numbers) for seat, numbers in told.get("rails", {}).items()}
    return Schedule(tuple(group), told["seed"], leaves, told["all_pairs"], rails)


def tournament(seats: Sequence[int], most: int | None = None) -> Slots:
    """Slots in which every seat meets every other once (circle method).

    Args:
        seats: of the participants.
        most: no more partners than this for each; the slots are then spread over all of them, and
            any two neighbouring slots of a tournament already connect all seats.
    """
    ring: list[int | None] = list(seats)
    if len(ring) % 2:
        ring.append(None)
    half, rounds = len(ring) // 2, max(0, len(ring) - 1)

    def slot(number: int) -> list[Meeting]:
        turned = [ring[0], *ring[rounds + 1 - number :], *ring[1 : rounds + 1 - number]]
        met = zip(turned[:half], reversed(turned[half:]), strict=True)
        return [(a, b) for a, b in met if a is not None and b is not None]

    if most is None or rounds <= most:
        return [slot(number) for number in range(rounds)]
    # Neighbouring slots in pairs, so that all seats stay connected.
    starts = [2 * i * rounds // most for i in range((most + 1) // 2)]
    return [slot((start + step) % rounds) for start in starts for step in (0, 1)][:most]


def in_slots(meetings: Iterable[Meeting]) -> Slots:
    """Slots for any meetings, each in the first slot in which both seats are free."""
    slots: Slots = []
    busy: list[set[int]] = []
    for meeting in meetings:
        free = next((i for i, seats in enumerate(busy) if seats.isdisjoint(meeting)), len(busy))
        if free == len(busy):
            busy.append(set())
            slots.append([])
        busy[free].update(meeting)
        slots[free].append(meeting)
    return slots


def in_turns(meetings: Iterable[Meeting], most: int) -> list[list[Meeting]]:
    """Meetings in turns, so that no more than `most` pairs can meet at once, however they come: no
    turn has seats for more.

    So a link that was slow only because all others were busy is not slow again (ClusterKit tests
    bad pairs again with half as many at once).
    """
    room = 2 * most + 1
    turns: list[list[Meeting]] = []
    seats: list[set[int]] = []
    for meeting in meetings:
        fits = (at for at, here in enumerate(seats) if len(here.union(meeting)) <= room)
        at = next(fits, len(turns))
        if at == len(turns):
            turns.append([])
            seats.append(set())
        turns[at].append(meeting)
        seats[at].update(meeting)
    return turns


def leave_out(meetings: Set[frozenset[int]], slots: Slots) -> Slots:
    """The slots without these meetings, and without those slots that are then empty."""
    kept = [[each for each in slot if frozenset(each) not in meetings] for slot in slots]
    return [slot for slot in kept if slot]
