"""First lines of docstrings begin with a noun or a verb, and say what is returned."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("nccl_doctor", "checks", "tests/support")
PAGE = re.compile(r"checks/\w+(/__init__)?\.py")
"""Modules whose docstring is a page: its first line is a question."""
BEGINNINGS = re.compile(
    r"(And|Are|As|At|Can|Did|Do(?! nothing| what)|Does|For|From|Has|How|If|In|Is|It|Its|Longer|"
    r"Nobody|Not|Of|On|Only|Our|That|There|This|To|What|When|Where|Which|Who|Whoever|Whom|Whose|"
    r"Why|Will|With|Without|Would)\b"
)
"""First words that leave open what is returned."""
RIDDLES = re.compile(
    r"\b(of which|of whom|as far as|for want of|nobody|somebody|told|whoever|whom)\b", re.IGNORECASE
)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A module with all its statements; no expression holds a docstring."""
    yield node
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from statements(inner)


def first_lines() -> Iterator[tuple[str, str]]:
    """Place and first line of every docstring, but for pages of checks."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for node in statements(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Module) and PAGE.fullmatch(name):
                    continue
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    text = ast.get_docstring(node)
                    if text:
                        line = getattr(node, "lineno", 1)
                        yield f"{name}:{line}", text.splitlines()[0]


def is_riddle(line: str) -> bool:
    """Whether a first line is none that a reader understands at once."""
    return BEGINNINGS.match(line) is not None or RIDDLES.search(line) is not None


def test_first_lines_say_what_is_returned():
    assert [f"{place}: {line}" for place, line in first_lines() if is_riddle(line)] == []


def test_a_riddle_is_one():
    for line in ("What is known.", "Of every host the first.", "Hosts of which a GPU is lost."):
        assert is_riddle(line)
    for line in ("The hosts with a lost GPU.", "Whether it is lost.", "Do nothing; for tests."):
        assert not is_riddle(line)
