"""A terminal that knows the few movements of the cursor that the program makes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_PARTS = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[[0-9;]*m|(\r)|(\n)|([^\x1b\r\n]+)")


@dataclass
class Screen:
    """A terminal of so many columns, without an end below: `lines` is what it shows."""

    columns: int = 80
    lines: list[str] = field(default_factory=lambda: [""])
    row: int = 0
    column: int = 0
    tallest: int = 0
    widest: int = 0

    def feed(self, text: str) -> None:
        """Show a text; AssertionError for an escape that is not known here."""
        assert "".join(part[0] for part in _PARTS.finditer(text)) == text, repr(text[:200])
        for part in _PARTS.finditer(text):
            number, command = int(part[1] or 1), part[2]
            if command == "A":
                self.row = max(0, self.row - number)
            elif command == "J":
                self.lines[self.row + 1 :] = []
                self.lines[self.row] = self.lines[self.row][: self.column]
            elif command == "K":
                self.lines[self.row] = self.lines[self.row][: self.column]
            elif part[3]:
                self.column = 0
            elif part[4]:
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part[5]:
                line = self.lines[self.row].ljust(self.column)
                end = self.column + len(part[5])
                self.lines[self.row] = line[: self.column] + part[5] + line[end:]
                self.column = end
                self.widest = max(self.widest, end)
                self.tallest = max(self.tallest, self.row + 1)
            else:
                assert command is None, command
