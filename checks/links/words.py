"""Rates and times of links as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nccl_doctor.toolkit.units import time_text

WAYS = {"out": "sending", "in": "receiving", "both": "both ways", "one": "one way"}


def span(values: Sequence[float], show: Any) -> str:
    """Sorted values as text: one value, or the smallest and the largest."""
    texts = list(dict.fromkeys(show(value) for value in (values[0], values[-1])))
    return " to ".join(texts)


def round_trip(microseconds: float) -> str:
    """A time between hosts."""
    return time_text(microseconds * 1e-6)
