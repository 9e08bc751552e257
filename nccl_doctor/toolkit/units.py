"""Quantities as text, in units by their size: `85 µs`, `13 ms`, `4.7 MB/s`, `9.4 Gbit/s`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))
_BITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"))
_SIZES = ((1 << 20, "MiB"), (1 << 10, "KiB"))
_LADDERS = (_TIMES, _RATES, _BITS)


def time_text(seconds: float) -> str:
    """Seconds as text: `85 µs`, `1.2 ms`."""
    return _scaled(seconds, _TIMES)


def rate_text(rate: float) -> str:
    """Bytes per second as text: `4.7 MB/s`."""
    return _scaled(rate, _RATES)


def bits_text(rate: float) -> str:
    """Bytes per second as bits per second, the unit in which links are sold."""
    return _scaled(8 * rate, _BITS)


def size_text(size: int) -> str:
    """Bytes of a message as text: `4 MiB`."""
    for scale, unit in _SIZES:
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"


def amount_text(value: float, unit: str) -> str:
    """A number with its unit; of a time or a rate, with the unit of its size."""
    for ladder in _LADDERS:
        for scale, name in ladder:
            if name == unit:
                return _scaled(value * scale, ladder)
    return f"{_digits(value)} {unit}".rstrip()


def span_text(values: Iterable[float], show: Callable[[float], str]) -> str:
    """The smallest and the largest value, their unit once where it is the same: `70–111 µs`."""
    ordered = sorted(values)
    low, high = show(ordered[0]), show(ordered[-1])
    if low == high:
        return low
    number, _, unit = low.partition(" ")
    return f"{number}–{high}" if unit == high.partition(" ")[2] else f"{low}–{high}"


def _scaled(value: float, ladder: tuple[tuple[float, str], ...]) -> str:
    """The value in the largest unit that it fills; a smaller one in the last unit."""
    # What would be rounded to 1000 of a unit is one of the next.
    large = (each for each in ladder if abs(value) >= 0.9995 * each[0])
    scale, unit = next(large, ladder[-1])
    return f"{_digits(value / scale, 10 if unit == 'µs' else 1000)} {unit}"


def _digits(value: float, whole_from: float = 1000) -> str:
    """Three digits; of a larger number, those before the point."""
    return f"{value:.0f}" if abs(value) >= whole_from else f"{value:.3g}"
