"""Commands with words of others: quoted, or a comment; and no line is put together by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nccl_doctor.api import Fix, Step, export, fill, look, shell
from nccl_doctor.toolkit.advice import fix_of
from tests.support.fixes import steps_of
from tests.support.foreign_words import CANARY, FOREIGN, MAKES_IT, SHELLS, run_by
from tests.support.rows import each_row

ROOT = Path(__file__).parents[2]
OURS = {
    path.relative_to(ROOT): ast.parse(text)
    for folder in ("nccl_doctor", "checks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if re.search(r"Step|look|shell|Command", text := path.read_text("utf-8"))
}
MAKERS = {
    Path("nccl_doctor/model/commands.py"),
    Path("nccl_doctor/model/fixes.py"),
    Path("nccl_doctor/toolkit/advice.py"),  # tables of ours, and what it looks through
    Path("checks/gpu_state/xid.py"),  # a table of ours
    Path("nccl_doctor/judge/own_fixes.py"),  # comments of a file
    Path("nccl_doctor/judge/old_values.py"),  # the undo of a step, as it is
}
"""Modules that may call a text a command."""


@each_row(
    "template, values, line",
    [
        ("kill {}", (["12", 13],), "kill 12 13"),
        ("kill {:number}", (["12", "-1"],), "# kill 12 NUMBER"),
        ("kill {:number}", ("12 -1",), "# kill NUMBER"),
        ("x {:number}", ("8080,9000-9100",), "x 8080,9000-9100"),
        ("umount {}", ("/a b",), "umount '/a b'"),
        ("umount {}", ("--all",), "# umount --all"),
        ("export A={}", ("-1",), "export A=-1"),
        ("export A={}", ("=eth0",), "export A='=eth0'"),
        ("unset {:variable}", (["A", "B;x"],), "# unset A NAME"),
        ("ip addr show {:address}", ("fd00::1",), "ip addr show fd00::1"),
        ("ip route add {:address}", ("10.0.0.0/8",), "ip route add 10.0.0.0/8"),
        ("ufw allow from {:address}", ("$(x)",), "# ufw allow from ADDRESS"),
        ("ufw allow from {:address}", ("NETWORK-OF-THE-HOSTS",),
         "# ufw allow from NETWORK-OF-THE-HOSTS"),
        ("ls {}", ("a\nb",), "# ls NAME"),
        ("# --mesh {}", ("a;b",), "# --mesh 'a;b'"),
        ("x {{ {} }}", (shell("a | b"),), "x { a | b }"),
        ("a {}", (shell("# b"),), "# a b"),
    ],
)  # fmt: skip
def test_a_value_is_a_word(template: str, values: tuple[object, ...], line: str) -> None:
    assert shell(template, *values) == line


def test_fields_and_values_are_as_many() -> None:
    with pytest.raises(ValueError, match="fewer fields"):
        shell("a {}", 1, 2)


def test_a_value_is_not_filled_again() -> None:
    fix = fill(fill(Fix(look("cat FILE NAME")), FILE="a NAME'"), NAME="$(x)")
    assert [step.command for step in steps_of(fix)] == ["""cat 'a NAME'"'"'' '$(x)'"""]
    assert isinstance(fix, Fix)
    option = fill(Fix(Step("# umount MOUNT", undo="mount MOUNT")), MOUNT="-a")
    assert [(step.command, step.undo) for step in steps_of(option)] == [
        ("# umount -a", "# mount -a")
    ]


def test_a_variable_has_the_name_of_one() -> None:
    step = export(**{"A": "1", "B=$(x)": "2"})
    assert (step.command, step.undo) == ("# export A=1 NAME=2", "# unset A NAME")


@each_row(
    "text, is_command",
    [
        ("`export MASTER_ADDR='nd0, nd1'`", True),
        ("`export RANK=$SLURM_PROCID` (in each task); or `unset RANK`", True),
        ("`# srun --ntasks-per-node=1` (starts the launcher once per host)", True),
        ("`export A=$(x)`", False),
        ("`export A=1;x`", False),
        ("`export A=1` (so); `x`", False),
        ("`export A='a\nx'`", False),
    ],
)
def test_a_command_of_a_host_is_looked_through(text: str, is_command: bool) -> None:
    assert isinstance(fix_of(text, of_host=True), Fix) is is_command


def test_the_canary_sings() -> None:
    assert run_by(f"x {FOREIGN[0]}") == SHELLS
    assert run_by(f"x '{FOREIGN[0]}'") == ()
    assert {shell.rpartition("/")[2] for shell in SHELLS} >= {"bash", "dash"} or not SHELLS
    assert CANARY in MAKES_IT


def test_no_line_is_put_together_by_hand() -> None:
    """Commands in the source are literals, or give each value to `shell`."""
    wrong = [f"{path}:{line}" for path, tree in OURS.items() for line in _by_hand(path, tree)]
    assert wrong == []


def _by_hand(path: Path, tree: ast.Module) -> Iterator[int]:
    imported = {name.asname or name.name for name in _imported(tree)}
    names = _Names(tree)
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", "")
        if name not in imported:
            continue
        given = [word.value for word in call.keywords if word.arg in ("command", "undo")]
        if name in ("Step", "look"):
            given += call.args[:1]
        elif name == "shell":
            if not names.is_literal(call.args[0]):
                yield call.lineno
            continue
        elif name == "Command":
            if call.args and path not in MAKERS:
                yield call.lineno
            continue
        if name in ("Step", "look", "replace") and path not in MAKERS:
            yield from (each.lineno for each in given if not names.is_command(each))


def _imported(tree: ast.Module) -> Iterator[ast.alias]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "nccl_doctor.api" or module.startswith("nccl_doctor.model."):
                yield from node.names


class _Names:
    """What the names of a module stand for."""

    def __init__(self, tree: ast.Module) -> None:
        self.values: dict[str, list[ast.expr]] = {}
        self.commands: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._note(target, node.value)
            elif isinstance(node, (ast.AnnAssign, ast.comprehension)) and (
                value := getattr(node, "value", None) or getattr(node, "iter", None)
            ):
                self._note(node.target, value)
            elif isinstance(node, ast.arg) and _is_command(node.annotation):
                self.commands.add(node.arg)
            elif isinstance(node, ast.FunctionDef) and _is_command(node.returns):
                self.commands.add(node.name)

    def _note(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, part in zip(target.elts, value.elts, strict=False):
                self._note(each, part)

    def is_literal(self, of: ast.expr) -> bool:
        match of:
            case ast.Constant():
                return True
            case ast.IfExp():
                return self.is_literal(of.body) and self.is_literal(of.orelse)
            case ast.Dict():
                return all(map(self.is_literal, of.values))
            case ast.Subscript():
                return self.is_literal(of.value)
            case ast.Call(func=ast.Attribute(attr="get")):
                return all(map(self.is_literal, [of.func.value, *of.args[1:]]))
            case ast.Name():
                known = self.values.get(of.id, ())
                return bool(known) and all(map(self.is_literal, known))
        return False

    def is_command(self, of: ast.expr) -> bool:
        match of:
            case ast.Constant():
                return True
            case ast.IfExp():
                return self.is_command(of.body) and self.is_command(of.orelse)
            case ast.Tuple():  # of a loop
                return all(map(self.is_command, of.elts))
            case ast.Attribute():
                return of.attr in ("command", "undo")
            case ast.Call(func=ast.Name() | ast.Attribute()):
                name = getattr(of.func, "id", getattr(of.func, "attr", ""))
                return name in ("shell", "Command", *self.commands, *ELSEWHERE)
            case ast.Name():
                known = self.values.get(of.id, ())
                return of.id in self.commands or (bool(known) and all(map(self.is_command, known)))
        return False


ELSEWHERE = {
    node.name
    for tree in OURS.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef) and getattr(node.returns, "id", "") == "Command"
}
"""Functions that return a `Command`, as mypy proves."""


def _is_command(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Command"
