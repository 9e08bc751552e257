"""Rows that are one test: all that fail are listed."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.support.rows import each_row


def test_all_rows_that_fail_are_listed() -> None:
    seen = []

    @each_row(("one", "other"), [(1, 1), (2, 3), (4, 4), (5, "five")])
    def are_equal(one: object, other: object) -> None:
        seen.append(one)
        if other == "five":
            pytest.fail("words")
        assert one == other

    with pytest.raises(pytest.fail.Exception, match="2 of 4 rows") as told:
        are_equal()
    assert seen == [1, 2, 4, 5]
    for words in ("(2, 3)\n", "assert 2 == 3", "(5, 'five')\n", "Failed: words", "test_rows.py"):
        assert words in str(told.value)


def test_fixtures_are_left_for_pytest() -> None:
    @each_row("name", ["a", "b"])
    def is_known(name: str, tmp_path: Path) -> None:
        assert tmp_path / name

    assert list(inspect.signature(is_known).parameters) == ["tmp_path"]
    is_known(tmp_path=Path())


@pytest.mark.parametrize("rows", [[], [pytest.param(1, id="one")]], ids=["none", "with an id"])
def test_rows_that_it_does_not_take(rows: list[object]) -> None:
    with pytest.raises(AssertionError):
        each_row("name", rows)
