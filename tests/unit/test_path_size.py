"""Sizes of packets that pass, over loopback and where nothing listens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nccl_doctor.toolkit.peers.listeners import Listeners
from nccl_doctor.toolkit.peers.path_size import carried


@pytest.mark.parametrize(
    ("mtu", "largest"), [(9001, 9000), (9000, 8950), (4000, 1500), (1500, 1480), (500, 0)]
)
def test_a_path_without_a_fault_carries_the_next_smaller_size(mtu: int, largest: int) -> None:
    with Listeners(["127.0.0.1"]) as listeners:
        assert carried(listeners.doors[0], mtu) == largest


def test_where_nothing_passes_no_size_does() -> None:
    with Listeners(["127.0.0.1"]) as listeners:
        wrong = replace(listeners.doors[0], token="x" * 32)
        assert carried(wrong, 900) == 0
    assert carried(listeners.doors[0], 900) == 0  # closed
