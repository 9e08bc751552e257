"""What an error text of torch or NCCL means, as one sentence. Pure; the rows are in errors.toml."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

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
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(
        (
            tuple(re.compile(each) for each in row["fragments"]),
            Meaning(row["means"], row["ask"]),
        )
        for row in data["error"]
    )
