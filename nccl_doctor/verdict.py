"""From everybody's facts to one verdict: judge, fold, explain, and never say more than was seen.

Pure: no I/O, no clock, no environment. It runs again on a saved report and gives the same answer.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from nccl_doctor import __version__
from nccl_doctor.api import Check
from nccl_doctor.kinds import CHECK_BROKE, ENGINE_CODES
from nccl_doctor.model import (
    ALONE,
    CheckResult,
    Cluster,
    Finding,
    Layer,
    OutcomeStatus,
    Rank,
    Scope,
    Severity,
    Status,
    Where,
    number_range,
)
from nccl_doctor.place import Map, Place, host_where, rank_where
from nccl_doctor.record import Report, cluster_of, record, run_of
from nccl_doctor.registry import Registry
from nccl_doctor.silence import silent_ranks

EXIT_CODES: Mapping[str, int] = {"pass": 0, "warn": 0, "fail": 1, "unknown": 3}
"""Exit code of each verdict; 2 is a usage or configuration error, which yields no report."""

_SYMPTOMS = Layer.GROUP.order
"""From this layer on, a group stands or falls as a whole: one bad member stops it everywhere."""

_NONE: Mapping[str, str] = {}


def judge_all(cluster: Cluster, checks: Iterable[Check]) -> tuple[list[Finding], dict[str, str]]:
    """Let every check judge.

    Returns: the findings, each stamped with its check, and check name → what went wrong for every
    check whose rules broke. A broken check loses no finding that it made before.
    """
    findings: list[Finding] = []
    broken: dict[str, str] = {}
    for check in checks:
        try:
            for finding in check.judge(cluster):
                findings.append(finding.replaced(check=check.name))
        except Exception as error:  # a check's mistake must cost its own answer only
            broken[check.name] = _error(error)
            findings.append(_broke(check, "judge", error))
    return findings, broken


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
            )
        ].append(finding)
    return sorted((_united(group) for group in same.values()), key=_importance)


def explain(findings: Iterable[Finding], cluster: Cluster) -> list[Finding]:
    """Let the lowest broken layer explain what it covers.

    A failure explains failures and warnings of higher layers whose place lies in its own; from the
    group layer up it is enough that the places meet. A warning breaks no layer: it explains only
    warnings from the group layer up, where it meets their place. What a judge said of its own
    findings stands, unless it names a code that nobody found, or found only as something less
    severe, or goes in a circle. So wherever there is a failure, one is left unexplained.
    """
    given = sorted(findings, key=_importance)
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
    placed = [(finding, ground.place(finding.where)) for finding in given]
    lowest_first = sorted(placed, key=lambda item: (item[0].kind.layer.order, _importance(item[0])))
    out = []
    for finding, place in placed:
        if finding.explained_by is None and finding.level is not Severity.INFO:
            for cause, ground_of_cause in lowest_first:
                if _explains(ground, cause, ground_of_cause, finding, place) and causes.add(
                    finding.code, cause.code
                ):
                    finding = finding.replaced(explained_by=cause.code)
                    break
        out.append(finding)
    return out


def check_results(
    cluster: Cluster,
    checks: Iterable[Check],
    findings: Sequence[Finding],
    *,
    blocked: Mapping[str, str] = _NONE,
    skipped: Mapping[str, str] = _NONE,
    broken: Mapping[str, str] = _NONE,
) -> list[CheckResult]:
    """What became of each check.

    `findings` are as `explain` left them. Each mapping is by check name: `blocked` to the code or
    the words for which the engine did not run it (or not everywhere), `skipped` to why it does not
    apply, `broken` to what went wrong in its `judge`.
    """
    ground = Map(cluster)
    failures = [
        (finding, ground.place(finding.where))
        for finding in sorted(findings, key=lambda f: (f.kind.layer.order, _importance(f)))
        if finding.level is Severity.FAIL
    ]
    return [
        _result(
            _Account(cluster, check),
            [f for f in findings if f.check == check.name and f.code not in ENGINE_CODES],
            ground,
            failures,
            blocked=blocked.get(check.name),
            skipped=skipped.get(check.name),
            broken=broken.get(check.name),
        )
        for check in checks
    ]


def conclude(
    cluster: Cluster,
    checks: Sequence[Check],
    *,
    run: Mapping[str, Any],
    problems: Iterable[Finding] = (),
    blocked: Mapping[str, str] = _NONE,
    skipped: Mapping[str, str] = _NONE,
    wanted: Callable[[str], bool] = lambda code: True,
    strict: bool = False,
    others: Sequence[CheckResult] = (),
    alone: bool = False,
) -> Report:
    """Judge everything that was gathered, and put the report together.

    `run` is the part of the report's `run` that the cluster does not know (id, started, duration_s,
    launcher, command, options). `problems` are findings of the engine itself. `blocked` and
    `skipped` are as in `check_results`. `wanted` says whether findings of a code belong in the
    report (`Registry.wanted`). With `strict`, warnings fail. `others` are results of checks that
    are not here to judge. `alone` says that one host was to be examined by itself, so that nobody
    is missed, and nobody is told that the cluster is fit.
    """
    judged, broken = judge_all(cluster, checks)
    kept = [
        finding for finding in (*problems, *silent_ranks(cluster), *judged) if wanted(finding.code)
    ]
    findings = fold(explain(fold(kept), cluster))
    results = check_results(
        cluster, checks, findings, blocked=blocked, skipped=skipped, broken=broken
    )
    results = sorted([*results, *others], key=lambda result: (result.layer.order, result.name))
    verdict = _verdict(findings, results, strict=strict, complete=cluster.complete or alone)
    roots = root_causes(findings)
    hosts, ranks = record(cluster)
    return Report(
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        summary=_summary(cluster, verdict, roots, results, alone=alone),
        run={**run, **run_of(cluster), "alone": alone},
        root_causes=tuple(roots),
        findings=tuple(findings),
        checks=tuple(results),
        hosts=tuple(hosts),
        ranks=tuple(ranks),
        tool={"name": "nccl-doctor", "version": __version__},
    )


def judge_again(saved: Report, registry: Registry) -> Report:
    """Judge the facts of a saved report with the checks that are installed here.

    What a check found that is not installed here stands as it was saved, and so does what the
    engine found. An installed check that was not part of the saved run is skipped: it has no facts.

    Raises:
        ValueError: the report does not hold a whole cluster.
    """
    results = {result.name: result for result in saved.checks}
    here = {check.name for check in registry.checks}
    skipped = {name: r.reason for name, r in results.items() if r.status is Status.SKIPPED}
    skipped |= dict.fromkeys(here - set(results), "not part of the saved run")
    kept = [
        finding
        for finding in saved.findings
        if finding.check not in here or finding.code in ENGINE_CODES - {CHECK_BROKE.code}
    ]
    return conclude(
        cluster_of(saved),
        registry.checks,
        run=saved.run,
        problems=kept,
        skipped=skipped,
        wanted=registry.wanted,
        strict=bool(saved.run.get("options", {}).get("strict", False)),
        others=[result for name, result in results.items() if name not in here],
        alone=saved.run.get("alone") is True,
    )


def root_causes(findings: Iterable[Finding]) -> list[Finding]:
    """What to fix, most important first: unexplained failures; where there are none, warnings."""
    roots = [finding for finding in findings if finding.explained_by is None]
    for severity in (Severity.FAIL, Severity.WARN):
        worst = [finding for finding in roots if finding.level is severity]
        if worst:
            return sorted(worst, key=_importance)
    return []


# --- fold and explain ---


def _importance(finding: Finding) -> tuple[Any, ...]:
    """A total order: severity, layer, code, place, and then whatever tells two apart."""
    return (
        finding.level.order,
        finding.kind.layer.order,
        finding.code,
        _canonical(finding.where.to_json()),
        finding.message,
        finding.fix,
        finding.confidence.value,
        finding.explained_by or "",
        finding.check,
        _canonical(finding.evidence),
    )


def _canonical(value: Any) -> str:
    # default=str: evidence that is not JSON is the check's mistake, not a reason to lose a finding.
    return json.dumps(value, sort_keys=True, default=str)


def _united(group: Sequence[Finding]) -> Finding:
    where = Where()
    evidence: dict[str, Any] = {}
    for finding in group:
        where = where | finding.where
        for one in _each(finding.evidence):
            evidence[_canonical(one)] = one
    kept = [json.loads(text) for text in sorted(evidence)]
    return group[0].replaced(
        where=where,
        evidence=kept[0] if len(kept) == 1 else {"each": kept} if kept else {},
        fix=group[0].fix or group[0].kind.fix,
        severity=group[0].level,
    )


def _each(evidence: Mapping[str, Any]) -> Iterable[Any]:
    if set(evidence) == {"each"} and isinstance(evidence["each"], (list, tuple)):
        return list(evidence["each"])
    return [evidence] if evidence else []


def _explains(
    ground: Map, cause: Finding, cause_place: Place, finding: Finding, place: Place
) -> bool:
    if cause.kind.layer.order >= finding.kind.layer.order:
        return False
    symptom = finding.kind.layer.order >= _SYMPTOMS
    if cause.level is Severity.FAIL:
        if symptom:
            return ground.meets(cause_place, place)
        return ground.covers(cause_place, place)
    return (
        cause.level is finding.level is Severity.WARN
        and cause.code not in ENGINE_CODES
        and symptom
        and bool(cause_place)
        and ground.meets(cause_place, place)
    )


class _Causes:
    """Which code explains which; refuses to go in a circle."""

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


def _error(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _broke(check: Check, method: str, error: Exception) -> Finding:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code if trace is not None else None
    at = f"{PurePath(code.co_filename).name}:{trace.tb_lineno}" if code and trace else ""
    return Finding(
        CHECK_BROKE,
        f"`{method}` of check {check.name} raised {_error(error)}",
        evidence={"check": check.name, "error": _error(error), "at": at},
        check=check.name,
    )


# --- what became of each check ---

_GAPS = {
    OutcomeStatus.RAISED: "raised",
    OutcomeStatus.HUNG: "hung",
    OutcomeStatus.DIED: "died",
    OutcomeStatus.SILENT: "fell silent",
    OutcomeStatus.UNTESTED: "could not be tested",
}


@dataclass(frozen=True)
class _Gap:
    """One unit (host or rank) of which something that was due is not known."""

    unit: int
    where: Where
    text: str
    missing: bool = False
    absent: bool = False


class _Account:
    """Who was due to observe in one check, who did, and what is missing.

    The unit is a host (by id) for a host-scope check and a participant (by seat) otherwise.
    """

    def __init__(self, cluster: Cluster, check: Check) -> None:
        self.check = check
        self.by_host = check.scope is Scope.HOST
        self.broken: str | None = None
        self.labels: dict[int, str] = {}
        self.numbers: dict[int, int] = {}
        self.tested: dict[int, str] = {}
        self.skips: list[str] = []
        self.gaps: list[_Gap] = []
        self._where: dict[int, Where] = {}
        self._seats: dict[int, Rank] = {rank.seat: rank for rank in cluster.ranks}
        self._took: dict[str, float] = defaultdict(float)
        self._enroll(cluster)
        self.due = self._due(cluster)
        held = self._read(cluster)
        for unit, name in self.due:
            if (unit, name) not in held:
                text = "no outcome" if name == ALONE else f"no outcome of {name}"
                self._gap(unit, name, text, missing=True)

    @property
    def duration_s(self) -> float:
        """Rounds follow one another; within a round everybody observes at the same time."""
        return sum(self._took.values())

    def _enroll(self, cluster: Cluster) -> None:
        for host in cluster.hosts if self.by_host else ():
            self._unit(host.id, host.label, host_where(host), host.reported)
        for rank in () if self.by_host else cluster.ranks:
            label = f"seat {rank.seat}" if rank.rank is None else str(rank.rank)
            if rank.rank is not None:
                self.numbers[rank.seat] = rank.rank
            self._unit(rank.seat, label, rank_where(rank), rank.reported)

    def _unit(self, unit: int, label: str, where: Where, reported: bool) -> None:
        self.labels[unit] = label
        self._where[unit] = where
        if not reported:
            self.gaps.append(_Gap(unit, where, "never signed in", absent=True))

    def _due(self, cluster: Cluster) -> dict[tuple[int, str], Where]:
        """(unit, round) → place whose failure stops that unit's part of the round."""
        absent = {gap.unit for gap in self.gaps}
        if not self.check.together:
            return {
                (unit, ALONE): where for unit, where in self._where.items() if unit not in absent
            }
        due = {}
        try:
            rounds = tuple(self.check.plan(cluster))
        except Exception as error:  # as in judge_all
            self.broken = f"plan raised {_error(error)}"
            rounds = ()
        symptom = self.check.layer.order >= _SYMPTOMS
        for item in rounds:
            for group in item.groups:
                seats = [self._seats[seat] for seat in group if seat in self._seats]
                whole = _all_of(seats) if symptom else Where()
                for rank in seats:
                    unit = rank.host.id if self.by_host else rank.seat
                    if unit not in absent:
                        due[unit, item.name] = whole or self._where[unit]
        return due

    def _read(self, cluster: Cluster) -> set[tuple[int, str]]:
        sources = [(host.id, host.facts) for host in cluster.hosts if self.by_host]
        for rank in cluster.ranks:
            sources.append((rank.host.id if self.by_host else rank.seat, rank.facts))
        held: set[tuple[int, str]] = set()
        for unit, facts in sources:
            for name, outcome in facts.get(self.check.name, {}).items():
                held.add((unit, name))
                self._outcome(unit, name, outcome)
        return held

    def _outcome(self, unit: int, name: str, outcome: Mapping[str, Any]) -> None:
        status = OutcomeStatus(outcome["status"])
        reason = " ".join(str(outcome.get("reason", "")).split())
        self._took[name] = max(self._took[name], float(outcome.get("duration_s", 0.0)))
        if status is OutcomeStatus.OK:
            self.tested[unit] = self.labels.get(unit, str(unit))
        elif status is OutcomeStatus.SKIPPED:
            self.skips.append(reason)
        else:
            crumbs = outcome.get("breadcrumbs") or ()
            step = crumbs[-1].get("step") if crumbs else None
            text = _GAPS[status]
            if status in (OutcomeStatus.HUNG, OutcomeStatus.DIED) and step:
                text += f" in {step}"
            if outcome.get("signal"):
                text += f" of {outcome['signal']}"
            self._gap(unit, name, f"{text}: {reason}" if reason else text)

    def _gap(self, unit: int, name: str, text: str, *, missing: bool = False) -> None:
        where = self.due.get((unit, name)) or self._where.get(unit) or Where()
        self.gaps.append(_Gap(unit, where, text, missing=missing))

    def told(self, gaps: Iterable[_Gap]) -> str:
        """Gaps in one line: `hung in barrier (ranks 1–3); never signed in (rank 5)`."""
        by_text: dict[str, list[int]] = defaultdict(list)
        for gap in gaps:
            if gap.unit not in by_text[gap.text]:
                by_text[gap.text].append(gap.unit)
        return "; ".join(f"{text} ({self._units(units)})" for text, units in by_text.items())

    def _units(self, units: Sequence[int]) -> str:
        if not self.by_host:
            numbers = [self.numbers[unit] for unit in units if unit in self.numbers]
            others = [self.labels.get(unit, "") for unit in units if unit not in self.numbers]
            ranks = [f"rank{'s' if len(set(numbers)) > 1 else ''} {number_range(numbers)}"]
            return ", ".join((ranks if numbers else []) + others)
        names = [self.labels.get(unit, str(unit)) for unit in units]
        return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _all_of(ranks: Sequence[Rank]) -> Where:
    return Where(
        hosts=tuple(sorted({rank.host.name for rank in ranks if rank.host.name is not None})),
        ranks=tuple(sorted({rank.rank for rank in ranks if rank.rank is not None})),
        nodes=tuple(
            sorted(
                {
                    rank.host.node_rank
                    for rank in ranks
                    if rank.host.name is None and rank.host.node_rank is not None
                }
            )
        ),
    )


def _result(
    account: _Account,
    own: Sequence[Finding],
    ground: Map,
    failures: Sequence[tuple[Finding, Place]],
    *,
    blocked: str | None,
    skipped: str | None,
    broken: str | None,
) -> CheckResult:
    check = account.check
    gaps = [gap for gap in account.gaps if not (gap.missing and (blocked or skipped))]
    if skipped:
        gaps = [gap for gap in gaps if not gap.absent]
    open_gaps = []
    blockers: list[str] = []
    known: dict[tuple[int, bool, str], str | None] = {}  # a whole group shares one place
    for gap in gaps:
        key = (id(gap.where), gap.absent, gap.text)
        if key not in known:
            known[key] = _blocker(check, gap, ground, failures)
        code = known[key]
        if code is None:
            open_gaps.append(gap)
        elif code not in blockers:
            blockers.append(code)
    broken = broken or account.broken
    levels = {finding.level for finding in own}
    codes = ", ".join(dict.fromkeys(f.code for f in own if f.level is not Severity.INFO))
    told = account.told(open_gaps)
    if Severity.FAIL in levels:
        status, reason = Status.FAIL, "; ".join(text for text in (codes, broken, told) if text)
    elif broken or open_gaps:
        status, reason = Status.UNKNOWN, "; ".join(text for text in (broken, told) if text)
    elif blockers or blocked:
        words = ", ".join(blockers) or str(blocked)
        status = Status.BLOCKED
        reason = words if words.startswith("blocked by ") else f"blocked by {words}"
    elif Severity.WARN in levels:
        status, reason = Status.WARN, codes
    elif account.tested:
        status, reason = Status.PASS, ""
    elif skipped or account.skips:
        status = Status.SKIPPED
        reason = skipped or "; ".join(sorted({skip for skip in account.skips if skip}))
    elif check.together and account.labels:
        status, reason = Status.SKIPPED, "nothing here for it to test together"
    else:
        status, reason = Status.UNKNOWN, "nobody reported"
    return CheckResult(
        name=check.name,
        layer=check.layer,
        scope=check.scope,
        status=status,
        reason=reason,
        duration_s=account.duration_s,
        tested=tuple(account.tested[unit] for unit in sorted(account.tested)),
    )


def _blocker(
    check: Check, gap: _Gap, ground: Map, failures: Sequence[tuple[Finding, Place]]
) -> str | None:
    """Code of the failure that is the reason for a gap: the lowest one that covers it.

    Whoever never signed in is covered by whatever failure names it, on any layer: nothing at all
    could be observed there. What the engine itself held back names its failure.
    """
    held_back = gap.text.rpartition("blocked by ")[2]
    if any(finding.code == held_back for finding, _ in failures):
        return held_back
    place = ground.place(gap.where)
    if gap.absent:
        covering = [f for f, there in failures if ground.covers(there, place)]
        covering.sort(key=lambda f: f.kind.layer is not Layer.RANKS)
        return covering[0].code if covering else None
    reach = ground.meets if check.layer.order >= _SYMPTOMS else ground.covers
    for finding, there in failures:
        if finding.kind.layer.order < check.layer.order and reach(there, place):
            return finding.code
    return None


# --- the verdict ---


def _verdict(
    findings: Iterable[Finding], results: Iterable[CheckResult], *, strict: bool, complete: bool
) -> str:
    levels = {(finding.level, finding.code in ENGINE_CODES) for finding in findings}
    statuses = {result.status for result in results}
    warned = (Severity.WARN, False) in levels
    failed = any(level is Severity.FAIL for level, _ in levels)
    if failed or (warned and strict):
        return "fail"
    measured = statuses & {Status.PASS, Status.WARN, Status.FAIL}
    unproven = statuses & {Status.UNKNOWN, Status.BLOCKED}
    if not measured or unproven or not complete or (Severity.WARN, True) in levels:
        return "unknown"
    return "warn" if warned else "pass"


def _summary(
    cluster: Cluster,
    verdict: str,
    roots: Sequence[Finding],
    results: Sequence[CheckResult],
    *,
    alone: bool,
) -> str:
    ranks = _count(len(cluster.present), "rank")
    fit = f"{ranks} on {_count(len(cluster.present_hosts), 'host')}"
    titles = _few([*dict.fromkeys(finding.kind.title for finding in roots)])
    if alone and verdict in ("pass", "warn"):
        more = f", but {_count(len(roots), 'warning')}: {titles}" if roots else ""
        return f"Nothing stops this host by itself{more}; no other host was met"
    if verdict == "pass":
        verb = "is" if len(cluster.present) == 1 else "are"
        return f"{fit} {verb} fit to train with {cluster.backend}"
    if verdict == "warn":
        warnings = _count(len(roots), "warning")
        return f"{fit} can train with {cluster.backend}, with {warnings}: {titles}"
    if verdict == "fail":
        ground = Map(cluster)
        hosts = ground.hosts(ground.place(finding.where) for finding in roots)
        total = max(len(cluster.hosts), len(hosts))
        place = f" on {len(hosts)} of {_count(total, 'host')}" if hosts else ""
        return f"{_count(len(roots), 'problem')}{place}: {titles}"
    reasons = [finding.kind.title for finding in roots if finding.code in ENGINE_CODES]
    if not (cluster.complete or alone):
        reasons.append("only one host's own view")
    for status in (Status.UNKNOWN, Status.BLOCKED):
        reasons += [f"{r.name}: {r.reason}" for r in results if r.status is status]
    if not reasons:
        reasons = ["nothing was measured"]
    return f"The examination could not be completed: {_few([*dict.fromkeys(reasons)])}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _few(texts: Sequence[str], most: int = 3) -> str:
    more = len(texts) - most
    return "; ".join(texts[:most]) + (f"; and {more} more" if more > 0 else "")
