"""Text of a template, to see at a glance whether a value is like it but for its own values.

To compare a value with a template place by place takes ten times as long as to write its JSON; and
most values of a large cluster are like one, but for a time or two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SINGLE = r'("(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null|\[\]|\{\})'
"""JSON of a value that is no table with entries."""
_END = r"(?![0-9.eE+-])"
"""Condition for the end of a number."""
_decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class Place:
    """Place of a template with a single value: each has its own, or else most have the number
    `text`, and what another one has there is written by its `pointer`.
    """

    text: str | None = None
    pointer: str = ""


@dataclass(frozen=True)
class Likeness:
    """Own values of one that is like a template, as JSON: at open places, elsewhere by pointer.
    `tables` are the values of those open places that may have a table, by their number.
    """

    each: Sequence[str]
    but: Mapping[str, str]
    tables: Mapping[int, Any] = field(default_factory=dict)


class Pattern:
    """Texts that stand in all values of a template, and between them the places of others."""

    def __init__(self, parts: Iterable[str | Place], tables: Container[int] = ()) -> None:
        """`parts` of JSON on one line, with sorted keys. `tables`: numbers of those open places
        that may have a table with entries in place of a single value.
        """
        stretches: list[list[str | Place]] = [[]]
        number = 0
        for part in parts:
            is_open = isinstance(part, Place) and part.text is None
            if is_open and number in tables:
                stretches.append([])
            else:
                stretches[-1].append(part)
            number += is_open
        self._stretches = [_Stretch(each) for each in stretches]

    def like(self, text: str) -> Likeness | None:
        """Own values of a value, by its JSON; None if it is unlike, or has a table where none is
        looked for.
        """
        each: list[str] = []
        but: dict[str, str] = {}
        tables: dict[int, Any] = {}
        at = 0
        for number, stretch in enumerate(self._stretches):
            if number:
                tables[len(each)], end = _decode(text, at)
                each.append(text[at:end])
                at = end
            if (found := stretch.match(text, at)) is None:
                return None
            at = found.end()
            each += [found[group] for group in stretch.open]
            for group, where in stretch.usual:
                if found[group] is not None:
                    but[where] = found[group]
        return Likeness(each, but, tables) if at == len(text) else None


class _Stretch:
    """Texts and places between two tables. `open` are the groups of its open places, `usual` those
    of places with a usual number, with their pointers.
    """

    def __init__(self, parts: Iterable[str | Place]) -> None:
        self.open: list[int] = []
        self.usual: list[tuple[int, str]] = []
        made, groups = [], 0
        for part in parts:
            if isinstance(part, str):
                made.append(re.escape(part))
                continue
            groups += 1
            if part.text is None:
                self.open.append(groups)
                made.append(_SINGLE)
            else:
                self.usual.append((groups, part.pointer))
                usual = f"{re.escape(part.text)}{_END}"  # never both: it would be tried both ways
                made.append(f"(?:{usual}|(?!{usual}){_SINGLE})")
        self.match = re.compile("".join(made)).match
