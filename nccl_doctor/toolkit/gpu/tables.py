"""What is known of GPUs beforehand: published peaks, and what errors mean. Pure; rows are data.

The rows are in gpupeaks.toml and gpuerrors.toml.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from nccl_doctor.toolkit.tables import read_table

MEASURES = {
    "half": "bf16 matrix product",
    "copy": "copy within the GPU",
    "to_device": "copy to the GPU",
    "to_host": "copy to the host",
}
"""What `DeviceWork.measure` measures, in words."""

_PCIE_BYTES = {1: 4.0e9, 2: 8.0e9, 3: 15.8e9, 4: 31.5e9, 5: 63.0e9}
"""Generation → bytes per second of 16 lanes, one way, before packet headers."""
_LONGEST = 10_000


@dataclass(frozen=True)
class Peaks:
    """What the vendor publishes: operations per second, bytes per second, and where it says so."""

    half: float
    copy: float
    pcie: float
    source: str

    def of(self, measure: str) -> float:
        """The peak beside a measure of `DeviceWork.measure`."""
        return {"half": self.half, "copy": self.copy}.get(measure, self.pcie)


@dataclass(frozen=True)
class GpuError:
    """`means` is a clause that says what happened, `ask` what to look at or type next.

    `healthy`: it says nothing against the GPU.
    """

    means: str
    ask: str
    healthy: bool


def peaks_of(model: str) -> Peaks | None:
    """The published peaks of a GPU by the name that torch gives; None for one in no row."""
    for name, peaks in _peaks():
        if name.fullmatch(model):
            return peaks
    return None


def pcie_rate(generation: int | None, lanes: int | None) -> float | None:
    """Bytes per second of a PCIe link, one way; None where that is not known."""
    whole = _PCIE_BYTES.get(generation or 0)
    return whole * lanes / 16 if whole and lanes else None


def gpu_error(text: str) -> GpuError | None:
    """The meaning of an error text; None where it is in no row."""
    text = text[:_LONGEST].lower()
    for fragments, meaning in _errors():
        if any(fragment.search(text) for fragment in fragments):
            return meaning
    return None


@functools.cache
def _peaks() -> tuple[tuple[re.Pattern[str], Peaks], ...]:
    return tuple(
        (
            re.compile(row["name"]),
            Peaks(
                row["half_tflops"] * 1e12,
                row["memory_gbps"] * 1e9,
                _PCIE_BYTES[row["pcie"]],
                row["source"],
            ),
        )
        for row in read_table(__package__, "gpupeaks.toml")["gpu"]
    )


@functools.cache
def _errors() -> tuple[tuple[tuple[re.Pattern[str], ...], GpuError], ...]:
    return tuple(
        (
            tuple(re.compile(each) for each in row["fragments"]),
            GpuError(row["means"], row["ask"], row.get("healthy", False)),
        )
        for row in read_table(__package__, "gpuerrors.toml")["error"]
    )
