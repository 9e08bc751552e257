"""Findings of one host that nothing learnt later takes back: they need not wait for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from nccl_doctor.judge.causes import explain, fold, root_causes
from nccl_doctor.judge.checks import judge_all
from nccl_doctor.judge.excuses import excuse
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.findings import Confidence, Finding, Severity


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
