"""Garbage is looked for rarely while much is read, and as before afterwards."""

from __future__ import annotations

import gc

import pytest

from nccl_doctor.toolkit.garbage import collected_rarely


def test_the_thresholds_come_back_after_an_error_too() -> None:
    before = gc.get_threshold()
    with collected_rarely():
        assert gc.get_threshold()[0] > 10 * before[0]
    assert gc.get_threshold() == before
    with pytest.raises(KeyError), collected_rarely():
        {}["broken"]
    assert gc.get_threshold() == before
