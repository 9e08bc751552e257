"""Causes from findings: fold the same fault of many places, and explain one finding by another."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from nccl_doctor.judge.place import Map, Place, is_of_a_group
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.findings import Confidence, Finding, Layer, Severity, Where
from nccl_doctor.model.kinds import ENGINE_CODES

_OF_PROCESSES = (Layer.HOST, Layer.ENV)
"""A limit or a variable may break a process, or choose an interface; it lets no packet pass."""


def fold(findings: Iterable[Finding]) -> list[Finding]:
    """Unite findings that differ only in place and evidence; the order given does not matter.

    Evidence that differs is kept whole, as `{"each": [...]}`.
    """
    same: dict[Any, list[Finding]] = defaultdict(list)
    for finding in findings:
        same[
            (
                finding.kind,
                finding.check,
                finding.level,
                finding.message,
                finding.fix or finding.kind.fix,
                finding.confidence,
                finding.explained_by,
                finding.drains,
            )
        ].append(finding)
    return sorted((_united(group) for group in same.values()), key=importance)


def explain(findings: Iterable[Finding], cluster: Cluster) -> list[Finding]:
    """Let the lowest broken layer explain what it covers.

    A failure explains failures and warnings of higher layers whose place lies in its own; from the
    group layer up it is enough that the places meet, and of a difference between hosts
    (`Kind.between`) that it is there, but for a slow host or link elsewhere, or what was certainly
    done to one process (`Kind.of_one`). One of the host or the environment shuts no port. A warning
    breaks no layer: it explains only warnings from the group layer up, where it meets their place,
    and nothing if it is no more than possible, such as a hang that came once. What a judge said of
    its own findings stands, unless it names a code that nobody found, or found only as something
    less severe, or goes in a circle. So wherever there is a failure, one is left unexplained, but
    for this: what delays a job (`Kind.delays`) explains that a host came too late, or that a group
    looks hung there, where no failure does, if nobody can be certain what it was, or if it hung
    forming on that host alone; no group makes a host or a link slow. A failure on rank 0's host
    that shuts everybody out explains that hosts never came, unless one did come; if that host is
    cut off, unless one that came answered later. What only comes later (`Kind.later`) explains
    nothing, and nothing explains it. A cut cable (`Kind.cuts_off`) shuts every port, and explains
    each loss (`Kind.loss`) that it meets; if it is rank 0's, then every loss, and all that happened
    to groups. What is only information explains nothing.

    Causes are folded first: faults of all ranks of a host are one of the host. What they explain is
    not: of the same fault on two hosts, one may have a cause that the other has not.
    """
    given = sorted(findings, key=importance)
    worst = {finding.code: finding.level.order for finding in reversed(given)}
    causes = _Causes()
    for i, finding in enumerate(given):
        code = finding.explained_by
        if code is not None and (
            worst.get(code, len(Severity)) > finding.level.order
            or not causes.add(finding.code, code)
        ):
            given[i] = finding.replaced(explained_by=None)
    ground = Map(cluster)
    lowest_first = sorted(
        ((cause, ground.place(cause.where)) for cause in fold(given)),
        key=lambda item: (
            item[0].level is not Severity.FAIL,
            item[0].kind.layer.order,
            importance(item[0]),
        ),
    )
    out = []
    for finding in given:
        if finding.explained_by is None and finding.level is not Severity.INFO:
            place = ground.place(finding.where)
            for cause, ground_of_cause in lowest_first:
                if _explains(ground, cause, ground_of_cause, finding, place) and causes.add(
                    finding.code, cause.code
                ):
                    finding = finding.replaced(explained_by=cause.code)
                    break
        out.append(finding)
    return out


def root_causes(findings: Iterable[Finding]) -> list[Finding]:
    """Findings to fix, most important first: unexplained failures; if there are none, warnings."""
    roots = [finding for finding in findings if finding.explained_by is None]
    for severity in (Severity.FAIL, Severity.WARN):
        worst = [finding for finding in roots if finding.level is severity]
        if worst:
            return sorted(worst, key=importance)
    return []


def importance(finding: Finding) -> tuple[Any, ...]:
    """A total order: severity, layer, code, place, and then whatever tells two apart."""
    return (
        finding.level.order,
        finding.kind.layer.order,
        finding.code,
        _canonical(finding.where.to_json()),
        finding.message,
        finding.fix,
        repr(getattr(finding.fix, "steps", ())),  # two may have one text
        finding.confidence.value,
        finding.explained_by or "",
        finding.check,
        finding.drains,
        _canonical(finding.evidence),
    )


def _canonical(value: Any) -> str:
    # default=str: evidence that is not JSON is the check's mistake, not a reason to lose a finding.
    return json.dumps(value, sort_keys=True, default=str)


def _united(group: Sequence[Finding]) -> Finding:
    # All at once: thousands of ranks, united one by one, would be sorted as many times.
    where = Where(
        **{
            kind.name: tuple(sorted({one for f in group for one in getattr(f.where, kind.name)}))
            for kind in fields(Where)
        }
    )
    evidence = {_canonical(one): one for finding in group for one in _each(finding.evidence)}
    kept = [json.loads(text) for text in sorted(evidence)]
    return group[0].replaced(
        where=where,
        evidence=kept[0] if len(kept) == 1 else {"each": kept} if kept else {},
        fix=group[0].fix or group[0].kind.fix,
        severity=group[0].level,
        shuts_out=any(finding.shuts_out for finding in group),
        timed_out=all(finding.timed_out for finding in group),
    )


def _each(evidence: Mapping[str, Any]) -> Iterable[Any]:
    if set(evidence) == {"each"} and isinstance(evidence["each"], (list, tuple)):
        return list(evidence["each"])
    return [evidence] if evidence else []


def _explains(
    ground: Map, cause: Finding, cause_place: Place, finding: Finding, place: Place
) -> bool:
    symptom = is_of_a_group(finding.kind.layer)
    if cause.level is Severity.INFO:
        return False
    if cause.kind.delays and (finding.kind.by_deadline or finding.timed_out):
        reach = ground.meets if symptom else ground.covers
        if finding.kind.layer is Layer.GROUP and ground.covers(cause_place, place):
            return True  # alone on a slow host, its ranks are as slow
        return _is_open(finding) and reach(cause_place, place)
    heavy = cause.kind.delays and cause.level is Severity.FAIL
    if heavy and finding.kind.layer is Layer.RANKS and ground.parts_from_store(cause_place, place):
        return True  # what its ranks say is lost on the way
    if cause.kind.layer.order >= finding.kind.layer.order:
        return False
    if finding.kind.delays and is_of_a_group(cause.kind.layer):
        return False
    if cause.kind.later or finding.kind.later:
        return False
    loss = finding.kind.loss or (finding.kind.layer is Layer.RANKS and ground.alone(place))
    if cause.kind.cuts_off and cause.level is Severity.FAIL and (loss or symptom):
        return cause.shuts_out or ground.meets(cause_place, place)
    of_processes = cause.kind.layer in _OF_PROCESSES and not cause.kind.cuts_off
    if of_processes and finding.kind.layer is Layer.PORT:
        return False
    if cause.kind.layer is Layer.ENV and cause.level is not Severity.FAIL:
        return False
    if cause.level is Severity.FAIL:
        if symptom:
            done = finding.kind.of_one and finding.confidence is Confidence.CERTAIN
            differs = cause.kind.between and not (finding.kind.delays or done)
            return differs or ground.meets(cause_place, place)
        return ground.covers(cause_place, place) or (
            cause.shuts_out and ground.shut_out(cause_place, place, cut_off=cause.kind.cuts_off)
        )
    return (
        cause.level is finding.level is Severity.WARN
        and cause.confidence is not Confidence.POSSIBLE
        and cause.code not in ENGINE_CODES
        and symptom
        and bool(cause_place)
        and ground.meets(cause_place, place)
    )


def _is_open(finding: Finding) -> bool:
    """True if it is not known what missed the deadline; of a link, only that it was there."""
    where = finding.where
    just_a_link = bool(where.links) and not (where.hosts or where.ranks)
    return finding.confidence is not Confidence.CERTAIN or just_a_link


class _Causes:
    """Map of codes to the codes that explain them; it refuses a circle."""

    def __init__(self) -> None:
        self._causes: dict[str, set[str]] = defaultdict(set)

    def add(self, code: str, cause: str) -> bool:
        if self._reaches(cause, code):
            return False
        self._causes[code].add(cause)
        return True

    def _reaches(self, start: str, goal: str) -> bool:
        seen: set[str] = set()
        todo = [start]
        while todo:
            code = todo.pop()
            if code == goal:
                return True
            if code not in seen:
                seen.add(code)
                todo.extend(self._causes.get(code, ()))
        return False
