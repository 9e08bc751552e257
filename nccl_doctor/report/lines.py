"""Lines of text for people: wrapped, coloured or ASCII, with tables and the matrix of links."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl_doctor.model.findings import Severity
from nccl_doctor.model.report import Report
from nccl_doctor.report.network import Network, Pair, network_of
from nccl_doctor.report.story import Checks, and_more, no_checks, outcomes
from nccl_doctor.system.terminal import safe

MIN_WIDTH = 40
"""Columns that every renderer for people takes for granted."""
_COLORS = {"pass": "32", "fail": "31", "warn": "33", "unknown": "35"}
_IN_ASCII = ("+", "x", "-", "-", "-", "->", "<->", ">=", "<=", "...", "-", "+/-", "u")
_ASCII = str.maketrans(dict(zip("✓✗·–—→↔≥≤…−±µ", _IN_ASCII, strict=True)))


def finished(lines: Iterable[str], *, ascii: bool = False) -> str:
    """Lines as one text; in ASCII, marks of a renderer in that form, and the rest as escapes."""
    text = "".join(f"{line}\n" for line in lines)
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode() if ascii else text


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Lines of a text that is made safe, indented by `first` and `rest`; no word is broken."""
    return textwrap.wrap(
        safe(text),
        width,
        initial_indent=first,
        subsequent_indent=rest or " " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


class Page:
    """Lines of the output, wrapped and coloured. Values are made safe before colour is added."""

    def __init__(self, width: int, color: bool) -> None:
        self.width = max(width, MIN_WIDTH)
        self._color = color
        self._lines: list[str] = []

    def line(
        self, text: str, tone: str = "", *, bold: bool = False, first: str = "", rest: str = ""
    ) -> None:
        """Write a text, wrapped, in the colour of a verdict; `first` and `rest` indent it."""
        lines = wrapped(text, self.width, first, rest)
        codes = [code for code in ("1" if bold else "", _COLORS.get(tone, "")) if code]
        if self._color and codes:
            lines = [f"\033[{';'.join(codes)}m{line}\033[0m" for line in lines]
        self._lines += lines

    def raw(self, lines: Iterable[str]) -> None:
        """Write lines that are laid out and safe."""
        self._lines += lines

    def typed(self, line: str, first: str = "") -> None:
        """Write a line that is typed as it is, never wrapped: a command in bold, or its comment."""
        bold = self._color and not line.startswith("# ")
        self._lines.append(first + (f"\033[1m{line}\033[0m" if bold else line))

    def next_step(self, before: str, command: str, behind: str) -> None:
        """Write a last line, with its command in bold; it is never wrapped."""
        bold = f"\033[1m{safe(command)}\033[0m" if self._color and command else safe(command)
        self._lines.append(" ".join(filter(None, ("Next:", safe(before), bold, safe(behind)))))

    def gap(self) -> None:
        """Write an empty line, unless the last one is empty, or there is none."""
        if self._lines and self._lines[-1]:
            self._lines.append("")

    def heading(self, text: str) -> None:
        """Write a line in bold, after an empty one."""
        self.gap()
        self.line(text, bold=True)

    def text(self, *, ascii: bool = False) -> str:
        """All lines, each with a newline."""
        return finished(self._lines, ascii=ascii)


# Tables among the facts: a fact `{"columns": [...], "rows": [[...], ...]}` is shown as one.


_MOST = 40
"""Rows that are written out."""
_NARROWEST = 8
_LONGEST = 300
_GAP = 2


@dataclass(frozen=True)
class Table:
    """One table, and the hosts that have exactly this one; `whole` if no host has another one.

    `title` is the check's name, and that of the fact.
    """

    title: str
    hosts: tuple[str, ...]
    whole: bool
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def is_table(value: Any) -> bool:
    """True if a fact has the shape of a table, row by row."""
    if not isinstance(value, Mapping) or set(value) != {"columns", "rows"}:
        return False
    columns, rows = value["columns"], value["rows"]
    return (
        isinstance(columns, (list, tuple))
        and isinstance(rows, (list, tuple))
        and bool(columns)
        and all(isinstance(row, (list, tuple)) and len(row) == len(columns) for row in rows)
    )


def tables_of(report: Report) -> Iterator[Table]:
    """Every table of a report, in the order of its checks; one that hosts share comes once."""
    found: dict[str, dict[Any, list[str]]] = {}
    for name, _, check, _, outcome in outcomes(report):
        for key, value in outcome.facts.items():
            if is_table(value):
                same = found.setdefault(check, {}).setdefault((str(key), *_frozen(value)), [])
                same += [] if name in same else [name]
    order = {check.name: i for i, check in enumerate(report.checks)}
    for check in sorted(found, key=lambda each: (order.get(each, len(order)), each)):
        per_key = Counter(key for key, _, _ in found[check])
        for (key, columns, rows), hosts in found[check].items():
            yield Table(f"{check}: {key}", tuple(hosts), per_key[key] == 1, columns, rows)


def lay_out(table: Table, width: int) -> list[str]:
    """Lines of at most `width` columns, unless there are too many columns for that: long cells are
    broken over several lines.
    """
    from tabulate import tabulate

    head = [safe(name) for name in table.columns]
    rows = [[safe(cell) for cell in row] for row in table.rows[:_MOST]]
    widths = _widths([head, *rows], width)
    wrapped = [
        [
            "\n".join(textwrap.wrap(cell, size, break_on_hyphens=False)) or "–"
            for cell, size in zip(row, widths, strict=True)
        ]
        for row in (head, *rows)
    ]
    text = tabulate(wrapped[1:], wrapped[0], "simple", disable_numparse=True)
    lines = [line.rstrip() for line in text.split("\n")]
    return [*lines, *filter(None, [and_more(len(table.rows) - len(rows))])]


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Width of each column: what it needs; less for the widest ones if there is too little room,
    and less than its longest word only if there is no other way.
    """
    columns = [(column[0], column[1:]) for column in zip(*rows, strict=True)]
    # tabulate makes a column wider than its heading by a gap.
    widths = [max(len(head) + _GAP, _longest(cells)) for head, cells in columns]
    words = [
        max(_longest(head.split()) + _GAP, _longest(" ".join(cells).split()))
        for head, cells in columns
    ]
    room = width - _GAP * (len(widths) - 1)
    for least in (words, [_NARROWEST] * len(widths)):
        while sum(widths) > room and (wide := [i for i, w in enumerate(widths) if w > least[i]]):
            widths[max(wide, key=lambda i: widths[i])] -= 1
    return widths


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _frozen(table: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    columns = tuple(cell_text(name) for name in table["columns"])
    return columns, tuple(tuple(cell_text(cell) for cell in row) for row in table["rows"])


def cell_text(value: Any) -> str:
    """One cell: `–` for None, numbers without a needless `.0`."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
    return str(value)[:_LONGEST]


# The links between a few hosts as a small matrix for a terminal, where a finding names links.


_LEAST, _MOST_LINKS = 3, 16
"""Hosts; of two, the finding itself says it all."""
_LABEL = (8, 24)
"""Columns of a label: at least, and at most."""
_INDENT = "  "


def lay_out_links(report: Report, width: int, checks: Checks = no_checks) -> list[str]:
    """Lines of at most `width` columns; none where no unexplained failure or warning names a link,
    or where it does not fit. `checks` are asked what they measured, where there is a matrix.
    """
    open_codes = {
        finding.code: finding.level
        for finding in sorted(report.findings, key=lambda each: -each.level.order)
        if finding.where.links and not finding.explained_by and finding.level is not Severity.INFO
    }
    if not open_codes:
        return []
    network = network_of(report, checks)
    count = len(network.hosts)
    if not _LEAST <= count <= _MOST_LINKS:
        return []
    labels = [safe(name) for name in network.hosts]
    heads = labels
    column = max(map(len, heads))
    room = width - len(_INDENT) - column
    if (column + 1) * count > room:  # numbers instead
        labels = [f"{i + 1:>2} {label}" for i, label in enumerate(labels)]
        heads = [str(i + 1) for i in range(count)]
        room = width - len(_INDENT) - 3 * count
        if room < _LABEL[0]:
            return []
        limit = min(room, _LABEL[1])
        labels = [name if len(name) <= limit else f"{name[: limit - 1]}…" for name in labels]
        column = 2
    left = max(map(len, labels))
    cells = [
        [_mark(network, (a, b), open_codes).center(column) for b in range(count)]
        for a in range(count)
    ]
    top = " ".join(head.center(column) for head in heads)
    lines = [f"{_INDENT}{' ' * left} {top}"]
    for label, row in zip(labels, cells, strict=True):
        lines.append(f"{_INDENT}{label:<{left}} {' '.join(row)}")
    return [line.rstrip() for line in lines]


LEGEND = "from row to column: ✗ fails, ! slow or at risk, ✓ good, ? not known"
"""What the marks say."""


def _mark(network: Network, pair: Pair, codes: Mapping[str, Severity]) -> str:
    if pair[0] == pair[1]:
        return "·"
    link = network.at(pair)
    levels = {codes[code] for code in link.blame if code in codes}
    if levels:
        return "✗" if Severity.FAIL in levels else "!"
    return "✓" if link.is_known and link.reach != "failed" and not link.blame else "?"
