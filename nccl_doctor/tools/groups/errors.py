"""What an error text of torch or NCCL means, as one sentence. Pure; the rows are in errors.toml."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from nccl_doctor.tools.tables import read_table

_LONGEST = 100_000
"""Characters of a text that are looked at, from its end."""


@dataclass(frozen=True)
class Meaning:
    """`means` is a clause that says what happened, `ask` what to look at or type next."""

    means: str
    ask: str


def meaning_of(text: str) -> Meaning | None:
    """The meaning of an error, or of a log with one in it; None for text that is in no row."""
    text = text[-_LONGEST:].lower()
    for fragments, meaning in _rows():
        if all(fragment.search(text) for fragment in fragments):
            return meaning
    return None


@functools.cache
def _rows() -> tuple[tuple[tuple[re.Pattern[str], ...], Meaning], ...]:
    data = read_table(__package__, "errors.toml")
    return tuple(
        (
            tuple(re.compile(each) for each in row["fragments"]),
            Meaning(row["means"], row["ask"]),
        )
        for row in data["error"]
    )
