"""Causes from findings: fold the same fault of many places, and explain one finding by another."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from nccl_doctor.judge.checks import judge_all
from nccl_doctor.judge.place import Place, PlaceIndex, is_of_a_group
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.codec import encode
from nccl_doctor.model.findings import Confidence, Effect, Finding, Layer, Severity, Where
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
                finding.cause,
                finding.fix or finding.kind.fix,
                finding.confidence,
                finding.explained_by,
                Effect.STAYS_IN_SERVICE in finding.effects,
            )
        ].append(finding)
    return sorted((_united(group) for group in same.values()), key=importance)


def explain(findings: Iterable[Finding], cluster: Cluster) -> list[Finding]:
    """Let the lowest broken layer explain what it covers, by `RULES`.

    What a judge said of its own findings stands, unless it names a code that nobody found, or found
    only as something less severe, or goes in a circle. So wherever there is a failure, one is left
    unexplained, but for what delays a job: that explains what was too late, where no failure does.

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
            given[i] = finding.replaced(explained_by=None, explained_why="")
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
                why = reason_of(CausePair(ground, cause, ground_of_cause, finding, place))
                if why and causes.add(finding.code, cause.code):
                    finding = finding.replaced(explained_by=cause.code, explained_why=why)
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
        _canonical(encode(finding.where)),
        finding.message,
        finding.fix,
        repr(getattr(finding.fix, "steps", ())),  # two may have one text
        finding.confidence.value,
        finding.explained_by or "",
        finding.check,
        Effect.STAYS_IN_SERVICE not in finding.effects,
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
        effects=_effects(group),
    )


def _effects(group: Sequence[Finding]) -> tuple[Effect, ...]:
    """Effects of findings that are one: one of them shuts all out; all of them timed out."""
    every = [set(finding.effects) for finding in group]
    kept = set.intersection(*every) | (set.union(*every) & {Effect.SHUTS_OUT})
    return tuple(effect for effect in Effect if effect in kept)


def _each(evidence: Mapping[str, Any]) -> Iterable[Any]:
    if set(evidence) == {"each"} and isinstance(evidence["each"], (list, tuple)):
        return list(evidence["each"])
    return [evidence] if evidence else []


@dataclass(frozen=True)
class CausePair:
    """A finding, and another one that may be its cause, with their places."""

    ground: PlaceIndex
    cause: Finding
    cause_place: Place
    finding: Finding
    place: Place

    @property
    def symptom(self) -> bool:
        """True if the finding is of a group, which a fault of any member may break."""
        return is_of_a_group(self.finding.kind.layer)

    @property
    def failure(self) -> bool:
        """True if the cause is a failure."""
        return self.cause.level is Severity.FAIL

    def meet(self) -> bool:
        """True if their places have something in common."""
        return self.ground.meets(self.cause_place, self.place)

    def covered(self) -> bool:
        """True if all of the finding's place lies in that of the cause."""
        return self.ground.covers(self.cause_place, self.place)


@dataclass(frozen=True)
class CauseRule:
    """One rule: the first one that `decides` on a pair says whether the cause `explains`.

    `reason`: why, in words that the report shows; of a rule that never explains, why not.
    """

    reason: str
    decides: Callable[[CausePair], bool]
    explains: Callable[[CausePair], bool] = lambda pair: False


def _is_late(pair: CausePair) -> bool:
    return pair.cause.has(Effect.DELAYS) and pair.finding.has(Effect.TIMED_OUT)


def _made_late(pair: CausePair) -> bool:
    """True if it is not certain what missed the deadline, or of a group on the slow host alone."""
    if pair.finding.kind.layer is Layer.GROUP and pair.covered():
        return True  # alone on a slow host, its ranks are as slow
    return _is_open(pair.finding) and (pair.meet() if pair.symptom else pair.covered())


def _lost_on_the_way(pair: CausePair) -> bool:
    slow = pair.failure and pair.cause.has(Effect.DELAYS) and pair.finding.kind.layer is Layer.RANKS
    return slow and pair.ground.parts_from_store(pair.cause_place, pair.place)


def _is_cut_off(pair: CausePair) -> bool:
    finding = pair.finding
    if not (pair.failure and pair.cause.has(Effect.CUTS_OFF)):
        return False
    if pair.symptom or finding.has(Effect.LOSS):
        return True
    return finding.kind.layer is Layer.RANKS and pair.ground.alone(pair.place)


def _shuts_no_port(pair: CausePair) -> bool:
    of_processes = pair.cause.kind.layer in _OF_PROCESSES and not pair.cause.has(Effect.CUTS_OFF)
    return of_processes and pair.finding.kind.layer is Layer.PORT


def _is_between(pair: CausePair) -> bool:
    """True for a difference between hosts, and what a group shows of it."""
    finding = pair.finding
    done = finding.has(Effect.ONE_PROCESS) and finding.confidence is Confidence.CERTAIN
    own = finding.has(Effect.DELAYS) or done
    return pair.failure and pair.symptom and pair.cause.has(Effect.DIFFERENCE) and not own


def _lets_nobody_in(pair: CausePair) -> bool:
    if not (pair.failure and not pair.symptom and pair.cause.has(Effect.SHUTS_OUT)):
        return False
    cut_off = pair.cause.has(Effect.CUTS_OFF)
    return not pair.covered() and pair.ground.shut_out(
        pair.cause_place, pair.place, cut_off=cut_off
    )


def _warns_below(pair: CausePair) -> bool:
    cause = pair.cause
    return (
        cause.level is pair.finding.level is Severity.WARN
        and cause.confidence is not Confidence.POSSIBLE
        and cause.code not in ENGINE_CODES
        and pair.symptom
        and bool(pair.cause_place)
        and pair.meet()
    )


def _always(pair: CausePair) -> bool:
    return True


RULES = (
    CauseRule("information explains nothing", lambda pair: pair.cause.level is Severity.INFO),
    CauseRule("it delays what took too long there", _is_late, _made_late),
    CauseRule("it loses messages on the way to rank 0", _lost_on_the_way, _always),
    CauseRule(
        "only a lower layer explains a higher one",
        lambda pair: pair.cause.kind.layer.order >= pair.finding.kind.layer.order,
    ),
    CauseRule(
        "no group makes a host or a link slow",
        lambda pair: pair.finding.has(Effect.DELAYS) and is_of_a_group(pair.cause.kind.layer),
    ),
    CauseRule(
        "what breaks only the job explains nothing of the examination, nor the other way round",
        lambda pair: pair.cause.has(Effect.JOB_ONLY) or pair.finding.has(Effect.JOB_ONLY),
    ),
    CauseRule(
        "no packet passes there",
        _is_cut_off,
        lambda pair: pair.cause.has(Effect.SHUTS_OUT) or pair.meet(),
    ),
    CauseRule("a limit or a variable shuts no port", _shuts_no_port),
    CauseRule(
        "a warning on a variable explains nothing",
        lambda pair: pair.cause.kind.layer is Layer.ENV and not pair.failure,
    ),
    CauseRule("hosts that differ break the groups between them", _is_between, _always),
    CauseRule("rank 0's host lets nobody sign in", _lets_nobody_in, _always),
    CauseRule(
        "same place, lower layer",
        lambda pair: pair.failure,
        lambda pair: pair.meet() if pair.symptom else pair.covered(),
    ),
    CauseRule("a warning on the same place, lower layer", _always, _warns_below),
)
"""The rules, in their order: the first one that decides counts."""


def reason_of(pair: CausePair) -> str:
    """Reason why a finding is explained by another one; empty where it is not."""
    rule = next(rule for rule in RULES if rule.decides(pair))
    return rule.reason if rule.explains(pair) else ""


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
