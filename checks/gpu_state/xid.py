"""What an Xid of the NVIDIA driver means, and what to do. Pure; the rows are in xid.toml."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nccl_doctor.api import Severity
from nccl_doctor.toolkit.tables import read_table

_RECOVERY = 154
_NVLINK5 = range(144, 151)


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


def asks_for_nothing(seen: Mapping[str, Any]) -> bool:
    """Whether the text of an Xid says that it is over, or that the link went on.

    154 is written with every change of what the driver asks for, also back to nothing; 144 to 150
    say whether they were fatal.
    """
    text = str(seen["text"])
    back = seen["xid"] == _RECOVERY and re.search(r"to 0x0\b|\(None\)\s*$", text) is not None
    return back or (seen["xid"] in _NVLINK5 and "nonfatal" in text.lower().replace("-", ""))


@functools.cache
def _rows() -> dict[int, Xid]:
    data = read_table(__package__, "xid.toml")
    return {
        number: Xid(number, row["means"], Severity(row["severity"]), data["fix"][row["fix"]])
        for row in data["xid"]
        for number in row["numbers"]
    }
