"""No test of a real process waits for a number of seconds: it waits for an event."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import comes, until

TESTS = Path(__file__).resolve().parents[1]
FOR_EVER_S = 10.0
"""Seconds of a sleep from which on it stands for something that hangs."""


def without_a_reason(path: Path) -> Iterator[str]:
    """Calls of `sleep` in a file that do not say, in their line, why time is what counts there."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep")):
            continue
        (given,) = node.args
        hangs = isinstance(given, ast.Constant) and given.value >= FOR_EVER_S
        if not hangs and "  # " not in lines[node.lineno - 1]:
            yield f"{path.relative_to(TESTS)}:{node.lineno}: {lines[node.lineno - 1].strip()}"


def test_every_sleep_says_why_time_is_what_is_tested() -> None:
    files = [path for folder in ("lab", "ranks", "cli") for path in (TESTS / folder).rglob("*.py")]
    assert len(files) > 100
    assert [line for path in files for line in without_a_reason(path)] == []


def test_what_comes_is_returned_and_what_does_not_is_said() -> None:
    looks = iter([0, 0, 7])
    assert until(lambda: next(looks), every_s=0.001) == 7
    assert comes(lambda: "", 0.01, every_s=0.001) == ""
    with pytest.raises(AssertionError, match=r"nothing within 0.01 s; it said: no"):
        until(lambda: 0, 0.01, every_s=0.001, said=lambda: "it said: no")
