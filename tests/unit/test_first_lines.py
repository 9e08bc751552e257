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


HEADLESS = re.compile(
    r"(What(?! it checks)|Who|Whoever|Whether|Whom|Whose|Those|"
    r"One (that|who|which|without|with|of|is|was|may|has|can|cannot))\b"
)
"""Beginnings of sentences that leave open of what they speak."""
FEW = 0.02


def docstrings() -> Iterator[tuple[str, str]]:
    """Place and text of every docstring, but for pages of checks."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for node in statements(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Module) and PAGE.fullmatch(name):
                    continue
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    text = ast.get_docstring(node)
                    if text:
                        yield f"{name}:{getattr(node, 'lineno', 1)}", text


def is_riddle(line: str) -> bool:
    """True if a first line is none that a reader understands at once."""
    return BEGINNINGS.match(line) is not None or RIDDLES.search(line) is not None


def test_first_lines_say_what_is_returned():
    firsts = ((place, text.splitlines()[0]) for place, text in docstrings())
    assert [f"{place}: {line}" for place, line in firsts if is_riddle(line)] == []


def test_sentences_begin_with_a_noun_or_a_verb():
    sentences = [
        (place, " ".join(sentence.split()))
        for place, text in docstrings()
        for sentence in re.split(r"(?<=[.;:])\s+(?=[A-Z`])|\n\n", text)
    ]
    headless = [each for each in sentences if HEADLESS.match(each[1])]
    assert len(sentences) > 5000
    assert len(headless) < FEW * len(sentences), headless


def test_a_riddle_is_one():
    for line in ("What is known.", "Of every host the first.", "Hosts of which a GPU is lost."):
        assert is_riddle(line)
    for line in ("The hosts with a lost GPU.", "True if it is lost.", "Do nothing; for tests."):
        assert not is_riddle(line)
