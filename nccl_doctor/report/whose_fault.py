"""Whether a finding is a fault of the project that an issue is to be written for. Pure.

Most issues about hangs in NCCL and torch are faults of a cluster. A library may be at fault only
where its own work failed, and nothing below explains why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nccl_doctor.model.findings import Finding, Severity
from nccl_doctor.model.report import Report
from nccl_doctor.toolkit.terminal import safe

NAMES = {"deepspeed": "DeepSpeed", "nccl": "NCCL", "pytorch": "PyTorch"}
_WORK = frozenset(
    (
        *("group-init-failed", "group-init-hang"),
        *("collective-failed", "collective-hang", "collective-wrong-result", "rank-crashed"),
    )
)
"""Codes of what a library did, or did not do; everything else was observed without it."""
_REPAIRED = {
    "nccl-known-bug": "nccl",
    "torch-known-hang": "pytorch",
    "device-id-multi-group-hang": "pytorch",
}
"""Codes of faults that the project knows."""
_FIRST = {
    "nccl": "the newest NCCL, and all_reduce_perf of nccl-tests on the same hosts: if it does not "
    "fail too, PyTorch has a part in it",
    "pytorch": "the newest torch, and with NCCL all_reduce_perf of nccl-tests on the same hosts: "
    "if that fails too, it is no fault of PyTorch",
    "deepspeed": "the same without DeepSpeed (torch.distributed alone, as in this examination)",
}


class Answer(NamedTuple):
    """Answer in one line of words; `no`: the report says that it is not the project's fault."""

    no: bool
    words: str


def whose_fault(project: str, report: Report) -> Answer:
    """Whether what the report found is a fault of the project."""
    name = NAMES[project]
    heard = [cause for cause in report.root_causes if cause.level is not Severity.INFO]
    worst = min((cause.level.order for cause in heard), default=0)  # a warning explains no failure
    causes = [cause for cause in heard if cause.level.order == worst]
    known = [cause for cause in causes if _REPAIRED.get(cause.code) == project]
    work = [cause for cause in causes if cause.code in _WORK]
    rest = [cause for cause in causes if cause not in known and cause not in work]
    if not causes:
        measured = "found nothing wrong" if report.verdict in ("pass", "warn") else "is incomplete"
        words = (
            f"not known: this report {measured}; say what the job itself does, and where it ends"
        )
        return Answer(False, words)
    if rest:
        words = (
            f"no: {_codes(rest)} is a matter of this cluster, its settings or the job, and {name} "
            f"cannot repair it. First: {_fix(rest[0])}"
        )
        return Answer(True, words)
    if known:
        words = f"yes, and it is known there: {_codes(known)}. First: {_fix(known[0])}"
        return Answer(False, words)
    if project == "nccl" and "nccl" not in report.cluster.backend:
        backend = safe(report.cluster.backend)
        return Answer(True, f"no: NCCL took no part in {_codes(work)}; the backend was {backend}")
    words = f"perhaps: nothing that was examined explains {_codes(work)}. Try before: "
    return Answer(False, words + _FIRST[project])


def _fix(cause: Finding) -> str:
    return safe(cause.fix or cause.kind.fix)


def _codes(causes: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(safe(cause.code) for cause in causes))
