"""Time-outs of a job's start: who waits, for what, how long, and what happens then. Pure but for
`gather`.

`layers.toml` says what does not depend on the job; `waits` adds the seconds and where they come
from; `judging` holds them against the time that rank 0 works alone; `gather` reads this host.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

CHECK = "timeouts"
"""Name of the check whose facts `gather` made."""
CLOCKS = ("load", "launch", "stuck", "own", "never")
"""When a clock runs, seen from rank 0 that works alone; see `layers.toml`."""


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
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    text = Path(__file__).with_name("layers.toml").read_text(encoding="utf-8")
    return tuple(Waiter(**row) for row in tomllib.loads(text)["layer"])
