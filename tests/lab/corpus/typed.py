"""Printed fixes, typed in: the cluster is healthy after them, and broken again after their undo."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl_doctor.model.report import Report
from nccl_doctor.report import text
from tests.lab.corpus import Case
from tests.lab.corpus.inject import Scene, prepare
from tests.lab.corpus.runs import examine
from tests.lab.corpus.score import Score, score
from tests.lab.lab import Lab
from tests.lab.slurm import Slurm

CALL_S = 20.0
_SETS, _UNSETS, _LIMITS = "export", "unset", "ulimit"
_OPTION = "# --"
_BLANK = re.compile(r"(?:^|[ =])[A-Z]{3,}(?: |$)")
"""A value that the reader has to know: `--master-addr ADDRESS`."""


@dataclass(frozen=True)
class Typed:
    """What became of a cluster whose printed fixes were typed.

    Attributes:
        screen: the report that the fixes are printed in, as text.
        lines: (host, command) of each step, in the order in which they were typed.
        left: findings above info after that, as (code, hosts); none where the fixes work.
        undone: the score of a third run, after all was taken back; None where a step has no undo.
    """

    screen: str
    lines: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, tuple[str, ...]], ...]
    undone: Score | None


def can_be_typed(case: Case) -> bool:
    """Whether a case is there from the start, and not something that happens once."""
    return not any("at" in step for step in case.inject)


def type_fixes(case: Case, join_s: float) -> Typed | None:
    """Examine a case, type the first way to fix each of its causes, and examine it again.

    Returns: None where a cause has no fix that can be typed.
    """
    with Lab(case.names, clocks=case.clocks) as lab:
        slurm = _slurm(case, lab)
        scene = prepare(case, lab)
        answer = examine(case, scene, join_s, slurm).answer
        roots = [each for each in _loud(answer) if each["explained_by"] is None]
        cures = [cure_of(each["fix_steps"]) for each in roots]
        if not answer or not cures or not all(cures):
            return None
        steps = [step for cure in cures for step in cure]
        screen = text.render(Report.from_json(answer), width=100)
        lines = tuple(_type(scene, steps, "command"))
        again = examine(case, scene, join_s, slurm).answer
        left = tuple((each["code"], tuple(each["where"]["hosts"])) for each in _loud(again))
        if not all(step["undo"] for step in steps):
            return Typed(screen, lines, left, None)
        tuple(_type(scene, steps[::-1], "undo"))
        broken = examine(case, scene, join_s, slurm)
        return Typed(screen, lines, left, score(case, broken.answer, broken.others))


def mistyped(case: Case, join_s: float) -> list[str]:
    """Fixes that a host prints which did not come in, and that do not repair, each in words.

    Of one cause alone: where there are two, each host may print the fix of its own. Each is typed
    in a cluster of its own, unless the answer of all hosts together has the same one.
    """
    if len(case.expect) != 1:
        return []
    with Lab(case.names, clocks=case.clocks) as lab:
        found = examine(case, prepare(case, lab), join_s, _slurm(case, lab))
    known = [each["fix_steps"] for each in _loud(found.answer)]
    wrong = []
    for node, report in found.done.partial.items():
        roots = [each for each in _loud(report) if each["explained_by"] is None]
        cures = [cure_of(each["fix_steps"]) for each in roots if each["fix_steps"] not in known]
        for cure in filter(None, cures):
            known.append(cure)
            if left := _left_after(case, join_s, cure):
                typed = "; ".join(_lines(cure))
                wrong.append(f"node {node} prints {typed}: still {', '.join(sorted(left))}")
    return wrong


def _left_after(case: Case, join_s: float, cure: Sequence[Mapping[str, Any]]) -> set[str]:
    """Codes above info, or `no report`, after these steps were typed in a fresh cluster."""
    with Lab(case.names, clocks=case.clocks) as lab:
        scene = prepare(case, lab)
        tuple(_type(scene, cure, "command"))
        again = examine(case, scene, join_s, _slurm(case, lab)).answer
    return {each["code"] for each in _loud(again)} if again else {"no report"}


def _slurm(case: Case, lab: Lab) -> Slurm | None:
    return Slurm(lab) if case.launcher == "srun" else None


def _loud(answer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    return [each for each in (answer or {}).get("findings", ()) if each["severity"] != "info"]


def cure_of(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps that change something; none where one of them lacks a value."""
    acting = [step for step in steps if not step["shows"]]
    known = (
        not line.startswith("#") or (line.startswith(_OPTION) and not _BLANK.search(line))
        for line in _lines(acting)
    )
    return acting if all(known) else []


def _lines(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    return [step["command"] for step in steps]


def _type(scene: Scene, steps: Sequence[Mapping[str, Any]], what: str) -> Iterator[tuple[str, str]]:
    """Type a command, or its undo, on all of its hosts; what is for the shell or the line that
    starts the job is there when it is started again.
    """
    for step in steps:
        line = step[what]
        for name in step["hosts"]:
            first = line.removeprefix("# ").split(" ", 1)[0]
            if line.startswith(_OPTION):
                scene.flags[name] += shlex.split(line.removeprefix("# "))
            elif first == _LIMITS:
                scene.wrap[name] += ["sh", "-c", f'{line}; exec "$@"', "sh"]
            elif first in (_SETS, _UNSETS):
                _set_variables(scene.env.setdefault(name, {}), line)
            else:
                scene.lab[name].call("bash", "-c", line, timeout_s=CALL_S)
            yield name, line


def _set_variables(environ: dict[str, str], line: str) -> None:
    """Do what `export A=1 && unset B` does."""
    for part in line.split(" && "):
        first, *words = shlex.split(part)
        if first == _SETS:
            environ.update(word.split("=", 1) for word in words)
        else:
            for word in words:
                environ.pop(word, None)
