"""What is imported late, as each worker collects all tests."""

from __future__ import annotations

import inspect
import subprocess
from typing import Any

import pytest

from tests.support.lazy import SLOW_AT_COLLECTION, Lazy


def test_collecting_the_tests_imports_nothing_slow(pytestconfig: pytest.Config) -> None:
    """Each import takes every worker seconds, and each fork of a test is slower with torch."""
    assert pytestconfig.stash[SLOW_AT_COLLECTION] == []


def test_pytest_may_look_at_it_without_an_import() -> None:
    late: Any = Lazy("no_such_module")
    assert getattr(late, "_mock_name", None) is None
    assert inspect.unwrap(late) is late


def test_it_has_what_the_module_has() -> None:
    assert Lazy("subprocess").PIPE is subprocess.PIPE
