"""Some of many values, from which is learned what all have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

DEEPEST = 14
"""Levels within a value that are looked at."""
_GOLDEN = (math.sqrt(5) - 1) / 2


def some_of(values: Sequence[Any], number: int) -> Sequence[Any]:
    """So many of the values, in steps without a period: ranks repeat on each host."""
    if len(values) <= number:
        return values
    places = {int(i * _GOLDEN % 1 * len(values)) for i in range(number)}
    return [values[place] for place in sorted(places)]


def by_shape(values: Sequence[Any]) -> list[list[Any]]:
    """The values, those of one shape together: with the same keys, and lists of the same length."""
    kinds: dict[int, list[Any]] = {}
    for value in values:
        kinds.setdefault(hash(_shape(value)), []).append(value)
    return list(kinds.values())


def _shape(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST or not isinstance(value, (dict, list)):
        return None
    if isinstance(value, dict):
        return tuple((key, _shape(each, depth + 1)) for key, each in value.items())
    return tuple(_shape(each, depth + 1) for each in value)
