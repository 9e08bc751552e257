"""A loop of calls maps no memory at every call, however deep it stands."""

from __future__ import annotations

import resource
import sys

import pytest

from nccl_doctor.toolkit.frames import with_room_for_frames

CALLS = 300
DEPTHS = range(200)


def faults_at(depth: int) -> int:
    """Page faults of a loop of calls, so many calls deep."""
    if depth:
        return faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def leaf() -> None:
    """Do nothing, in a frame larger than a step of `faults_at`, which passes over no end."""


leaf.__code__ = leaf.__code__.replace(co_stacksize=100)


def worst() -> int:
    """Page faults of the depth that has most."""
    return max(map(faults_at, DEPTHS))


def test_calls_at_every_depth_find_room() -> None:
    assert with_room_for_frames(worst) < CALLS / 10


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="as Python 3.11 keeps its frames")
def test_without_room_a_loop_maps_memory_at_every_call() -> None:
    assert worst() >= CALLS


def test_what_work_returns_and_raises_comes_through() -> None:
    assert with_room_for_frames(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        with_room_for_frames(lambda: 1 / 0)
