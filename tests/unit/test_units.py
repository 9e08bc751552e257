"""Quantities in units by their size."""

from __future__ import annotations

from nccl_doctor.toolkit.units import (
    amount_text,
    bits_text,
    rate_text,
    size_text,
    span_text,
    time_text,
)
from tests.support.rows import each_row


@each_row(
    ("made", "text"),
    [
        (time_text(0.0130235), "13 ms"),
        (time_text(0.0000853), "85 µs"),
        (time_text(1.2345), "1.23 s"),
        (time_text(0.9999), "1 s"),
        (time_text(0.0), "0 µs"),
        (rate_text(4.75e6), "4.75 MB/s"),
        (rate_text(1.2e9), "1.2 GB/s"),
        (rate_text(12.0), "0.012 kB/s"),
        (bits_text(1.175e9), "9.4 Gbit/s"),
        (bits_text(0.0), "0 Mbit/s"),
        (bits_text(2.5e12), "20000 Gbit/s"),
        (size_text(4 << 20), "4 MiB"),
        (size_text(8), "8 B"),
        (amount_text(13023.5, "µs"), "13 ms"),
        (amount_text(0.00475, "GB/s"), "4.75 MB/s"),
        (amount_text(-0.5, "ms"), "-500 µs"),
        (amount_text(31.25, "TFLOP/s"), "31.2 TFLOP/s"),
        (amount_text(12345.0, ""), "12345"),
        (span_text([111e-6, 70e-6], time_text), "70–111 µs"),
        (span_text([0.0005, 0.002], time_text), "500 µs–2 ms"),
        (span_text([2.0], time_text), "2 s"),
    ],
)
def test_the_unit_fits_the_size(made: str, text: str) -> None:
    assert made == text
