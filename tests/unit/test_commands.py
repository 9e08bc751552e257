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
    Path("nccl_doctor/toolkit/gpu/xid.py"),  # a table of ours
    Path("nccl_doctor/judge/own_fixes.py"),  # comments of a file
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


def test_a_text_is_no_command() -> None:
    command = shell("umount {}", "/a")
    for command_, undo in (("umount /a", command), (command, "mount /a")):
        with pytest.raises(TypeError, match=r"not the text '.*mount /a': use shell"):
            Step(command_, undo=undo)  # type: ignore[arg-type]


def test_fields_and_values_are_as_many() -> None:
    with pytest.raises(ValueError, match="fewer fields"):
        shell("a {}", 1, 2)


def test_a_value_is_not_filled_again() -> None:
    fix = fill(fill(Fix(look(shell("cat FILE NAME"))), FILE="a NAME'"), NAME="$(x)")
    assert [step.command for step in steps_of(fix)] == ["""cat 'a NAME'"'"'' '$(x)'"""]
    assert isinstance(fix, Fix)
    option = fill(Fix(Step(shell("# umount MOUNT"), undo=shell("mount MOUNT"))), MOUNT="-a")
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
    """Commands in the source are made by `shell`, of a template that is a literal."""
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
        if (name == "shell" and not names.is_literal(call.args[0])) or (
            name == "Command" and call.args and path not in MAKERS
        ):
            yield call.lineno


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
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._note(target, node.value)
            elif isinstance(node, (ast.AnnAssign, ast.comprehension)) and (
                value := getattr(node, "value", None) or getattr(node, "iter", None)
            ):
                self._note(node.target, value)

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
