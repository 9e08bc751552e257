"""What an Xid of the NVIDIA driver means, and what to do. Pure; the rows are in xid.toml."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

from nccl_doctor.model import Severity


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
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {
        number: Xid(number, row["means"], Severity(row["severity"]), data["fix"][row["fix"]])
        for row in data["xid"]
        for number in row["numbers"]
    }
