"""Lines of text for people: wrapped, coloured, and in ASCII where a stream takes nothing else."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from nccl_doctor.toolkit.terminal import safe

MIN_WIDTH = 40
"""Columns that every renderer for people takes for granted."""
_COLORS = {"pass": "32", "fail": "31", "warn": "33", "unknown": "35"}
_ASCII = str.maketrans(
    {
        "✓": "+",
        "✗": "x",
        "·": "-",
        "–": "-",
        "—": "-",
        "→": "->",
        "↔": "<->",
        "≥": ">=",
        "≤": "<=",
        "…": "...",
        "−": "-",
        "±": "+/-",
        "µ": "u",
    }
)


def to_ascii(text: str) -> str:
    """The marks of a renderer in their ASCII form, and every other character as an escape."""
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode()


class Page:
    """Lines of the output, wrapped and coloured. Values are made safe before colour is added."""

    def __init__(self, width: int, color: bool) -> None:
        self._width = width
        self._color = color
        self._lines: list[str] = []

    def line(
        self, text: str, tone: str = "", *, bold: bool = False, first: str = "", rest: str = ""
    ) -> None:
        """Write a text, wrapped, in the colour of a verdict; `first` and `rest` indent it."""
        lines = textwrap.wrap(
            safe(text),
            self._width,
            initial_indent=first,
            subsequent_indent=rest or " " * len(first),
            break_long_words=False,
            break_on_hyphens=False,
        )
        codes = [code for code in ("1" if bold else "", _COLORS.get(tone, "")) if code]
        if self._color and codes:
            lines = [f"\033[{';'.join(codes)}m{line}\033[0m" for line in lines]
        self._lines += lines

    def raw(self, lines: Iterable[str]) -> None:
        """Write lines that are laid out and safe."""
        self._lines += lines

    def gap(self) -> None:
        """Write an empty line, unless the last one is empty, or there is none."""
        if self._lines and self._lines[-1]:
            self._lines.append("")

    def heading(self, text: str) -> None:
        """Write a line in bold, after an empty one."""
        self.gap()
        self.line(text, bold=True)

    def text(self) -> str:
        """All lines, each with a newline."""
        return "".join(f"{line}\n" for line in self._lines)

    @property
    def width(self) -> int:
        """Columns of a line."""
        return self._width
