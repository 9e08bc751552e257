"""Judging of a saved report, compared with earlier ones. Pure."""

from __future__ import annotations

from dataclasses import replace

from nccl_doctor.judge.conclusion import judge_again
from nccl_doctor.judge.history.compare import compare
from nccl_doctor.judge.history.past import Past
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.kinds import CHECK_BROKE, HISTORY_KINDS
from nccl_doctor.model.report import Report
from nccl_doctor.registry import Registry

_CODES = frozenset(kind.code for kind in HISTORY_KINDS)


def judge_beside(saved: Report, registry: Registry, past: Past | None) -> Report:
    """Judge the facts of a saved report again, and compare it with earlier reports if there are
    any.

    What an earlier comparison found gives way to this one; without one it stands.

    Raises:
        ValueError: the report does not hold a whole cluster.
    """
    if past is None:
        return judge_again(saved, registry)
    found = compare(saved.cluster, registry.checks, past, saved.run)
    kept = tuple(finding for finding in saved.findings if not _is_compared(finding))
    run = {**saved.run, "baseline": dict(found.record)}
    return judge_again(replace(saved, run=run, findings=(*kept, *found.findings)), registry)


def _is_compared(finding: Finding) -> bool:
    return finding.code in _CODES or (finding.code == CHECK_BROKE.code and not finding.check)
