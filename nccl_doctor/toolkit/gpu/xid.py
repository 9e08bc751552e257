"""Meaning and fix of Xids of the NVIDIA driver. Pure; the rows are in xid.toml."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nccl_doctor.model.commands import Command, shell
from nccl_doctor.model.findings import Severity
from nccl_doctor.model.fixes import Fix, Step, look
from nccl_doctor.toolkit.tables import read_table

_RECOVERY = 154
_NVLINK5 = range(144, 151)


@dataclass(frozen=True)
class Xid:
    """One row: `severity` is that of a GPU without any newer information."""

    number: int
    means: str
    severity: Severity
    fix: str


def xid_of(number: int) -> Xid | None:
    """The row of a number; None for one without meaning for the state of a GPU."""
    return _rows().get(number)


def asks_for_nothing(seen: Mapping[str, Any]) -> bool:
    """True if the text of an Xid shows that it is over, or that the link still works.

    154 is written whenever the action that the driver asks for changes, also back to none; the text
    of 144 to 150 shows whether they were fatal.
    """
    text = str(seen["text"])
    back = seen["xid"] == _RECOVERY and re.search(r"to 0x0\b|\(None\)\s*$", text) is not None
    return back or (seen["xid"] in _NVLINK5 and "nonfatal" in text.lower().replace("-", ""))


def _fix(row: Mapping[str, Any]) -> Fix:
    note, ways = row.get("note", ""), row.get("or", ())
    steps = [
        Step(shell("# {}", Command(line)), note=note, persists=True) for line in row.get("run", ())
    ]
    steps += [look(Command(line), "" if steps else note) for line in row.get("shows", ())]
    return Fix(*steps, alternatives=ways) if steps else Fix(text=ways[0], alternatives=ways[1:])


@functools.cache
def _rows() -> dict[int, Xid]:
    data = read_table(__package__, "xid.toml")
    fixes = {name: _fix(row) for name, row in data["fix"].items()}
    return {
        number: Xid(number, row["means"], Severity(row["severity"]), fixes[row["fix"]])
        for row in data["xid"]
        for number in row["numbers"]
    }
