"""The whole report in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nccl_doctor.judge.place import PlaceIndex
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.findings import (
    CheckResult,
    Finding,
    Layer,
    Status,
    Where,
    headlines,
    number_range,
)
from nccl_doctor.model.kinds import ENGINE_CODES, RUN_INTERRUPTED

_MOST_RANGES = 8
_MOST = 3
"""Most titles or reasons in the sentence."""


def summary(
    cluster: Cluster,
    verdict: str,
    roots: Sequence[Finding],
    results: Sequence[CheckResult],
    *,
    alone: bool,
    selected: bool = False,
) -> str:
    """The verdict and its main reasons, for a reader of one sentence.

    `roots` are the root causes, the most important first; `alone` is as in `conclude`. If only
    `selected` checks were run, nobody is told that the cluster is fit.
    """
    ranks = _count(len(cluster.present), "rank")
    fit = f"{ranks} on {_count(len(cluster.present_hosts), 'host')}"
    titles = _few([*dict.fromkeys(finding.kind.title for finding in roots)])
    if alone and verdict in ("pass", "warn"):
        more = f", but {_count(len(roots), 'warning')}: {titles}" if roots else ""
        return f"No failure found on this host alone{more}; other hosts were not examined"
    if selected and verdict in ("pass", "warn"):
        run = _count(sum(r.status in (Status.PASS, Status.WARN) for r in results), "check")
        if verdict == "pass":
            return f"{run} passed for {fit}; the others were not run"
        warnings = _count(len(roots), "warning")
        return f"{warnings} of {run} for {fit}: {titles}; the others were not run"
    if verdict == "pass":
        verb = "is" if len(cluster.present) == 1 else "are"
        if not any(r.layer is Layer.COLLECTIVE and r.status is Status.PASS for r in results):
            return f"No failure found for {fit}; no collective was run"
        return f"{fit} {verb} fit to train with {cluster.backend}"
    if verdict == "warn":
        warnings = _count(len(roots), "warning")
        return f"{fit} can train with {cluster.backend}, with {warnings}: {titles}"
    if verdict == "fail" and roots:
        ground = PlaceIndex(cluster)
        # The ends of a link are counted only where no host is to blame for it.
        blamed = [
            replace(finding.where, links=()) if finding.where.hosts else finding.where
            for finding in roots
        ]
        hosts = ground.hosts(ground.place(where) for where in blamed)
        total = max(cluster.hosts_wanted, len(hosts))
        # The partial report of one host does not know how many hosts there are.
        place = f" on {len(hosts)} of {_count(total, 'host')}" if hosts and cluster.complete else ""
        told = _few(headlines(roots))
        return told if len(roots) == 1 else f"{len(roots)} problems{place}: {told}"
    stopped = [
        finding.message
        for finding in roots
        if finding.code == RUN_INTERRUPTED.code and finding.where == Where()
    ]
    if stopped:  # what is missing otherwise follows from that
        return f"The examination could not be completed: {_few(stopped)}"
    reasons = [finding.kind.title for finding in roots if finding.code in ENGINE_CODES]
    if not (cluster.complete or alone):
        reasons.append(_not_heard(cluster))
    elif not alone and not reasons and len(cluster.present) < cluster.world_size:
        reasons.append(f"{len(cluster.present)} of {_count(cluster.world_size, 'rank')} signed in")
    for status in (Status.UNKNOWN, Status.BLOCKED):
        reasons += [f"{r.name}: {r.reason}" for r in results if r.status is status]
    if not reasons:
        reasons = ["nothing was measured"]
    return f"The examination could not be completed: {_few([*dict.fromkeys(reasons)])}"


def _not_heard(cluster: Cluster) -> str:
    """Words for the hosts without a report, in a cluster without a coordinator's report."""
    nodes = [host.node_rank for host in cluster.hosts if not host.reported]
    if len(cluster.present_hosts) < 2 or not nodes:
        return "this is the partial report of one host"
    known = number_range([node for node in nodes if node is not None], _MOST_RANGES)
    return f"no report from node{'s' * (len(nodes) > 1)} {known}".strip()


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _few(texts: Sequence[str]) -> str:
    more = len(texts) - _MOST
    return "; ".join(texts[:_MOST]) + (f"; and {more} more" if more > 0 else "")
