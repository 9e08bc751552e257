"""Tables on GPUs: published peaks, and the meaning of errors. Pure; rows are data.

The rows are in gpupeaks.toml and gpuerrors.toml.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from nccl_doctor.toolkit.advice import fix_of
from nccl_doctor.toolkit.tables import read_table

MEASURES = {
    "half": "bf16 matrix product",
    "copy": "copy within the GPU",
    "to_device": "copy to the GPU",
    "to_host": "copy to the host",
}
"""Names of the measures of `DeviceWork.measure`, as text."""

_PCIE_BYTES = {1: 4.0e9, 2: 8.0e9, 3: 15.8e9, 4: 31.5e9, 5: 63.0e9}
"""Generation → bytes per second of 16 lanes, one way, before packet headers."""
_LONGEST = 10_000


@dataclass(frozen=True)
class Peaks:
    """Published rates: operations per second, bytes per second, and their source."""

    half: float
    copy: float
    pcie: float
    source: str

    def of(self, measure: str) -> float:
        """The peak for a measure of `DeviceWork.measure`."""
        return {"half": self.half, "copy": self.copy}.get(measure, self.pcie)


@dataclass(frozen=True)
class GpuError:
    """Meaning of an error: `means` is a clause on what happened, `ask` what to check or type next.

    `healthy`: the error does not mean that the GPU is faulty. `hardware`: nothing else makes it.
    """

    means: str
    ask: str
    healthy: bool
    hardware: bool = False


def peaks_of(model: str) -> Peaks | None:
    """The published peaks of a GPU by the name that torch gives; None if not in the table."""
    for name, peaks in _peaks():
        if name.fullmatch(model):
            return peaks
    return None


def pcie_rate(generation: int | None, lanes: int | None) -> float | None:
    """Bytes per second of a PCIe link, one way; None if not known."""
    whole = _PCIE_BYTES.get(generation or 0)
    return whole * lanes / 16 if whole and lanes else None


def gpu_error(text: str) -> GpuError | None:
    """The meaning of an error text; None if not in the table."""
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
            GpuError(
                row["means"],
                fix_of(row["ask"]),
                row.get("healthy", False),
                row.get("hardware", False),
            ),
        )
        for row in read_table(__package__, "gpuerrors.toml")["error"]
    )
