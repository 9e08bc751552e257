"""One report from the reports of hosts that could not reach each other.

The facts of all are put together (`merge_clusters`) and judged again. What the engine said in one
of them stays, but for a host that lost rank 0: its network path is known now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from nccl_doctor.judge.causes import importance
from nccl_doctor.judge.checks import judge_all
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.judge.merge_clusters import Known, machine_of, merge_clusters
from nccl_doctor.judge.place import Map
from nccl_doctor.model.cluster import Cluster, Host
from nccl_doctor.model.findings import CheckResult, Finding, Severity, Status, Where
from nccl_doctor.model.kinds import (
    CHECK_BROKE,
    COORDINATOR_LOST,
    MERGE_DOUBTFUL,
    RANK_KILLED,
    RANK_SILENT,
)
from nccl_doctor.model.report import Report
from nccl_doctor.model.run_record import RunRecord
from nccl_doctor.registry import Registry
from nccl_doctor.toolkit.hosts import road_to_master

APART_S = 900.0
"""Hosts of one job start within minutes of each other, and a clock may be wrong by some more."""

_AGAIN = {CHECK_BROKE.code, RANK_SILENT.code, RANK_KILLED.code}
"""Codes of the engine that are judged again."""
_NEVER = datetime.min.replace(tzinfo=timezone.utc)


def merge_reports(reports: Sequence[Report], registry: Registry) -> Report:
    """Put the facts of several reports together, and judge them as those of one run.

    Reports of one host twice do no harm. Whether the reports can be of one run at all is said in
    findings: it may be a clock that is wrong.

    Args:
        reports: of the coordinator, of hosts that never reached it, or both; at least one.
        registry: the checks that judge.

    Raises:
        ValueError: there is no report, or they cannot be merged; says why.
    """
    _refuse(reports)
    parts = sorted(reports, key=_started, reverse=True)  # of one host twice, the newest counts
    clusters = [part.cluster for part in parts]
    cluster = merge_clusters(clusters)
    roads = _Roads(cluster, registry)
    kept = [
        finding
        for part, view in zip(parts, clusters, strict=True)
        for finding in _kept(part, view, roads, registry)
    ]
    merged = conclude(
        cluster,
        registry.checks,
        run=_run(parts, clusters),
        problems=[*registry.problems, *_doubts(parts, clusters), *kept],
        skipped=_skipped(parts, cluster, registry),
        wanted=registry.wanted,
        strict=any(part.run.strict for part in parts),
        others=_others(parts, registry),
    )
    return replace(merged, redacted=parts[0].redacted)


def _refuse(reports: Sequence[Report]) -> None:
    if not reports:
        raise ValueError("no report to merge")
    if len({report.redacted for report in reports}) > 1:
        raise ValueError(
            "some reports are redacted and some are not, so their hosts cannot be matched"
        )
    if len({report.run.redacted_with for report in reports}) > 1:
        raise ValueError(
            "the reports were redacted with different keys, so their hosts cannot be matched; "
            "redact all of them with the same key (--redact-key FILE), or merge them first"
        )
    if any(report.run.alone for report in reports):
        raise ValueError("one report is of `nccl-doctor env` (one host alone), not of a run")


def _started(report: Report) -> datetime:
    """Start of the run, by the clock of its host; the beginning of time if it is not known."""
    try:
        started = datetime.fromisoformat((report.run.started or "").replace("Z", "+00:00"))
    except ValueError:
        return _NEVER
    return started if started.tzinfo else started.replace(tzinfo=timezone.utc)


def _run(parts: Sequence[Report], clusters: Sequence[Cluster]) -> RunRecord:
    """Record of the coordinator's run, if it is known, and of the reports that were merged."""
    first = next((p for p, c in zip(parts, clusters, strict=True) if c.complete), parts[0])
    merged = [
        {
            "id": part.run.id,
            "started": part.run.started,
            "complete": cluster.complete,
            "hosts": [host.label for host in cluster.present_hosts],
        }
        for part, cluster in zip(parts, clusters, strict=True)
    ]
    return replace(
        first.run,
        duration_s=max(part.run.duration_s or 0.0 for part in parts),
        extra={**first.run.extra, "merged": merged},
    )


def _skipped(parts: Sequence[Report], cluster: Cluster, registry: Registry) -> dict[str, str]:
    known = {result.name for part in parts for result in part.checks}
    skipped = {check.name: "not part of these runs" for check in registry.checks}
    skipped = {name: reason for name, reason in skipped.items() if name not in known}
    return skipped | {
        check.name: f"needs --level {check.level.value}"
        for check in registry.checks
        if check.level.order > cluster.level.order
    }


def _others(parts: Sequence[Report], registry: Registry) -> list[CheckResult]:
    """Results of checks that are not installed here, so that their facts cannot be judged again."""
    here = {check.name for check in registry.checks}
    found: dict[str, CheckResult] = {}
    for result in (result for part in parts for result in part.checks if result.name not in here):
        if result.name not in found or result.status is Status.FAIL:
            found[result.name] = result
    return [
        result
        if len(parts) == 1 or result.status is Status.FAIL
        else replace(result, status=Status.UNKNOWN, reason="not installed where the merge was made")
        for result in found.values()
    ]


# -- what the reports themselves said --------------------------------------------------------------


class _Roads:
    """Network paths to the host of rank 0 in the united cluster."""

    def __init__(self, cluster: Cluster, registry: Registry) -> None:
        self.cluster = cluster
        self._hosts: Known[Host] = Known()
        for host in cluster.present_hosts:
            self._hosts.add(host, host)
        self._ground = Map(cluster)
        judged, _ = judge_all(cluster, registry.checks)
        failures = [f for f in judged if f.level is Severity.FAIL and _is_below(f)]
        failures.sort(key=lambda f: (f.kind.layer.order, f.explained_by is not None, importance(f)))
        self._failures = [(failure.code, self._ground.place(failure.where)) for failure in failures]

    def joined(self, host: Host) -> bool:
        """True if a host of one report signed in, as the coordinator knows it."""
        known = self._hosts.find(host)
        return known is not None and known.joined

    def explain(self, finding: Finding, host: Host) -> Finding:
        """Finding about a host that could not sign in, with the failure on its network path as the
        cause.
        """
        known = self._hosts.find(host) or host
        where = finding.where if finding.where.ranks else road_to_master(self.cluster, known)
        place = self._ground.place(where)
        causes = (code for code, there in self._failures if self._ground.covers(there, place))
        return finding.replaced(where=where, explained_by=next(causes, None))


def _is_below(finding: Finding) -> bool:
    return finding.kind.layer.order < COORDINATOR_LOST.layer.order


def _kept(part: Report, view: Cluster, roads: _Roads, registry: Registry) -> Iterator[Finding]:
    """Findings of one report that no check here makes again, and that are still true."""
    here = {check.name for check in registry.checks}
    left_out = next((host for host in view.present_hosts if not roads.joined(host)), None)
    for finding in part.findings:
        if finding.check in here or finding.code in _AGAIN:
            continue
        if finding.code != COORDINATOR_LOST.code or view.complete:
            yield finding
        elif left_out is not None:
            yield roads.explain(finding, left_out)
        elif _is_of_this_run(view, roads.cluster):
            yield finding


def _is_of_this_run(view: Cluster, cluster: Cluster) -> bool:
    """True if the processes of a partial report are among those in the coordinator's report."""
    met = {(machine_of(rank.host), rank.pid) for rank in cluster.present}
    return any((machine_of(rank.host), rank.pid) in met for rank in view.present)


def _doubts(parts: Sequence[Report], clusters: Sequence[Cluster]) -> Iterator[Finding]:
    """Findings that raise doubt whether these are reports of one run."""
    times = sorted(_started(part) for part in parts)
    apart_s = (times[-1] - times[0]).total_seconds()
    if apart_s > APART_S:
        spread = f"{apart_s / 3600:.1f} h" if times[0] is not _NEVER else "an unknown time"
        yield Finding(
            MERGE_DOUBTFUL, f"the runs started {spread} apart, by the clocks of their hosts"
        )
    versions = sorted({str(part.tool.get("version", "unknown")) for part in parts})
    if len(versions) > 1:
        yield Finding(
            MERGE_DOUBTFUL, f"written by different versions: nccl-doctor {' and '.join(versions)}"
        )
    processes: dict[Hashable, set[int | None]] = defaultdict(set)
    names: dict[Hashable, str] = {}
    for cluster in clusters:
        for rank in cluster.present:
            key = (machine_of(rank.host), rank.rank)
            processes[key].add(rank.pid)
            names[key] = rank.host.label
    twice = {names[key] for key, pids in processes.items() if len(pids) > 1}
    if twice:
        yield Finding(
            MERGE_DOUBTFUL,
            "several runs of one host; the report of the coordinator is used, else the newest",
            Where(hosts=tuple(sorted(twice))),
        )
