"""Fixes for people: which commands to type, and on which hosts. Pure.

A command is never wrapped and never shares its line. What stands beside it is a comment of a shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from nccl_doctor.model.commands import Command
from nccl_doctor.model.findings import Finding, Where
from nccl_doctor.model.fixes import Fix, Step, StepHosts
from nccl_doctor.model.report import Report
from nccl_doctor.report.places import full_names, shortened
from nccl_doctor.toolkit.terminal import lines, safe

_FEW = 4
"""Hosts that are written out one by one."""
_MOST_LINES = 24
"""Lines of one way to fix something."""
_NUMBERED = re.compile(r"(.*?)(\d+)")
_IN_SHELL = ("export ", "unset ", "ulimit ")


@dataclass(frozen=True)
class Block:
    """One way to fix something: words for a paragraph, or lines of a shell."""

    prose: str = ""
    lines: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The block as it is, without line breaks that it has not got."""
        return "\n".join(self.lines) or safe(self.prose)


class Steps:
    """Fixes of a report's findings."""

    def __init__(self, report: Report) -> None:
        self._hosts = StepHosts(report.cluster)
        self._full = full_names(report.cluster)

    def blocks(self, findings: Sequence[Finding], most: int) -> list[Block]:
        """The fixes of findings of one kind: those of the first `most`, each once.

        Steps that several findings share are typed on the hosts of all of them.
        """
        shared: dict[tuple[object, ...], list[tuple[Fix, Where]]] = {}
        for i, finding in enumerate(findings):
            fix = finding.fix or finding.kind.fix
            fix = fix if isinstance(fix, Fix) else Fix(text=fix)
            if fix and (_commands(fix) in shared or i < most):
                shared.setdefault(_commands(fix), []).append((fix, finding.where))
        return [block for fixes in shared.values() for block in self._of(fixes)]

    def of_host(self, fix: Fix, where: Where, host: str) -> list[Step]:
        """Steps of a fix that are typed on one host."""
        return [step for step in fix.steps if self._hosts.has(step, where, host)]

    def hosts_of(self, step: Step, where: Where) -> tuple[str, ...]:
        """Hosts on which a step of a finding at that place is typed."""
        return self._hosts.of(step, where)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Labels of all hosts."""
        return self._hosts.every

    def on(self, names: Sequence[str]) -> str:
        """Hosts in words: `on ux2`, `on every host but ux0`."""
        given = set(names)
        if len(self._hosts.every) - len(given) >= _FEW:
            return f"on {self._named(names)}"
        left = [name for name in self._hosts.every if name not in given]
        if len(names) > 1 and not left:
            return "on every host"
        if 0 < len(left) < min(_FEW, len(names)) and len(names) > _FEW:
            return f"on every host but {', '.join(map(safe, left))}"
        return f"on {self._named(names)}"

    def _named(self, names: Sequence[str]) -> str:
        return shortened([self._full.get(name, name) for name in names], host_ranges)

    def _of(self, fixes: Sequence[tuple[Fix, Where]]) -> Iterator[Block]:
        """One block for a way, of fixes with the same commands."""
        first = fixes[0][0]
        if first.steps:
            yield Block(lines=_some_lines(self._lines(fixes, "")))
        else:
            yield Block(prose=str(first))
        for i, other in enumerate(first.alternatives):
            same = [(fix.alternatives[i], where) for fix, where in fixes]
            if other.steps:
                yield Block(lines=_some_lines(self._lines(same, "or ")))
            else:
                yield Block(prose=f"or: {other}")

    def _lines(self, fixes: Sequence[tuple[Fix, Where]], before: str) -> Iterator[str]:
        head = ""
        for alike in self._typed_alike(fixes[0][0].steps):
            step = fixes[0][0].steps[alike[0]]
            names = dict.fromkeys(
                name
                for fix, where in fixes
                for i in alike
                for name in self._hosts.of(fix.steps[i], where)
            )
            above = f"# {before}{self.on(tuple(names))}{_more(step)}"
            if above != head:
                yield above
            head = above
            yield typed(step.command)

    @staticmethod
    def _typed_alike(steps: Sequence[Step]) -> list[list[int]]:
        """Indices of steps; together those that differ in their hosts and their undo only."""
        runs = groupby(range(len(steps)), lambda i: replace(steps[i], on=(), undo=Command()))
        return [list(run) for _, run in runs]


def _some_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """All lines of a fix; of one with a command for each of many hosts, the first of them."""
    every = list(lines)
    if len(every) <= _MOST_LINES:
        return tuple(every)
    shown = every[:_MOST_LINES]
    while shown[-1].startswith("# "):  # what stands above a command that is left out
        shown.pop()
    left = sum(not line.startswith("# ") for line in every[len(shown) :])
    return (*shown, f"# and {left} more commands: nccl-doctor report fixes prints them")


def _commands(fix: Fix) -> tuple[object, ...]:
    """The commands without their hosts: equal for fixes that are said together."""
    steps = tuple(replace(step, on=()) for step in fix.steps)
    return (steps or str(fix), *map(_commands, fix.alternatives))


def _more(step: Step) -> str:
    note = safe(step.note)
    return f"{'' if lasts(step) else ', until it restarts'}{f': {note}' if note else ''}"


def is_for_shell(step: Step) -> bool:
    """Whether a command is for the shell that starts the job, and for nothing else."""
    return step.command.startswith(_IN_SHELL)


def lasts(step: Step) -> bool:
    """Whether what a command does outlives the next start of the host, if it does anything."""
    return step.persists or step.shows or is_for_shell(step) or step.command.startswith("#")


def typed(command: str) -> str:
    """A command as a line; one that is more than a line of plain text becomes a comment."""
    same = lines(command) == command and len(command.splitlines()) == 1
    return command if same else f"# {safe(command)}"


def host_ranges(names: Iterable[str]) -> str:
    """Names of hosts as people write them: a few one by one, many as `gpu[001-064]`."""
    given = list(dict.fromkeys(names))
    if len(given) <= _FEW:
        return ", ".join(map(safe, given))
    numbers: dict[tuple[str, int], list[int]] = {}
    parts: dict[str, None] = {}
    for name in map(safe, given):
        found = _NUMBERED.fullmatch(name)
        if found is None:
            parts[name] = None
        else:
            numbers.setdefault((found[1], len(found[2])), []).append(int(found[2]))
    for (stem, width), each in numbers.items():
        spans = _spans(sorted(each))
        said = ",".join(f"{a:0{width}}" + (f"-{b:0{width}}" if b > a else "") for a, b in spans)
        parts[f"{stem}[{said}]" if len(each) > 1 else stem + said] = None
    return ", ".join(parts)


def _spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans
