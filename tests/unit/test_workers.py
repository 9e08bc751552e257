"""Do several workers get the tests as `tests/conftest.py` asks for?"""

from __future__ import annotations

import pytest


def test_the_tests_of_a_module_go_to_one_worker(request: pytest.FixtureRequest) -> None:
    """pytest-xdist tells its scheduler the group by the id; other releases of pytest ignore it."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process has all tests")
    assert request.node.nodeid.endswith("@test_workers")
