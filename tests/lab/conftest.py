"""Lab tests are marked `lab`, and skipped with the reason where no lab can be built."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.lab.hosts import trouble
from tests.lab.lab import Lab

_HERE = Path(__file__).parent


@cache
def _is_here(path: Path) -> bool:
    return _HERE in path.parents


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_here(item.path):
            item.add_marker(pytest.mark.lab)


@cache
def _trouble() -> str | None:
    return trouble()


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """Builds labs that are torn down after the test, whatever happened in it."""
    reason = _trouble()
    if reason and os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"CI=true, so the lab must run: {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)
    with ExitStack() as stack:
        made = 0

        def build(*hosts: str) -> Lab:
            nonlocal made
            made += 1
            folder = tmp_path / f"lab{made}"
            folder.mkdir()
            return stack.enter_context(Lab(hosts or ("nd0", "nd1"), folder))

        yield build


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    """Two healthy hosts, nd0 and nd1."""
    return make_lab()
