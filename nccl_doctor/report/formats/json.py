"""The report as JSON, with all facts; compressed, if PATH ends in .gz."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.model.codec import encode
from nccl_doctor.model.report import Report, host_to_json, rank_to_json

FEW = 8
"""Ranks of a report that is indented throughout: it is read by eye, too."""
_encode = json.JSONEncoder(
    sort_keys=True, allow_nan=False, separators=(",", ":"), ensure_ascii=True
).encode


def render(report: Report) -> str:
    """The report as `schema.json` describes it: sorted keys, ASCII only, a final newline.

    Never fails on what a check put into its facts: NaN and infinities, which JSON does not know,
    become the texts "NaN", "Infinity" and "-Infinity", and other foreign values their `str`.
    """
    return "".join(pieces(report))


def pieces(report: Report) -> Iterator[str]:
    """The same, piece by piece."""
    if len(report.cluster.ranks) > FEW:
        return in_lines(report)
    return iter([_indented(clean(report.to_json())) + "\n"])


def in_lines(report: Report) -> Iterator[str]:
    """The same for many ranks: each host, rank and check on one line."""
    head = clean(report.head_to_json())
    records = {
        "hosts": map(host_to_json, report.cluster.hosts),
        "ranks": map(rank_to_json, report.cluster.ranks),
        "checks": map(encode, report.checks),
    }
    before = "{\n"
    for name in sorted({*head, *records}):
        yield before
        before = ",\n"
        if name in records:
            yield from _lines(name, records[name])
        else:
            yield _indented({name: head[name]})[2:-2]
    yield "\n}\n"


def _indented(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False)


def _lines(name: str, records: Iterable[Any]) -> Iterator[str]:
    before = f' "{name}": [\n  '
    for record in records:
        yield before + _compact(record)
        before = ",\n  "
    yield f' "{name}": []' if before[0] == " " else "\n ]"


def _compact(value: Any) -> str:
    """JSON on one line."""
    try:
        return _encode(value)
    except (TypeError, ValueError):  # no plain data, as a plug-in's facts may be
        return _encode(clean(value))


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
