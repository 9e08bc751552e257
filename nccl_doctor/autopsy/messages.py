"""Messages about the end of a job: a table of what libraries, launchers and the kernel print."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nccl_doctor.toolkit.tables import read_table

_LONGEST_NUMBER = 18
"""Digits of a number; none of a process, a rank or a collective has more."""


@dataclass(frozen=True)
class MessageRow:
    """One row of messages.toml, which says what its fields are."""

    says: str
    word: str
    pattern: re.Pattern[str] | None
    lines: int
    inside: bool
    other: bool


@dataclass(frozen=True)
class Message:
    """A message that was found, with its values; see messages.toml."""

    says: str
    values: Mapping[str, str]
    other: bool

    def number(self, name: str) -> int | None:
        """A value as a number; None if it is not there."""
        text = self.values.get(name)
        return None if text is None else int(text)


def messages_in(text: str, *, inside: bool = False) -> Iterator[Message]:
    """Messages of a text, in the order of the table.

    `inside`: it is the text of an exception, in which every row is looked for.
    """
    for row in message_rows():
        if row.word not in text or (row.inside and not inside):
            continue
        if row.pattern is None:
            yield Message(row.says, {}, row.other)
            continue
        for found in row.pattern.finditer(text):
            values = {name: value for name, value in found.groupdict().items() if value}
            if any(len(value) > _LONGEST_NUMBER and value.isdigit() for value in values.values()):
                continue
            yield Message(row.says, values, row.other)


@functools.cache
def message_rows() -> tuple[MessageRow, ...]:
    """The rows of the table."""
    return tuple(
        MessageRow(
            row["says"],
            word,
            re.compile(row["pattern"]) if "pattern" in row else None,
            row.get("lines", 1),
            row.get("inside", False),
            row.get("other", False),
        )
        for row in read_table(__package__, "messages.toml")["message"]
        for word in ([row["word"]] if isinstance(row["word"], str) else row["word"])
    )
