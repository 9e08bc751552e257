"""A table of cases as one test, which names every row that fails.

Each test costs a run of six workers some 5 ms of CPU, whatever it does. Not for tests with
fixtures that a row changes: all rows share them.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]
_PARAM = type(pytest.param())


def each_row(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """A test of all rows, in place of `pytest.mark.parametrize`, which makes a test of each."""
    words = tuple(names.replace(",", " ").split()) if isinstance(names, str) else names
    given = list(rows)
    assert given, "a test of no row proves nothing"
    assert not any(isinstance(row, _PARAM) for row in given), "such a row has a name of its own"
    cases = [(row,) if len(words) == 1 else tuple(row) for row in given]

    def of_all(test: Test) -> Test:
        @functools.wraps(test)
        def whole(*args: Any, **fixtures: Any) -> None:
            said = []
            for case in cases:
                try:
                    test(*args, **fixtures, **dict(zip(words, case, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    last = error.__traceback__ and error.__traceback__.tb_next
                    lines = traceback.format_exception(type(error), error, last)
                    said.append(f"{case!r}\n{''.join(lines)}")
            if said:
                told = "\n".join(said)
                pytest.fail(f"{len(said)} of {len(cases)} rows:\n{told}", pytrace=False)

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in words]
        vars(whole)["__signature__"] = signature.replace(parameters=left)
        return whole

    return of_all


def also(value: object) -> Any:
    """Another value of a parameter, for the wide tests only: those without a mark show the kind."""
    return pytest.param(value, marks=pytest.mark.wide)
