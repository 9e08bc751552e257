"""Fixes of variables on some hosts that leave no difference between hosts."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from nccl_doctor.api import Fix, On, Step
from nccl_doctor.toolkit.variables.table import table
from nccl_doctor.toolkit.variables.values import canonical, misread

from .differing import as_elsewhere
from .inspector import CONFLICT
from .view import Problem, Seen, View


def as_the_others(seen: Seen, problem: Problem, seats: set[int]) -> Problem:
    """The problem of these ranks, with a fix after which all ranks have the same.

    Of several ways, the first one that leaves no difference. Else, where the fix would set
    something else than the other ranks have, it sets what they have; if these ranks are most of
    all, it is typed on every host. Where the others have several values, or bad ones, the fix stays
    as it is: nobody knows what these ranks should have.
    """
    if len(seats) == len(seen) or not isinstance(problem.fix, Fix):
        return problem
    for number, way in enumerate((problem.fix, *problem.fix.alternatives)):
        changes = [change for step in way.steps for change in _changes(step, problem.variable)]
        if changes and all(_is_as_usual(seen, seats, *change) for change in changes):
            return problem if number == 0 else replace(problem, fix=Fix(*way.steps))
    if problem.code == CONFLICT:  # of two values, one has to go
        return problem
    odd = seen[next(iter(seats))][1]
    steps: list[Step] = []
    line = ""
    for step in problem.fix.steps:
        for name, text in _changes(step, problem.variable):
            good = _usual(seen, seats, name)
            if good is None or _is_as_usual(seen, seats, name, text):
                steps.append(step)
            elif 2 * len(seats) > len(seen):
                steps.append(replace(step, on=On.EVERY) if text is not None else step)
            elif good.is_set(name) or odd.is_set(name):
                fix = as_elsewhere(odd, good, name)
                steps += fix.steps
                line = fix if len(problem.fix.steps) == 1 else ""
    if not steps or steps == list(problem.fix.steps):
        return problem
    return replace(problem, fix=Fix(*dict.fromkeys(steps), text=line))


def _changes(step: Step, variable: str) -> Iterator[tuple[str, str | None]]:
    """(name, new text) of the variable that a step changes; the text is empty where it removes one,
    and None where it is not known: a step that changes a file is about `variable`.
    """
    words = shlex.split(step.command)
    if words[:1] == ["unset"] and len(words) == 2:
        yield words[1], ""
    elif words[:1] == ["export"] and len(words) == 2 and "=" in words[1]:
        name, _, text = words[1].partition("=")
        yield name, None if text.startswith("$") else text
    else:
        yield variable, None


def _usual(seen: Seen, seats: set[int], name: str) -> View | None:
    """A rank with the value that the others have of a variable; None where that is not known, or
    where hosts may have their own.
    """
    row = table().variables.get(name)
    if row is None or row.differs == "free" or row.kind == "url":
        return None
    others = [view for seat, (_, view) in seen.items() if seat not in seats]
    texts = Counter((view.is_set(name), view.text(name)) for view in others)
    usual, count = texts.most_common(1)[0]
    is_bad = usual[0] and (usual[1] is None or misread(row, usual[1]) is not None)
    if is_bad or (len(texts) > 1 and 2 * count <= len(seen)):
        return None
    return next(view for view in others if (view.is_set(name), view.text(name)) == usual)


def _is_as_usual(seen: Seen, seats: set[int], name: str, text: str | None) -> bool:
    """True if a variable then means what it means to the other ranks."""
    good, row = _usual(seen, seats, name), table().variables.get(name)
    if good is None or row is None or text is None:
        return False
    return canonical(row, text or None) == canonical(row, good.text(name))
