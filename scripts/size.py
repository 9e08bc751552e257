"""Size of the engine, of the toolkit, of the checks and of the tests, at one commit or several.

    python scripts/size.py 149060ef HEAD

Columns: files, lines, classes, class names that two classes share (an underscore does not tell
them apart), and constants that hold seconds (`NAME_S`).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "engine": "nccl_doctor/",
    "toolkit": "nccl_doctor/toolkit/",
    "checks": "checks/",
    "tests": "tests/",
}
"""Parts and their folders; the engine is what is in no other one."""


class Size(NamedTuple):
    """Counts of one part at one commit."""

    files: int
    lines: int
    classes: int
    shared_names: int
    time_constants: int


def sources(commit: str) -> Iterator[tuple[str, str]]:
    """Path and text of each Python file of a commit."""
    listed = _git("ls-tree", "-r", "--name-only", "-z", commit).decode().split("\0")
    for path in listed:
        if path.endswith(".py"):
            yield path, _git("show", f"{commit}:{path}").decode()


def part_of(path: str) -> str:
    """Part that a file belongs to; empty for others, such as scripts."""
    found = [(len(folder), part) for part, folder in PARTS.items() if path.startswith(folder)]
    return max(found)[1] if found else ""


def size(texts: list[str]) -> Size:
    """Counts of some files."""
    classes: Counter[str] = Counter()
    seconds = 0
    for text in texts:
        for node in ast.walk(tree := ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")] += 1
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [each.id for each in targets if isinstance(each, ast.Name)]
                seconds += sum(name.isupper() and name.endswith("_S") for name in names)
    shared = sum(number > 1 for number in classes.values())
    lines = sum(text.count("\n") for text in texts)
    return Size(len(texts), lines, classes.total(), shared, seconds)


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True).stdout


def main() -> None:
    """Print the table."""
    rows = []
    for commit in sys.argv[1:] or ["HEAD"]:
        texts: dict[str, list[str]] = {part: [] for part in PARTS}
        for path, text in sources(commit):
            if part := part_of(path):
                texts[part].append(text)
        rows += [(commit, part, *size(each)) for part, each in texts.items()]
    head = ("commit", "part", "files", "lines", "classes", "shared names", "time constants")
    sys.stdout.write(tabulate(rows, head, "github") + "\n")


if __name__ == "__main__":
    main()
