"""Fixes of a saved report that this version would print for its facts. Pure.

A report may come from anybody, and what it calls a fix is typed by whoever reads it. A command
stays if the facts, judged again, give it on the same hosts, or if it is that of the kind itself.
Any other becomes a comment that says where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from nccl_doctor.autopsy.kinds import SHARED_KINDS
from nccl_doctor.judge.conclusion import judge_again
from nccl_doctor.model.commands import Command
from nccl_doctor.model.findings import Finding, Where
from nccl_doctor.model.fixes import Fix, Step, StepHosts
from nccl_doctor.model.report import Report

if TYPE_CHECKING:
    from nccl_doctor.registry import Registry

OF_FILE = "this stands in the file; for its facts, this version has no such fix"


def with_own_fixes(saved: Report, registry: Registry) -> Report:
    """The report, with each command that this version would not print as a comment.

    The facts are judged again, if there are commands at all.
    """
    if not has_commands(saved):
        return saved
    without = without_foreign_fixes(saved, registry)
    if saved.run.source:
        return without  # it has no facts of an examination
    try:
        again = judge_again(without, registry).findings
    except ValueError:  # the facts are not of a whole cluster
        return without
    here = {check.name for check in registry.checks}
    return _looked_through(saved, registry, [each for each in again if each.check in here])


def without_foreign_fixes(saved: Report, registry: Registry) -> Report:
    """The report, with each command that is not that of a kind itself as a comment."""
    return _looked_through(saved, registry, ()) if has_commands(saved) else saved


def has_commands(report: Report) -> bool:
    """True if a report has commands to type."""
    return any(
        isinstance(way, Fix) and way.steps
        for finding in (*report.findings, *report.root_causes)
        for way in _ways(finding.fix or finding.kind.fix)
    )


def _ways(fix: str) -> Iterator[str]:
    yield fix
    yield from getattr(fix, "alternatives", ())


def _looked_through(saved: Report, registry: Registry, again: Iterable[Finding]) -> Report:
    known = _OwnFixes(saved, registry, again)
    return replace(
        saved,
        findings=tuple(map(known.of, saved.findings)),
        root_causes=tuple(map(known.of, saved.root_causes)),
    )


class _OwnFixes:
    """Fixes that this version has: of its kinds, and for the facts of a report."""

    def __init__(self, saved: Report, registry: Registry, again: Iterable[Finding]) -> None:
        self._hosts = StepHosts(saved.cluster)
        self._kinds = registry.kinds
        self._texts: set[str] = set()
        self._places: dict[tuple[str, str], set[str]] = {}
        """Command, and what takes it back → hosts on which it is typed."""
        for finding in again:
            for way in _ways(finding.fix or finding.kind.fix):
                self._texts.add(str(way))
                for step in getattr(way, "steps", ()):
                    places = self._places.setdefault((step.command, step.undo), set())
                    places.update(self._hosts.of(step, finding.where))

    def of(self, finding: Finding) -> Finding:
        """The finding of a file, with commands that are ours, or are said to be the file's."""
        fix = finding.fix or finding.kind.fix
        if not isinstance(fix, Fix):
            return finding
        kind, _ = self._kinds.get(finding.code, (None, None))
        over = [each for each in SHARED_KINDS if each.code == finding.code]
        own = [way for each in (*over, *([kind] if kind else ())) for way in _ways(each.fix)]
        others = [self._way(way, finding.where, own) for way in fix.alternatives]
        first = self._way(fix, finding.where, own)
        text = str(fix) if not fix.steps or str(fix) in self._texts or str(fix) in own else ""
        return finding.replaced(fix=Fix(*first.steps, text=text, alternatives=others))

    def _way(self, way: Fix, where: Where, own: Iterable[str]) -> Fix:
        typed = {(s.command, s.undo) for each in own for s in getattr(each, "steps", ())}
        steps = [self._step(step, where, typed) for step in way.steps]
        text = str(way) if not steps or str(way) in self._texts else ""
        return Fix(*steps, text=text)

    def _step(self, step: Step, where: Where, own: Iterable[tuple[str, str]]) -> Step:
        line, hosts = (step.command, step.undo), self._hosts.of(step, where)
        if line in own or (line in self._places and self._places[line].issuperset(hosts)):
            return step
        command, undo = (Command(f"# {each.removeprefix('# ')}") if each else each for each in line)
        note = f"{OF_FILE}: {step.note}" if step.note else OF_FILE
        return replace(step, command=command, undo=undo, note=note)
