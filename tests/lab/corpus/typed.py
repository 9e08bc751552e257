"""Printed fixes, typed in: the cluster is healthy after them, and broken again after their undo."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab.corpus import Case
from tests.lab.corpus.inject import Scene, prepare
from tests.lab.corpus.runs import examine
from tests.lab.corpus.score import Score, score
from tests.lab.lab import Lab

CALL_S = 20.0
_SETS, _UNSETS = "export", "unset"


@dataclass(frozen=True)
class Typed:
    """What became of a cluster whose printed fixes were typed.

    Attributes:
        lines: `host: command` of each step, in the order in which they were typed.
        left: findings above info after that, as (code, hosts); none where the fixes work.
        undone: the score of a third run, after all was taken back; None where a step has no undo.
    """

    lines: tuple[str, ...]
    left: tuple[tuple[str, tuple[str, ...]], ...]
    undone: Score | None


def can_be_typed(case: Case) -> bool:
    """Whether a case is there from the start, and started by hand."""
    return case.launcher in ("own", "plain") and not any("at" in step for step in case.inject)


def type_fixes(case: Case, join_s: float) -> Typed | None:
    """Examine a case, type the first way to fix each of its causes, and examine it again.

    Returns: None where a cause has no fix that can be typed.
    """
    with Lab(case.names, clocks=case.clocks) as lab:
        scene = prepare(case, lab)
        answer = examine(case, scene, join_s).answer
        roots = [each for each in _loud(answer) if each["explained_by"] is None]
        steps = [step for each in roots for step in each["fix_steps"]]
        if not roots or not all(each["fix_steps"] for each in roots):
            return None
        lines = tuple(_type(scene, steps, "command"))
        again = examine(case, scene, join_s).answer
        left = tuple((each["code"], tuple(each["where"]["hosts"])) for each in _loud(again))
        if not all(step["undo"] for step in steps):
            return Typed(lines, left, None)
        tuple(_type(scene, steps[::-1], "undo"))
        broken = examine(case, scene, join_s)
        return Typed(lines, left, score(case, broken.answer, broken.others))


def _loud(answer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    return [each for each in (answer or {}).get("findings", ()) if each["severity"] != "info"]


def _type(scene: Scene, steps: Sequence[Mapping[str, Any]], what: str) -> Iterator[str]:
    """Type a command, or its undo, on all of its hosts; a variable is one of the job there."""
    for step in steps:
        for name in step["hosts"]:
            first, *words = shlex.split(step[what])
            environ = scene.env.setdefault(name, {})
            if first == _SETS:
                environ.update(word.split("=", 1) for word in words)
            elif first == _UNSETS:
                for word in words:
                    environ.pop(word, None)
            else:
                scene.lab[name].call("bash", "-c", step[what], timeout_s=CALL_S)
            yield f"{name}: {step[what]}"
