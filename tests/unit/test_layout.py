"""Who may import whom, what every check shows to people, and which packages are shipped."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from nccl_doctor import registry
from nccl_doctor.autopsy.kinds import AUTOPSY_KINDS
from nccl_doctor.cli import cli
from nccl_doctor.model.kinds import BESIDE_KINDS, ENGINE_KINDS, HISTORY_KINDS, REMOTE_KINDS
from nccl_doctor.report import manual

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.support.fixes import steps_of

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "nccl_doctor"
ENGINE_FILES = sorted(ENGINE.rglob("*.py"))
CHECK_FILES = sorted(
    [path for path in (ROOT / "checks").glob("*.py") if path.stem != "__init__"]
    + [*(ROOT / "checks").glob("*/__init__.py")]
)
NAMES = {path.parent.name if path.stem == "__init__" else path.stem for path in CHECK_FILES}
FOUND = registry.load()
BUILT_IN = [check for check in FOUND.checks if check.name in NAMES]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- the arrows: most are contracts of import-linter, in pyproject.toml ---


def imported(node: ast.AST, late: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether only a function imports it) for every absolute import below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield str(child.module), late
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from imported(child, late or inside)


def imports_of(path: Path) -> set[tuple[str, bool]]:
    return set(imported(ast.parse(path.read_text(encoding="utf-8"))))


def of(module: str, *packages: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in packages)


def test_the_reader_of_imports():
    source = """
import os.path
from nccl_doctor import checks
from . import sibling
if TYPE_CHECKING:
    import torch
class A:
    def f(self):
        import subprocess
"""
    assert set(imported(ast.parse(source))) == {
        ("os.path", False),
        ("nccl_doctor", False),
        ("torch", False),
        ("subprocess", True),
    }


HEAVY = ("torch", "pynvml", "deepspeed", "subprocess")


def test_a_check_needs_nothing_heavy_to_judge():
    """Beside ours it imports the standard library; what is heavy or starts processes, only when it
    observes, so that judging a saved report needs none of it.
    """
    wrong = [
        (named(path), module)
        for path in (ROOT / "checks").rglob("*.py")
        for module, late in imports_of(path)
        if not of(module, "nccl_doctor")
        and not (late if of(module, *HEAVY) else module.split(".")[0] in sys.stdlib_module_names)
    ]
    assert wrong == []


def test_the_root_holds_four_modules():
    names = {path.name for path in ENGINE.glob("*.py")}
    assert names == {"__init__.py", "__main__.py", "api.py", "registry.py"}


OPENS = {  # modules of the engine that open files themselves
    "report/bundle": "in a child, by helpers.send",
    "gather/views": "in a child, by helpers.send",
    **dict.fromkeys(("observe/child", "launch/identity"), "/proc, which always answers"),
    **dict.fromkeys(
        ("report/formats/html", "report/issue", "report/story", "cli/pages", "gather/envelope"),
        "what is shipped with the program",
    ),
    "autopsy/inputs": "in a child, by helpers.send",
    "cli/from_python": "a temporary folder of its own",
    "cli/keep": "in a child, by helpers.send",
    "system/terminal": "stdout and stderr",
}
NO_FILE = ("os", "tarfile", "formatter")
OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}


def lines_that_open(path: Path) -> Iterator[int]:
    text = path.read_text(encoding="utf-8")
    if not any(word in text for word in OPENING):
        return
    for node in ast.walk(ast.parse(text)):
        called = node.func if isinstance(node, ast.Call) else None
        if (isinstance(called, ast.Name) and called.id == "open") or (
            isinstance(called, ast.Attribute)
            and called.attr in OPENING
            and ast.unparse(called.value) not in NO_FILE
        ):
            yield node.lineno


def test_no_two_classes_have_one_name():
    """With or without an underscore: one name, one meaning."""
    places: dict[str, list[str]] = {}
    for path in ENGINE_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(named(path))
    assert len(places) > 300
    assert {name: each for name, each in places.items() if len(each) > 1} == {}


def test_files_of_the_user_are_opened_at_the_door():
    """Their disk may never answer, and nothing that is waited for may wait for it."""
    wrong = []
    for path in ENGINE_FILES:
        if {"toolkit", "system"} & {*path.parts}:
            continue
        why = OPENS.get(path.relative_to(ENGINE).with_suffix("").as_posix())
        if why is None:
            wrong += [f"{named(path)}:{line}" for line in lines_that_open(path)]
        elif "helpers" in why:
            assert "nccl_doctor.system.helpers" in {module for module, _ in imports_of(path)}
    assert wrong == []


# --- what a check shows to people ---

HEADINGS = ["What it checks", "Why it matters", "How to fix", "When it is wrong", "References"]


def test_every_check_has_its_page():
    for path in CHECK_FILES:
        page = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        question, *rest = page.splitlines()
        assert question.endswith("?"), path
        assert [line for line in rest if line in HEADINGS] == HEADINGS, path
        texts = re.split("|".join(f"^{heading}$" for heading in HEADINGS), page, flags=re.M)
        assert all(text.strip("-\n ") for text in texts[1:]), path


def test_every_file_of_a_check_is_a_check():
    assert not FOUND.problems
    assert [check.name for check in BUILT_IN] != []
    assert {check.name for check in BUILT_IN} == NAMES


def test_every_kind_is_explained():
    listed = [(kind, check) for check in BUILT_IN for kind in check.kinds]
    engine = (*ENGINE_KINDS, *BESIDE_KINDS, *REMOTE_KINDS, *HISTORY_KINDS, *AUTOPSY_KINDS)
    listed += [(kind, None) for kind in engine]
    for kind, check in listed:
        for words in (kind.title, kind.why, kind.fix):
            assert words.strip() == words != "", kind.code
        assert not kind.title.endswith("."), kind.code
        page = manual.code_and_check_pages(FOUND, kind.code)
        said = " ".join(page.split())  # lines are broken for a terminal
        name = "found by the engine" if check is None else check.name
        steps = [step.command for step in steps_of(kind.fix)]
        for words in (kind.code, kind.title, kind.why, *(steps or [kind.fix]), name):
            line = words if words in steps else manual.shown(words)
            assert " ".join(line.split()) in said, kind.code
        assert check is None or manual.check_page(check) in page, kind.code


@pytest.mark.parametrize("kinds", [BUILT_IN[0].kinds, ENGINE_KINDS, REMOTE_KINDS, HISTORY_KINDS])
def test_what_explain_prints_is_that_page(kinds):
    printed = CliRunner().invoke(cli, ["explain", "--all", kinds[0].code])
    assert printed.exit_code == 0
    assert printed.output == manual.code_and_check_pages(FOUND, kinds[0].code) + "\n"


# --- what is shipped; the wheel itself: tests/cli/test_docs_install.py ---


def packages_of_the_tree() -> set[str]:
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in ENGINE.rglob("__init__.py")}
    inside = {path.parent.relative_to(ROOT) for path in (ROOT / "checks").rglob("__init__.py")}
    return found | {".".join(("nccl_doctor", *folder.parts)) for folder in inside}


def test_the_list_of_packages_is_the_tree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_of_the_tree()
