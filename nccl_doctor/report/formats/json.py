"""The report as JSON, for machines and for keeping."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from nccl_doctor.model.report import Report

_WORDS = {True: "true", False: "false", None: "null"}


def render(report: Report) -> str:
    """The report as `schema.json` describes it: sorted keys, ASCII only, a final newline.

    Never fails on what a check put into its facts: NaN and infinities, which JSON does not know,
    become the texts "NaN", "Infinity" and "-Infinity", and other foreign values their `str`.
    """
    pieces: list[str] = []
    _write(report.to_json(), "\n", pieces.append)
    return "".join(pieces) + "\n"


def _write(value: Any, line: str, put: Callable[[str], object]) -> None:
    """Put a value as `json.dumps` of what `_clean` makes of it does, with indent=1 and
    sort_keys=True; that has no fast encoder for more than one line, and takes four times as long.

    `line` is a line break, with the spaces before what holds this value.
    """
    if plain := _PLAIN.get(type(value)):
        put(plain(value))
    elif isinstance(value, (dict, Mapping)):
        items = {str(key): item for key, item in value.items()}
        inner = f"{line} "
        before = f"{{{inner}"
        for key in sorted(items):
            item = items[key]
            if plain := _PLAIN.get(type(item)):
                put(f"{before}{_quoted(key)}: {plain(item)}")
            else:
                put(f"{before}{_quoted(key)}: ")
                _write(item, inner, put)
            before = f",{inner}"
        put(f"{line}}}" if items else "{}")
    elif isinstance(value, (list, tuple)):
        inner = f"{line} "
        before = f"[{inner}"
        for item in value:
            if plain := _PLAIN.get(type(item)):
                put(before + plain(item))
            else:
                put(before)
                _write(item, inner, put)
            before = f",{inner}"
        put(f"{line}]" if value else "[]")
    elif isinstance(value, (set, frozenset)):
        _write(sorted(map(_clean, value), key=str), line, put)
    else:
        put(json.dumps(_clean(value), allow_nan=False))


def _number(value: float) -> str:
    return float.__repr__(value) if math.isfinite(value) else _quoted(_clean(value))


_quoted = json.encoder.encode_basestring_ascii
_PLAIN: dict[type, Callable[[Any], str]] = {
    str: _quoted,
    int: int.__repr__,
    float: _number,
    bool: _WORDS.__getitem__,
    type(None): _WORDS.__getitem__,
}


def _clean(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_clean(item) for item in value), key=str)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)
