"""Pauses between two looks into the store, of one participant and of thousands."""

from __future__ import annotations

from itertools import pairwise

import pytest

from nccl_doctor.gather.examine import pause_between_looks
from nccl_doctor.gather.store_client import FIRST_PAUSE_S, next_pause


def looks(wait_s: float) -> list[float]:
    """Moments of the looks in a wait of so many seconds."""
    moments, pause = [0.0], FIRST_PAUSE_S
    while moments[-1] < wait_s:
        moments.append(moments[-1] + pause)
        pause = next_pause(pause, moments[-1])
    return moments


def test_an_answer_that_comes_at_once_is_seen_at_once():
    assert max(b - a for a, b in pairwise(looks(1.0))) < 0.04
    assert looks(1.0)[5] < 0.03


def test_a_long_wait_looks_rarely_and_sees_the_answer_in_a_tenth_of_a_second():
    moments = looks(30.0)
    assert max(b - a for a, b in pairwise(moments)) < 0.11
    assert len(moments) < 400


def test_an_answer_is_seen_soon_for_the_time_that_it_took():
    assert all(b - a < 0.04 or b - a < a * 0.04 for a, b in pairwise(looks(30.0)))


def test_thousands_do_not_look_more_often_together_than_a_thousand():
    a_second = [ranks / pause_between_looks(ranks) for ranks in (64, 1024, 4096, 131_072)]
    assert a_second == pytest.approx([160, 2560, 2560, 2560])
    assert pause_between_looks(None) == pause_between_looks(2) < 0.5
