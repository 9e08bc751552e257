"""Participants that a signal ended before the run did: they tell the coordinator as they leave, and
the coordinator tells all others.

Each says so in its own report and by its exit code; the report of the run must not say otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from nccl_doctor.gather.control_store import ControlStore, StoreLost, StoreTimeout
from nccl_doctor.gather.deaths import signal_in
from nccl_doctor.model.json_node import Node
from nccl_doctor.model.limits import MAX_SEATS

STOPPED = "stopped"
"""Key of a message of rank 0, in place of any other, which holds the signal that ends it."""
TELL_S = 1.0
"""Time limit for it: the others may have left already, and the store with them."""


@dataclass(frozen=True)
class Departure:
    """Seat of a participant that left, and the signal that it received."""

    seat: int
    signal: str

    @classmethod
    def from_json(cls, data: object) -> Departure:
        """Inverse of `tell`; ValueError for what it cannot have made."""
        node = Node("departure", data)
        node.number("seat", 0, MAX_SEATS)
        return cls(node.get("seat", int), signal_in(node))


def tell(box: ControlStore, seat: int, signal_name: str) -> None:
    """Tell the coordinator that this participant leaves; nothing is said if the store is gone.

    Over a connection of its own: the main thread may be stuck in the other one.
    """
    with contextlib.suppress(StoreLost):
        own = another(box)
        number = own.add("departures", 1) - 1
        own.put(f"departure/{number}", {"seat": seat, "signal": signal_name}, TELL_S)


def another(box: ControlStore) -> ControlStore:
    """Another connection to the store of the run.

    Raises:
        StoreLost: it is gone.
    """
    return ControlStore(box.host, box.port, timeout_s=TELL_S, prefix=box.prefix, seal=box.seal)


def signal_of_rank_0(data: object) -> str:
    """Signal that ended rank 0, if that is what its message says; ValueError for none of ours."""
    node = Node("rank 0", data if isinstance(data, dict) else {})
    if STOPPED not in node.data:
        return ""
    return signal_in(Node("rank 0", {"signal": node.data[STOPPED]}))


def departures(box: ControlStore, most: int) -> Iterator[Departure]:
    """Departures that reached the store of the run, `most` at most: anybody can raise their number.

    Raises:
        StoreLost: the store broke off.
    """
    for number in range(min(box.add("departures", 0), most)):
        key = f"departure/{number}"
        if box.wait([key], 0.0):
            with contextlib.suppress(ValueError, StoreTimeout):  # it is no record of ours
                yield Departure.from_json(box.get(key, 0.0))
