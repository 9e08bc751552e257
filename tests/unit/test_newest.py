"""What `make test-newest` compares the index with."""

from __future__ import annotations

from scripts.newest import PACKAGES, failed_tests, pins


def test_every_package_that_is_tried_is_pinned() -> None:
    pinned = pins()
    assert set(PACKAGES) <= set(pinned)
    assert "mkdocs-material" not in pinned, "two pins, by the release of Python"


def test_failed_tests_are_named() -> None:
    told = "FAILED tests/unit/test_a.py::test_b[1] - assert 0\nERROR tests/unit/c.py\n1 failed"
    assert failed_tests(told) == ["tests/unit/test_a.py::test_b[1]", "tests/unit/c.py"]
