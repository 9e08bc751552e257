"""Causes from findings: fold the same fault of many places, and explain one finding by another."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from nccl_doctor.judge.checks import judge_all
from nccl_doctor.judge.place import Place, PlaceIndex, is_of_a_group
from nccl_doctor.model.check import Check
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
    ground = PlaceIndex(cluster)
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
    ground: PlaceIndex, cause: Finding, cause_place: Place, finding: Finding, place: Place
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


# Failures for which only a choice of the program is to blame: they are none of the job's. Pure.


def excuse(findings: Sequence[Finding]) -> list[Finding]:
    """Make warnings of the failures that have an excuse (`Finding.excused_by`), and of what nothing
    else explains.

    The note that excuses them becomes a warning with them and explains them: it says what to set.
    What they kept from being tested stays unknown.

    Args:
        findings: as `explain` left them.
    """
    codes = _innocent([finding for finding in findings if finding.level is Severity.FAIL])
    used = {finding.excused_by for finding in findings if _has_excuse(finding, codes)}
    said = {finding.code for finding in findings if finding.code in used}
    out = []
    for finding in findings:
        if _has_excuse(finding, codes):
            by = finding.excused_by if finding.excused_by in said else None
            finding = finding.replaced(
                severity=Severity.WARN, explained_by=finding.explained_by or by
            )
        elif finding.code in said and finding.level is Severity.INFO:
            finding = finding.replaced(severity=Severity.WARN)
        out.append(finding)
    return out


def _innocent(failures: Sequence[Finding]) -> set[str]:
    """Codes whose failures all have an excuse, or are explained by one that has."""
    codes: set[str] = set()
    while True:
        guilty = {finding.code for finding in failures if not _has_excuse(finding, codes)}
        more = {finding.code for finding in failures} - guilty
        if more == codes:
            return codes
        codes = more


def _has_excuse(finding: Finding, innocent: set[str]) -> bool:
    return finding.level is Severity.FAIL and (
        bool(finding.excused_by) or finding.explained_by in innocent
    )


# Findings of one host that nothing learnt later takes back: they need not wait for the report.


def certain_at_once(
    cluster: Cluster, checks: Sequence[Check], wanted: Callable[[str], bool]
) -> list[Finding]:
    """Certain failures of kinds that their checks know at once (`Check.at_once`), with no other
    cause: the report will name them too, whoever joins.

    It is not known yet whether this host will get in, and some rules ask: what is a failure in
    either case is one here. Only the severity of the report may then be a milder one.

    Args:
        cluster: of one participant, as it knows it alone.
        checks: those that have observed; their order does not matter.
        wanted: as for `conclude`.
    """
    known = {check.name: check.at_once for check in checks}
    found: dict[str, Finding] = {}
    for joins in (False, True):
        seen = _as_if(cluster, joins=joins)
        judged = [finding for finding in judge_all(seen, checks)[0] if wanted(finding.code)]
        for finding in root_causes(fold(excuse(explain(judged, seen)))):
            if (
                finding.level is Severity.FAIL
                and finding.confidence is Confidence.CERTAIN
                and finding.kind in known.get(finding.check, ())
            ):
                found.setdefault(finding.code, finding)
    return list(found.values())


def _as_if(cluster: Cluster, *, joins: bool) -> Cluster:
    """The cluster, if its hosts are to get in, or not."""
    hosts = {host.id: replace(host, joined=joins) for host in cluster.hosts}
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    return replace(cluster, hosts=tuple(hosts.values()), ranks=ranks)
