"""Values as JSON will give them back, and as text on one line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_encode = json.JSONEncoder(
    sort_keys=True, allow_nan=False, separators=(",", ":"), ensure_ascii=True
).encode
_SINGLE = (str, int, bool, type(None))
_DEEPEST = 100


def compact(value: Any) -> str:
    """JSON on one line, with sorted keys, ASCII only."""
    return _encode(value)


def plain(value: Any) -> Any:
    """The value as JSON will give it back, whatever a check put into its facts: NaN and infinities
    become the texts "NaN", "Infinity" and "-Infinity", and other foreign values their `str`.

    What is plain already, as all that has been read from JSON, is not copied.
    """
    if _is_plain(value):
        return value
    try:
        return json.loads(_encode(value))
    except (TypeError, ValueError):
        return json.loads(_encode(clean(value)))


def _is_plain(value: Any) -> bool:
    """True if JSON gives the value back as it is. A look at it takes a tenth of the time."""
    level = [value]
    for _ in range(_DEEPEST):
        if not level:
            return True
        inside: list[Any] = []
        for each in level:
            kind = type(each)
            if kind is dict:
                if not all(type(key) is str for key in each):
                    return False
                inside += each.values()
            elif kind is list:
                inside += each
            elif not (kind in _SINGLE or (kind is float and math.isfinite(each))):
                return False
        level = inside
    return False


def clean(value: Any) -> Any:
    """The value, of types that JSON knows."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((clean(item) for item in value), key=str)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
