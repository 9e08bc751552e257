"""Words of others in the facts, and whether a shell runs one that is in our commands.

A word is followed by a canary: a command that makes a file, and does nothing else. The programs of
a command are scripts that do nothing, in the only folder of PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nccl_doctor.api import Check, Cluster
from nccl_doctor.judge.checks import judge_all
from tests.support.fixes import steps_of

CANARY = "canary"
MAKES_IT = f": > {CANARY}"
_ANYWHERE = f"$({MAKES_IT})`{MAKES_IT}`;{MAKES_IT};"
FOREIGN = (*(quote + _ANYWHERE + quote for quote in ("", "'", '"')), f"\n{MAKES_IT}\n")
"""What a stranger writes behind a word, for a place without quotes and for one inside of some."""
SHELLS = tuple(path for name in ("bash", "dash", "zsh") if (path := shutil.which(name)))
_MOST_RANKS = 32
_PROGRAM = re.compile(r"[A-Za-z][\w.-]*")


class Watch:
    """Commands of rules that run what was put into the facts which a test gave them.

    A rule is asked again with each word of its facts that is in its commands; for commands of a
    shape that was looked at before, it is not.
    """

    def __init__(self) -> None:
        self.running: dict[str, str] = {}
        """Command → check."""
        self._watched: set[type[Check]] = set()
        self._shapes: set[tuple[str, ...]] = set()
        self._asks = False

    def watch_all(self) -> None:
        """Watch the rules of the checks that are loaded by now."""
        for kind in Check.__subclasses__():
            if kind not in self._watched and kind.__module__.startswith("nccl_doctor.checks."):
                self._watched.add(kind)
                self._watch(kind)

    def _watch(self, kind: type[Check]) -> None:
        judge = kind.judge

        def judge_and_ask(check: Check, cluster: Cluster) -> Iterable[Any]:
            if not self._asks and len(cluster.ranks) <= _MOST_RANKS:
                self._asks = True
                try:
                    self._ask(check, cluster)
                finally:
                    self._asks = False
            return judge(check, cluster)

        kind.judge = judge_and_ask  # type: ignore[method-assign]

    def _ask(self, check: Check, cluster: Cluster) -> None:
        plain = commands_of([check], cluster)
        shapes = {(check.name, *re.split(r"[^a-z -]", line)[:3]) for line in plain}
        if shapes <= self._shapes:
            return
        self._shapes |= shapes
        for other in tainted(cluster, plain):
            for line in commands_of([check], other) - plain:
                if run_by(line):
                    self.running[line] = check.name


def commands_of(checks: Iterable[Check], cluster: Cluster) -> set[str]:
    """Commands of the findings of checks, and what takes them back."""
    findings, _ = judge_all(cluster, checks)
    fixes = [finding.fix or finding.kind.fix for finding in findings]
    lines = (line for fix in fixes for step in steps_of(fix) for line in (step.command, step.undo))
    return {line for line in lines if line}


def tainted(cluster: Cluster, commands: Iterable[str]) -> Iterator[Cluster]:
    """The cluster with something behind one of its words that are in commands."""
    said = "\n".join(commands)
    values = {value for value in _values(cluster, {}) if str(value) and _is_in(str(value), said)}
    for value in sorted(values, key=str):
        for ending in FOREIGN:
            yield _changed(cluster, value, f"{value}{ending}", {})


def _is_in(value: str, said: str) -> bool:
    return value in said or any(len(part) > 2 and part in said for part in re.split(r"\W+", value))


def _values(of: Any, seen: dict[int, Any]) -> Iterator[str | int]:
    if id(of) in seen or isinstance(of, (bool, Enum)):
        return
    if isinstance(of, (str, int)):
        yield of
        return
    seen[id(of)] = of
    for part in _parts(of):
        yield from _values(part, seen)


def _parts(of: Any) -> Iterable[Any]:
    if isinstance(of, Mapping):
        return [*of, *of.values()]
    if isinstance(of, (list, tuple)):
        return of
    return [getattr(of, each.name) for each in fields(of)] if is_dataclass(of) else ()


def _changed(of: Any, old: str | int, new: str, made: dict[int, Any]) -> Any:
    """A copy in which a value is another one; what was one object stays one."""
    if isinstance(of, (bool, Enum)):
        return of
    if isinstance(of, (str, int)):
        return new if type(of) is type(old) and of == old else of
    if id(of) not in made:
        copy: Any = of
        if isinstance(of, Mapping):
            copy = {
                _changed(key, old, new, made): _changed(value, old, new, made)
                for key, value in of.items()
            }
        elif type(of) in (list, tuple):
            copy = type(of)(_changed(each, old, new, made) for each in of)
        elif is_dataclass(of) and not isinstance(of, type):
            names = [each.name for each in fields(of) if each.init]
            copy = replace(of, **{n: _changed(getattr(of, n), old, new, made) for n in names})
        made[id(of)] = copy
    return made[id(of)]


@cache
def run_by(line: str) -> tuple[str, ...]:
    """Shells that make the canary when they are given a line."""
    with TemporaryDirectory() as folder:
        programs, empty = Path(folder, "programs"), Path(folder, "empty")
        programs.mkdir()
        empty.mkdir()
        for name in {*_PROGRAM.findall(line), "true"}:
            program = programs / name
            program.write_text("#!/bin/sh\nexit 0\n")
            program.chmod(0o755)
        found = []
        for shell in SHELLS:
            subprocess.run(
                [shell, "-c", line],
                cwd=empty,
                env={"PATH": str(programs), "HOME": str(empty)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=60,
            )
            if os.path.exists(empty / CANARY):
                found.append(shell)
                os.unlink(empty / CANARY)
        return tuple(found)
