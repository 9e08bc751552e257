"""Do several workers get the tests as `tests/conftest.py` asks for?"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nccl_doctor.system.helpers import leave_by, send


def test_the_tests_of_a_module_go_to_one_worker(request: pytest.FixtureRequest) -> None:
    """pytest-xdist tells its scheduler the group by the id; other releases of pytest ignore it."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process has all tests")
    assert request.node.nodeid.endswith("@test_workers")


def test_a_test_may_say_when_its_process_is_to_be_gone() -> None:
    leave_by(time.monotonic())


def test_the_next_one_still_waits_for_disks(tmp_path: Path) -> None:
    assert send(tmp_path, lambda: b"there") == b"there"
