"""Judge everything that was gathered, and put the report together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nccl_doctor import __version__
from nccl_doctor.judge.causes import excuse, explain, fold, root_causes
from nccl_doctor.judge.checks import Judged, judge_all
from nccl_doctor.judge.old_values import put_back
from nccl_doctor.judge.one_value import one_value_each
from nccl_doctor.judge.sentence import summary
from nccl_doctor.judge.status import check_results
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster, Evidence, OutcomeStatus
from nccl_doctor.model.findings import CheckResult, Confidence, Finding, Severity, Status
from nccl_doctor.model.kinds import (
    BESIDE_CODES,
    CHECK_BROKE,
    ENGINE_CODES,
    HOSTS_NOT_EXAMINED,
    RANK_KILLED,
    RANK_SILENT,
)
from nccl_doctor.model.launch import MALFORMED
from nccl_doctor.model.report import Report, RunRecord

if TYPE_CHECKING:
    from nccl_doctor.registry import Registry

EXIT_CODES: Mapping[str, int] = {"pass": 0, "warn": 0, "fail": 1, "unknown": 3}
"""Exit code of each verdict, unless the launch is malformed: that is a configuration error, 2."""

_NONE: Mapping[str, str] = {}
_KNOWN: Judged = {}


def conclude(
    cluster: Cluster,
    checks: Sequence[Check],
    *,
    run: RunRecord,
    problems: Iterable[Finding] = (),
    skipped: Mapping[str, str] = _NONE,
    wanted: Callable[[str], bool] = lambda code: True,
    strict: bool = False,
    others: Sequence[CheckResult] = (),
    known: Judged = _KNOWN,
) -> Report:
    """Judge everything that was gathered, and put the report together.

    `problems` are findings of the engine itself. `skipped` is as in `check_results`. `wanted` says
    whether findings of a code belong in the report (`Registry.wanted`). With `strict`, warnings
    fail, and the job does not start if its command names hosts that were not examined. `others` are
    results of checks that are not here to judge, `known` is as in `judge_all`.
    If one host was to be examined by itself (`run.alone`), nobody is missed, and nobody is told
    that the cluster is fit.
    """
    cluster.look_through()
    judged, broken = judge_all(cluster, checks, known)
    kept = [
        finding
        for finding in (*problems, *_lost_ranks(cluster, judged), *judged)
        if wanted(finding.code)
    ]
    findings = put_back(fold(excuse(explain(kept, cluster))), cluster)
    findings = one_value_each(findings, cluster)
    results = check_results(cluster, checks, findings, skipped=skipped, broken=broken)
    results = sorted([*results, *others], key=lambda result: (result.layer.order, result.name))
    heard = run.alone or (cluster.complete and len(cluster.present) >= cluster.world_size)
    cluster.forget()  # a report of ten thousand ranks is soon written, which takes memory as well
    verdict = _verdict(findings, results, strict=strict, complete=heard)
    here = verdict  # of what was to be examined
    if verdict == "unknown" and not strict:
        known_hosts = [each for each in findings if each.code != HOSTS_NOT_EXAMINED.code]
        here = _verdict(known_hosts, results, strict=strict, complete=heard)
    roots = root_causes(findings)
    return Report(
        verdict=verdict,
        exit_code=_exit_code(cluster, here, roots),
        summary=summary(cluster, verdict, roots, results, alone=run.alone, selected=run.selected),
        run=run,
        cluster=cluster,
        root_causes=tuple(roots),
        findings=tuple(findings),
        checks=tuple(results),
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
    again = conclude(
        saved.cluster,
        registry.checks,
        run=saved.run,
        problems=kept,
        skipped=skipped,
        wanted=registry.wanted,
        strict=saved.run.strict,
        others=[result for name, result in results.items() if name not in here],
    )
    return replace(again, redacted=saved.redacted)


def contradiction(saved: Report) -> str:
    """The reason why a verdict is better than the findings of its report; empty if it is not."""
    worse = {"pass": (Severity.FAIL, Severity.WARN), "warn": (Severity.FAIL,)}
    for finding in (*saved.findings, *saved.root_causes):
        if finding.level in worse.get(saved.verdict, ()):
            found = f"{finding.code} of severity {finding.level.value}"
            return f"its verdict is {saved.verdict}, and its findings have {found}"
    return ""


def _exit_code(cluster: Cluster, verdict: str, roots: Sequence[Finding]) -> int:
    """2 where a malformed launch is all that is wrong, or all that one host can know."""
    malformed = any(
        problem.fatal and problem.code in MALFORMED
        for rank in cluster.ranks
        if rank.launch is not None
        for problem in rank.launch.problems
    )
    nothing_else = roots and all(finding.code in MALFORMED for finding in roots)
    if malformed and (nothing_else or not cluster.complete):
        return 2
    return EXIT_CODES[verdict]


def _verdict(
    findings: Iterable[Finding], results: Iterable[CheckResult], *, strict: bool, complete: bool
) -> str:
    levels = {
        (finding.level, finding.code in ENGINE_CODES)
        for finding in findings
        if finding.code not in BESIDE_CODES
    }
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


def _lost_ranks(cluster: Cluster, judged: Iterable[Finding]) -> Iterator[Finding]:
    """One finding for each participant that signed in and posted no evidence in a round, or whose
    process was killed in one, if the check itself has nothing to say of it.
    """
    told = {finding.check for finding in judged if finding.level is not Severity.INFO}
    for rank, check, name, outcome in cluster.unfinished():
        killed = outcome.status is OutcomeStatus.DIED and outcome.signal == "SIGKILL"
        if outcome.status is not OutcomeStatus.SILENT and not (killed and check not in told):
            continue
        known = outcome.signal is not None
        words = f"killed by {outcome.signal}" if known else outcome.reason
        yield Finding(
            RANK_KILLED if known else RANK_SILENT,
            f"{words} ({check}, round {name})",
            Evidence.rank_place(rank),
            {"check": check, "round": name, "pid": rank.pid},
            confidence=Confidence.CERTAIN if known else Confidence.LIKELY,
        )
