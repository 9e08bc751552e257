"""What an Xid of the NVIDIA driver means, and what to do. Pure; the rows are in xid.toml."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from nccl_doctor.model import Severity
from nccl_doctor.tools.tables import read_table


@dataclass(frozen=True)
class Xid:
    """One row: `severity` is that of a GPU of which nothing else is known since."""

    number: int
    means: str
    severity: Severity
    fix: str


def xid_of(number: int) -> Xid | None:
    """The row of a number; None for one that says nothing about the state of a GPU to us."""
    return _rows().get(number)


@functools.cache
def _rows() -> dict[int, Xid]:
    data = read_table(__package__, "xid.toml")
    return {
        number: Xid(number, row["means"], Severity(row["severity"]), data["fix"][row["fix"]])
        for row in data["xid"]
        for number in row["numbers"]
    }
