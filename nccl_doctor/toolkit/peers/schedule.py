"""Schedules of the calls between hosts: every pair of a few, and some pairs of many. Pure.

The time and the data of all pairs grow with the square of the hosts. A host that is bad shows in
any of its pairs, so a few partners for each are enough to find it. A bad link between two good
hosts may be missed: each run chooses other pairs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nccl_doctor.model.cluster import Cluster, Rank
from nccl_doctor.model.findings import Level

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
    """

    seats: tuple[int, ...]
    seed: str = ""
    leaves: Mapping[int, int] = field(default_factory=dict)
    all_pairs: bool = True

    @cached_property
    def slots(self) -> Slots:
        """Meetings of all hosts: matchings in a random order, then one meeting for each two leaf
        switches that had none.
        """
        if self.all_pairs:
            return tournament(self.seats)
        mixed = random.Random(self.seed).sample(self.seats, len(self.seats))
        slots = tournament(mixed, partners_enough(len(mixed)))
        return slots + in_slots(self._between_leaves(slots))

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

    def _between_leaves(self, slots: Slots) -> list[Meeting]:
        leaf = {seat: self.leaves[seat] for seat in self.seats if seat in self.leaves}
        met = {frozenset((leaf.get(a), leaf.get(b))) for slot in slots for a, b in slot}
        below: dict[int, list[int]] = {}
        for seat, number in leaf.items():
            below.setdefault(number, []).append(seat)
        numbers = sorted(below)
        return [
            (below[one][other % len(below[one])], below[other][one % len(below[other])])
            for at, one in enumerate(numbers)
            for other in numbers[at + 1 :]
            if frozenset((one, other)) not in met
        ]

    def to_params(self) -> dict[str, Any]:
        """Parameter of a round whose participants follow it; see `schedule_of`."""
        if self.all_pairs and len(self.seats) <= ALL_PAIRS:
            return {}
        leaves = {str(seat): number for seat, number in self.leaves.items()}
        told = {"seed": self.seed, "leaves": leaves, "all_pairs": self.all_pairs}
        return {"schedule": told}


def plan_schedule(cluster: Cluster, seats: Sequence[int], most: int = ALL_PAIRS) -> Schedule:
    """Schedule of the hosts of these seats: every pair of up to `most`, or at level full."""
    ranks = {rank.seat: rank for rank in cluster.present}
    names = [leaf_switch(ranks[seat]) if seat in ranks else "" for seat in seats]
    number = {name: at for at, name in enumerate(dict.fromkeys(names))}
    known = len(number) > 1 and all(names)
    leaves = {seat: number[name] for seat, name in zip(seats, names, strict=True)} if known else {}
    every = len(seats) <= most or cluster.level is Level.FULL
    return Schedule(tuple(seats), cluster.run_id, leaves, every)


def schedule_of(group: Sequence[int], params: Mapping[str, Any]) -> Schedule | None:
    """Schedule that a round gives its participants; None where all meet at once."""
    told = params.get("schedule")
    if told is None:
        return None
    leaves = {int(seat): number for seat, number in told["leaves"].items()}
    return Schedule(tuple(group), told["seed"], leaves, told["all_pairs"])


def leaf_switch(rank: Rank) -> str:
    """Switches above the host of a rank, by SLURM_TOPOLOGY_ADDR (`s0.s4.node7`); empty if Slurm
    knows none.
    """
    if not rank.env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").endswith(".node"):
        return ""
    return rank.env.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]


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


def leave_out(meetings: Set[frozenset[int]], slots: Slots) -> Slots:
    """The slots without these meetings, and without those slots that are then empty."""
    kept = [[each for each in slot if frozenset(each) not in meetings] for slot in slots]
    return [slot for slot in kept if slot]
