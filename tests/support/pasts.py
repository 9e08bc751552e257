"""Made-up histories: earlier runs of made-up clusters, as saved reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Check, Cluster
from nccl_doctor.checks.links import Links
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.judge.history import Comparison, Past, compare
from nccl_doctor.judge.history.past import Earlier
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.report import Report, RunRecord
from tests.support.exchanges import World
from tests.support.reports import RUN

LINKS: tuple[Check, ...] = (Links(),)
NOW = "2026-11-21T07:00:00+00:00"


def run_of(day: int, **more: Any) -> RunRecord:
    known = {"id": f"run-{day}", "started": f"2026-11-{day:02}T07:00:00+00:00"}
    return replace(RUN, **{**known, **more})


def saved(cluster: Cluster, day: int, checks: Sequence[Check] = LINKS, **run: Any) -> Report:
    return conclude(cluster, checks, run=run_of(day, **run))


def past(reports: Iterable[Report], checks: Sequence[Check] = LINKS) -> Past:
    return Past(
        "past",
        tuple(Earlier.of(f"past/{i}.json", report, checks) for i, report in enumerate(reports)),
    )


def noisy(count: int, days: int, share: float, seed: int = 0) -> list[Report]:
    """Runs of healthy hosts, one a day, each with noise of its own."""
    return [
        saved(World(count).noise(1000 * seed + day, share).cluster(), day)
        for day in range(1, days + 1)
    ]


def held_against(
    cluster: Cluster, reports: Iterable[Report], checks: Sequence[Check] = LINKS
) -> Comparison:
    return compare(cluster, checks, past(reports, checks), RunRecord("now", NOW))


def of(found: Iterable[Finding], code: str) -> list[Finding]:
    return [finding for finding in found if finding.code == code]
