"""Selection of the earlier reports that a run is compared with. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.judge.history.figures import Sheet, sheet_of
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.report import Report, RunRecord

MOST = 20
"""Most earlier runs to compare with; the newest are used."""


@dataclass(frozen=True)
class Earlier:
    """Data kept of one earlier report: its run, and its figures."""

    file: str
    id: str
    started: str
    hosts: frozenset[str]
    world_size: int
    backend: str
    complete: bool
    redacted: bool
    sheet: Sheet

    @classmethod
    def of(cls, file: str, report: Report, checks: Sequence[Check]) -> Earlier:
        """Read from a report; what no check here has figures of is forgotten."""
        cluster = report.cluster
        return cls(
            file=file,
            id=report.run.id or "",
            started=report.run.started or "",
            hosts=_names(cluster),
            world_size=cluster.world_size,
            backend=cluster.backend,
            complete=cluster.complete,
            redacted=report.redacted,
            sheet=sheet_of(cluster, checks),
        )


@dataclass(frozen=True)
class Past:
    """Earlier runs as they were found. `left_out` counts files by why they are none."""

    path: str
    runs: tuple[Earlier, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    def beside(self, cluster: Cluster, run: RunRecord) -> ChosenRuns:
        """Earlier runs of the same hosts, ranks and backend, that began before this run.

        Args:
            cluster: of this run.
            run: its record, which has its `id` and `started`.
        """
        out = Counter(self.left_out)
        used: list[Earlier] = []
        known = {run.id or ""}
        for earlier in sorted(self.runs, key=lambda e: (e.started, e.file), reverse=True):
            reason = _unfit(cluster, run, earlier)
            if earlier.id and earlier.id in known:
                reason = "of this run, or of one that is there already"
            if not reason and len(used) == MOST:
                reason = f"older than the newest {MOST}"
            if reason:
                out[reason] += 1
                continue
            known.add(earlier.id)
            used.append(earlier)
        return ChosenRuns(self.path, tuple(used), dict(out))


@dataclass(frozen=True)
class ChosenRuns:
    """Earlier reports that are used, newest first, and the number of other files, by reason."""

    path: str
    used: tuple[Earlier, ...]
    left_out: Mapping[str, int]

    @property
    def runs(self) -> list[str]:
        """Ids of the runs that are used."""
        return [earlier.id for earlier in self.used]

    def in_words(self) -> str:
        """Number of runs that are used, and the reasons why others are not."""
        number = len(self.used)
        text = f"{number} earlier run{'' if number == 1 else 's'} in {self.path}"
        others = ", ".join(
            f"{count} {reason}"
            for reason, count in sorted(self.left_out.items(), key=lambda each: (-each[1], each))
        )
        return f"{text}; not used: {others}" if others else text

    def to_json(self) -> dict[str, Any]:
        """Plain data for `run` of the report."""
        return {
            "path": self.path,
            "text": self.in_words(),
            "runs": self.runs,
            "left_out": dict(self.left_out),
        }


def _unfit(cluster: Cluster, run: RunRecord, earlier: Earlier) -> str:
    """Reason that an earlier report does not count; empty if it does."""
    here, there = _names(cluster), earlier.hosts
    if not (earlier.complete and there):
        return "of one host's own view"
    if not (here <= there or there <= here):
        return "of other hosts, or redacted" if earlier.redacted else "of other hosts"
    if earlier.world_size != cluster.world_size:
        return "of another number of ranks"
    if earlier.backend != cluster.backend:
        return f"with backend {earlier.backend}"
    if earlier.started > (run.started or ""):  # ISO 8601 in UTC sorts as text does
        return "of later runs"
    return ""


def _names(cluster: Cluster) -> frozenset[str]:
    return frozenset(host.name for host in cluster.present_hosts if host.name)
