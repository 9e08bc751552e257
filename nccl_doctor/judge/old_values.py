"""Undo of steps that set variables: the values that they have on the hosts of a step. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.commands import Command, shell
from nccl_doctor.model.findings import Finding, Where
from nccl_doctor.model.fixes import Fix, On, Step, StepHosts
from nccl_doctor.system.masking import MASK

_SETS, _UNSETS = "export", "unset"
_NAME = re.compile(r"[A-Za-z_]\w*(?==|$)")


def put_back(findings: Iterable[Finding], cluster: Cluster) -> list[Finding]:
    """The findings, with an undo of `export` and `unset` that restores what was there before.

    A rule that wrote `unset NAME` as the undo did not know the value that the variable had. Where
    hosts had different ones, the step is made of several, one for each value.
    """
    old = _OldValues(cluster)
    return [
        finding.replaced(fix=fix) if (fix := old.of(finding)) is not None else finding
        for finding in findings
    ]


class _OldValues:
    def __init__(self, cluster: Cluster) -> None:
        self._hosts = StepHosts(cluster)
        self._envs: dict[str, list[Mapping[str, str]]] = {}
        for rank in cluster.ranks:
            if rank.reported:
                self._envs.setdefault(rank.host.label, []).append(rank.env)
        self._known: dict[tuple[Step, Where | None], tuple[Step, ...]] = {}

    def of(self, finding: Finding) -> Fix | None:
        """The fix of a finding with other steps; None where nothing changes."""
        fix = finding.fix or finding.kind.fix
        if not isinstance(fix, Fix):
            return None
        changed = self._changed(fix, finding.where)
        return None if changed == fix else changed

    def _changed(self, fix: Fix, where: Where) -> Fix:
        steps = [new for step in fix.steps for new in self._steps(step, where)]
        others = [self._changed(other, where) for other in fix.alternatives]
        return Fix(*steps, text=str(fix), alternatives=others)

    def _steps(self, step: Step, where: Where) -> tuple[Step, ...]:
        names = _names(step)
        if not names:
            return (step,)
        key = step, None if step.on is On.EVERY or not isinstance(step.on, On) else where
        if key not in self._known:
            self._known[key] = self._split(step, names, where)
        return self._known[key]

    def _split(self, step: Step, names: list[str], where: Where) -> tuple[Step, ...]:
        by_undo: dict[Command, list[str]] = {}
        for host in self._hosts.of(step, where):
            by_undo.setdefault(self._undo(step, names, host), []).append(host)
        if len(by_undo) < 2:
            return tuple(replace(step, undo=undo) for undo in by_undo) or (step,)
        return tuple(replace(step, on=tuple(on), undo=undo) for undo, on in by_undo.items())

    def _undo(self, step: Step, names: list[str], host: str) -> Command:
        envs = self._envs.get(host)
        if not envs:
            return step.undo
        had: dict[str, str] = {}
        for name in names:
            values = {env.get(name) for env in envs}
            value = values.pop()
            if values or (value is not None and MASK in value):
                return Command()  # not known, or not the same for all ranks
            if value is not None:
                had[name] = value
        if not had:
            return step.undo
        back = shell("export {}", [shell("{:variable}={}", *each) for each in had.items()])
        lacking = [name for name in names if name not in had]
        if lacking and step.undo:
            return shell("{} && unset {:variable}", back, lacking)
        return back


def _names(step: Step) -> list[str]:
    """The variables of a step that only sets or unsets some, where its undo does not restore a
    value of its own.
    """
    try:
        first, *words = shlex.split(step.command.removeprefix("# "))
    except ValueError:
        return []
    found = [_NAME.match(each) for each in words]
    names = [match[0] for match in found if match]
    if first not in (_SETS, _UNSETS) or not names or not all(found):
        return []
    blank = not step.undo and not step.command.startswith("#")
    return names if blank or step.undo == f"{_UNSETS} {' '.join(names)}" else []
