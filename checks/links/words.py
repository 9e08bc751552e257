"""Rates and times of links as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WAYS = {"out": "sending", "in": "receiving", "both": "both ways", "one": "one way"}


def span(values: Sequence[float], show: Any) -> str:
    """Sorted values as text: one value, or the smallest and the largest."""
    texts = list(dict.fromkeys(show(value) for value in (values[0], values[-1])))
    return " to ".join(texts)


def speed(rate: float) -> str:
    """Bytes per second as bits per second, the unit in which links are sold."""
    mbit = rate * 8 / 1e6
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def milliseconds(microseconds: float) -> str:
    """A time between hosts, such as a round trip."""
    return f"{microseconds / 1000:.3g} ms"
