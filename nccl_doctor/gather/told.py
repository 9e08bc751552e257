"""Causes that rank 0 tells at the end of a run, for a host that took itself for rank 0."""

from __future__ import annotations

from nccl_doctor.gather.messages import MOST_REASONS, Finish, Reason
from nccl_doctor.model.findings import Confidence, Finding, Where
from nccl_doctor.model.report import Report
from nccl_doctor.registry import Registry

_MESSAGE_MAX, _HOSTS_MAX = 300, 64
_SEE = "see node 0's report: it says what to type, and on which host"


def reasons_of(report: Report) -> tuple[Reason, ...]:
    """The first causes of a report, each cut to what one message may hold."""
    return tuple(
        Reason(cause.code, cause.message[:_MESSAGE_MAX], cause.where.hosts[:_HOSTS_MAX])
        for cause in report.root_causes[:MOST_REASONS]
    )


def findings_of(end: Finish, registry: Registry, host: str) -> list[Finding]:
    """Findings of one host: the causes that rank 0 sent and in whose place it is.

    What to do about them is in the report of rank 0: with several hosts in the place, only that
    knows what each is to do.
    """
    by = f" ({end.host})" if end.host else ""
    found = []
    for each in end.reasons:
        kind, owner = registry.kinds.get(each.code, (None, None))
        if kind is not None and host in each.hosts:
            words = " ".join(each.message.split())
            found.append(
                Finding(
                    kind,
                    f'node 0{by} says: "{words}"',
                    Where(hosts=(host,)),
                    fix=_SEE if len(each.hosts) > 1 else "",
                    confidence=Confidence.LIKELY,
                    check=owner.name if owner is not None else "",
                )
            )
    return found
