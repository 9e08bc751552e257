"""Suggestions for a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?` for a near miss, else the empty string."""
    close = difflib.get_close_matches(name, sorted({*known} - {name}), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""
