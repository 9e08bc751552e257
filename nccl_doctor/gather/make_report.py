"""A report of what one process knows so far: the coordinator's, or the own view of one host."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.run_state import Run
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.judge.history import compare
from nccl_doctor.judge.merge_clusters import merge_clusters
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.report import Report
from nccl_doctor.model.run_record import RunRecord
from nccl_doctor.toolkit.masking import masked_data


def make_report(
    run: Run,
    evidence: EvidenceLog,
    *,
    complete: bool,
    alone: bool = False,
    extra: Sequence[Finding] = (),
    views: Sequence[Report] = (),
) -> Report:
    """A report from the evidence so far; `alone` where no peer was ever meant to be met.

    `views` are what hosts say of themselves that did not sign in.
    """
    cluster = evidence.cluster(run.options, run.backend, complete=complete)
    if views:
        cluster = merge_clusters([cluster, *(view.cluster for view in views)])
    skipped = {
        check.name: f"needs --level {check.level.value}"
        for check in run.registry.checks
        if check.level.order > run.options.level.order
    }
    if alone:
        skipped |= {c.name: "needs other hosts or ranks" for c in run.registry.checks if c.together}
    about = _record(run, alone=alone)
    problems = [*run.registry.problems, *evidence.problems(), *extra]
    if run.config.past is not None and complete:
        found = compare(cluster, run.registry.checks, run.config.past, about)
        about = replace(about, baseline=found.record)
        problems += found.findings
    return conclude(
        cluster,
        run.registry.checks,
        run=about,
        problems=problems,
        skipped=skipped,
        wanted=run.registry.wanted,
        strict=run.options.strict,
    )


def _record(run: Run, *, alone: bool) -> RunRecord:
    """The record of the run: id, start, duration, launcher, command, options."""
    return RunRecord(
        id=run.nonce or secrets.token_hex(8),
        started=run.config.started_at,
        duration_s=round(time.monotonic() - run.config.started, 3),
        launcher=run.launch.launcher,
        command=run.config.command,
        options=masked_data(run.options.to_json()),
        alone=alone,
    )
