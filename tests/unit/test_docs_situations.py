"""docs/launchers.md: every cell of its tables of situations has a test, and every test exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.support.rows import each_row

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## What is said in which situation\n")[2].partition("\n## ")[0]
CHECKED = PAGE.partition("\n## How each launcher is known")[2].partition("\n## ")[0]
TESTS = dict(re.findall(r"^(\d+)\. `(tests/\S+::\S+)`$", SECTION, re.MULTILINE))
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in SECTION.splitlines()
    if line.startswith("| ")
]
NUMBER = re.compile(r"\[(\d+)\]")


@functools.cache
def statements(path: str) -> list[ast.stmt]:
    return ast.parse((ROOT / path).read_text(encoding="utf-8")).body


def exists(name: str) -> bool:
    """Whether a test is defined in its file; the names of classes stand before that of the test."""
    path, *inside = name.split("::")
    body = statements(path)
    for part in inside:
        found = [
            node
            for node in body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part
        ]
        if not found:
            return False
        body = found[0].body
    return inside[-1].startswith("test_")


@each_row("name", TESTS.values())
def test_a_named_test_is_there(name: str) -> None:
    assert exists(name)


@each_row("name", ["test_docs_situations.py::test_no", "test_launch.py::TestNo::test_srun"])
def test_one_that_is_not_there_is_seen(name: str) -> None:
    assert not exists(f"tests/unit/{name}")


def test_every_cell_has_a_test_and_every_test_a_cell() -> None:
    heads = [row for row in ROWS if row[0] in ("ranks started by", "situation")]
    filled = [cell for row in ROWS if row not in heads for cell in row[1:] if cell != "—"]
    assert "" not in filled
    assert len(heads) == 2
    assert len(filled) > 30
    used = {number for cell in filled for number in NUMBER.findall(cell)}
    assert used | {*NUMBER.findall(CHECKED)} == set(TESTS)
    launchers = [row for row in ROWS if row not in heads and len(row) == len(heads[0])]
    bare = [cell for row in launchers for cell in row[1:] if cell != "—"]
    bare += [row[-1] for row in ROWS if row not in heads and row not in launchers]
    assert all(NUMBER.search(cell) for cell in bare)
    assert len({tuple(row) for row in ROWS}) == len(ROWS)


def test_how_each_launcher_was_checked_has_a_test() -> None:
    rows = [line for line in CHECKED.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 25
    checked = [row.strip("| ").split("|")[-1].strip() for row in rows]
    assert all(NUMBER.search(each) for each in checked)
    assert sum(each.startswith("run") for each in checked) >= 14
