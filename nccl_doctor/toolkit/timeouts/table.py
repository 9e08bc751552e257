"""Table of the time-outs of a job's start. Pure except
`gather`.

`layers.toml` has what does not depend on the job; `waits` adds the seconds and their source;
`judging` compares them with the time that rank 0 works alone; `gather` reads this host.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from nccl_doctor.toolkit.tables import read_table

CHECK = "timeouts"
"""Name of the check whose facts `gather` made."""
CLOCKS = ("load", "launch", "stuck", "own", "never")
"""The times at which a clock runs, seen from rank 0 that works alone; see `layers.toml`."""


@dataclass(frozen=True)
class Waiter:
    """One row of `layers.toml`, where the fields are explained."""

    name: str
    clock: str
    starts: str
    ends: str
    misses: str
    fix: str


@functools.cache
def waiters() -> tuple[Waiter, ...]:
    """All rows, outermost first, read once."""
    return tuple(Waiter(**row) for row in read_table(__package__, "layers.toml")["layer"])
