"""Known failures that stop a group of a round before it is held.

Judging takes longer than many a round: what no new fact can have changed is not judged again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from nccl_doctor.judge.checks import Judged, judge_all
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster, Rank
from nccl_doctor.model.findings import Finding, Round, Severity

_OWN = "nccl_doctor.checks."


class Failures:
    """Failures so far, of the checks of a run."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self._checks = checks
        self._judged: dict[str, tuple[Hashable, list[Finding], bool]] = {}

    def in_the_way_of(
        self, check: Check, cluster: Cluster, state: Callable[[Iterable[str]], Hashable]
    ) -> list[Finding]:
        """Known failures of the layers that a check needs.

        `state` of some checks changes with every fact of them, and with every sign-in.
        """
        if not check.needs:
            return []
        findings: list[Finding] = []
        for other in self._checks:
            if any(kind.layer in check.needs for kind in other.kinds):
                findings += self._findings_of(other, cluster, state)
        return failures_in_the_way(check, findings)

    def _findings_of(
        self, check: Check, cluster: Cluster, state: Callable[[Iterable[str]], Hashable]
    ) -> list[Finding]:
        now = state((check.name, *check.reads))
        known = self._judged.get(check.name)
        if known is None or known[0] != now or not is_own(check):
            findings, broken = judge_all(cluster, [check])
            known = self._judged[check.name] = (now, findings, not broken)
        return known[1]

    def known(self, state: Callable[[Iterable[str]], Hashable]) -> Judged:
        """Findings in the facts so far, by check: of the checks of the program that have judged
        these very facts.
        """
        own = {check.name: check for check in self._checks if is_own(check)}
        return {
            name: findings
            for name, (now, findings, is_whole) in self._judged.items()
            if is_whole and name in own and now == state((name, *own[name].reads))
        }


def is_own(check: Check) -> bool:
    """Whether a check is one of the program: what a plug-in reads, no test has compared with what
    it says that it reads.
    """
    return type(check).__module__.startswith(_OWN)


def failures_in_the_way(check: Check, findings: Iterable[Finding]) -> list[Finding]:
    """Known failures of the layers that a check needs, of these findings."""
    return [
        finding
        for finding in findings
        if finding.level is Severity.FAIL
        and finding.kind.layer in check.needs
        and not finding.kind.later  # it breaks the job, not what is tried here
        and finding.check != check.name  # a variant that hangs does not stop the next one
    ]


def touches(finding: Finding, members: Sequence[Rank], round_: Round) -> bool:
    """True if a failure stops a group of a round: a link that it needs, or a bad member."""
    hosts = {rank.host.name for rank in members}
    where = finding.where
    if where.links and round_.pairs is not None:
        name = {rank.seat: rank.host.name for rank in members}
        needed = {frozenset((name.get(a), name.get(b))) for a, b in round_.pairs}
        return any(frozenset(link) in needed for link in where.links)
    if where.links:
        return any(a in hosts and b in hosts and len(hosts) > 1 for a, b in where.links)
    if where.ranks:
        return bool(set(where.ranks) & {rank.rank for rank in members})
    if where.hosts:
        return bool(set(where.hosts) & hosts)
    return not where.nodes
