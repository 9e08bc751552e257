"""Tables among the facts: a fact `{"columns": [...], "rows": [[...], ...]}` is shown as one."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl_doctor.model.cluster import Facts
from nccl_doctor.model.report import Report

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
    places = [(host.label, host.facts) for host in report.cluster.hosts]
    places += [(rank.host.label, rank.facts) for rank in report.cluster.ranks]
    for name, facts in places:
        for check, key, table in _of_facts(facts):
            same = found.setdefault(check, {}).setdefault((key, *_frozen(table)), [])
            if name not in same:
                same.append(name)
    order = {check.name: i for i, check in enumerate(report.checks)}
    for check in sorted(found, key=lambda each: (order.get(each, len(order)), each)):
        per_key: dict[str, int] = {}
        for key, _, _ in found[check]:
            per_key[key] = per_key.get(key, 0) + 1
        for (key, columns, rows), hosts in found[check].items():
            yield Table(f"{check}: {key}", tuple(hosts), per_key[key] == 1, columns, rows)


def lay_out(table: Table, width: int, safe: Callable[[str], str]) -> list[str]:
    """Lines of at most `width` columns, unless there are too many columns for that.

    Args:
        table: what to lay out; long cells are broken over several lines.
        width: columns of the terminal.
        safe: what makes text from elsewhere fit for a terminal.
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
    more = len(table.rows) - len(rows)
    return [*lines, *([f"and {more} more"] if more > 0 else [])]


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


def _of_facts(facts: Facts) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for check, rounds in facts.items():
        for outcome in rounds.values():
            for key, value in outcome.facts.items():
                if is_table(value):
                    yield check, str(key), value


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
