"""The report as JSON, for machines and for keeping."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from nccl_doctor.model.report import Report


def render(report: Report) -> str:
    """The report as `schema.json` describes it: sorted keys, ASCII only, a final newline.

    Never fails on what a check put into its facts: NaN and infinities, which JSON does not know,
    become the texts "NaN", "Infinity" and "-Infinity", and other foreign values their `str`.
    """
    data = _clean(report.to_json())
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


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
