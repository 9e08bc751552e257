"""Timetable of measurements, in which no host has two partners at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

Meeting = tuple[int, int]
"""Two seats; the first one calls."""

Slots = list[list[Meeting]]
"""Meetings that are held one after the other; those of one slot have no seat in common."""


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
    half = len(ring) // 2
    slots: Slots = []
    for _ in range(len(ring) - 1):
        met = zip(ring[:half], reversed(ring[half:]), strict=True)
        slots.append([(a, b) for a, b in met if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    if most is None or len(slots) <= most:
        return slots
    # Neighbouring slots in pairs, so that all seats stay connected.
    starts = [2 * i * len(slots) // most for i in range((most + 1) // 2)]
    return [slots[(start + step) % len(slots)] for start in starts for step in (0, 1)][:most]


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
