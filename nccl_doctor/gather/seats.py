"""Seats of participants, which a counter gives out; who knows its name can change it.

A number that cannot be, or that another one has, is not taken: a participant then takes one that
nobody else comes to, and rank 0 looks there too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from nccl_doctor.gather.envelope import BadMessage
from nccl_doctor.gather.messages import SignIn
from nccl_doctor.gather.opening import name_in, prefix_of
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.model.launch import Launch

SPARE_SEATS = 64
"""Participants more than twice the ranks: latecomers and doubles, and each is a fact."""


def most_seats(launch: Launch) -> int:
    """Most seats of a job."""
    return 2 * size_of(launch) + SPARE_SEATS


def size_of(launch: Launch) -> int:
    """Number of ranks of a job, or else of its hosts."""
    return launch.world_size or launch.nnodes or 0


def take_seat(box: ControlStore, launch: Launch) -> int:
    """Take a free seat; returns its number."""
    seat = box.add("seats", 1) - 1
    if 0 <= seat < most_seats(launch) and not box.wait([f"seat/{seat}"], 0.0):
        return seat
    first = size_of(launch) + (launch.rank or launch.node_rank or 0)
    seat = next(seat for seat in count(first) if not box.wait([f"seat/{seat}"], 0.0))
    if 0 <= (number := box.add("seats", 0)) <= seat:  # else rank 0 looks everywhere
        box.add("seats", seat + 1 - number)
    return seat


def claims(meeting: ControlStore, who: SignIn) -> Callable[[BadMessage], None]:
    """Function that says, in a run which is opened without the same key or version, who this is;
    once in each: rank 0 reads it, and cannot take more of it.
    """
    launch = replace(who.launch, sources={}, problems=())
    claim = replace(who, launch=launch, addresses=(), env={}, joining={}, facts={}).to_json()
    told: set[str] = set()

    def refused(error: BadMessage) -> None:
        name = name_in(error.value)
        if name and name not in told:
            told.add(name)
            box = meeting.public().beside(prefix_of(name), meeting.seal)
            seat = box.add("seats", 1) - 1
            box.put(f"seat/{seat}", claim)
            box.put(f"bye/{seat}", True)

    return refused
