"""Text of a template, to see at a glance whether a value is like it but for its own values.

To compare a value with a template place by place takes ten times as long as to write its JSON; and
most values of a large cluster are exactly like one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SINGLE = r'("(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null|\[\]|\{\})'
"""JSON of a value that is no table with entries."""


class Pattern:
    """Texts that stand in all values of a template, and between them those of their own."""

    def __init__(self, parts: Iterable[str | None]) -> None:
        """`parts` of JSON on one line, with sorted keys; None where each value has its own."""
        made = (_SINGLE if part is None else re.escape(part) for part in parts)
        self._text = re.compile("".join(made))

    def own(self, text: str) -> Sequence[str] | None:
        """The own values in a value's JSON, as JSON; None if it is not like the template, or has a
        table of its own.
        """
        found = self._text.fullmatch(text)
        return None if found is None else found.groups()
