"""Text of a template, to see at a glance whether a value is like it but for its own values.

To compare a value with a template place by place takes ten times as long as to write its JSON; and
most values of a large cluster are like one, but for a time or two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_SINGLE = r'("(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null|\[\]|\{\})'
"""JSON of a value that is no table with entries."""
_END = r"(?![0-9.eE+-])"
"""Condition for the end of a number."""


@dataclass(frozen=True)
class Place:
    """Place of a template with a single value: each has its own, or else most have the number
    `text`, and what another one has there is written by its `pointer`.
    """

    text: str | None = None
    pointer: str = ""


@dataclass(frozen=True)
class Likeness:
    """Own values of one that is like a template, as JSON: at open places, elsewhere by pointer."""

    each: Sequence[str]
    but: Mapping[str, str]


class Pattern:
    """Texts that stand in all values of a template, and between them the places of others."""

    def __init__(self, parts: Iterable[str | Place]) -> None:
        """`parts` of JSON on one line, with sorted keys."""
        self._open: list[int] = []
        self._usual: list[tuple[int, str]] = []
        made, groups = [], 0
        for part in parts:
            if isinstance(part, str):
                made.append(re.escape(part))
                continue
            groups += 1
            if part.text is None:
                self._open.append(groups)
                made.append(_SINGLE)
            else:
                self._usual.append((groups, part.pointer))
                usual = f"{re.escape(part.text)}{_END}"  # never both: it would be tried both ways
                made.append(f"(?:{usual}|(?!{usual}){_SINGLE})")
        self._text = re.compile("".join(made))

    def like(self, text: str) -> Likeness | None:
        """Own values of a value, by its JSON; None if it is unlike, or has a table there."""
        if (found := self._text.fullmatch(text)) is None:
            return None
        but = {at: found[group] for group, at in self._usual if found[group] is not None}
        return Likeness([found[group] for group in self._open], but)
