"""Values as JSON will give them back, and as text on one line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_encode = json.JSONEncoder(
    sort_keys=True, allow_nan=False, separators=(",", ":"), ensure_ascii=True
).encode


def compact(value: Any) -> str:
    """JSON on one line, with sorted keys, ASCII only."""
    return _encode(value)


def plain(value: Any) -> Any:
    """The value as JSON will give it back, whatever a check put into its facts: NaN and infinities
    become the texts "NaN", "Infinity" and "-Infinity", and other foreign values their `str`.
    """
    try:
        return json.loads(_encode(value))
    except (TypeError, ValueError):
        return json.loads(_encode(clean(value)))


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
