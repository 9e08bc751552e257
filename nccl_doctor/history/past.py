"""Which of one's own earlier reports a run may be held against. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.cluster import Cluster
from nccl_doctor.history.usual import LEAST
from nccl_doctor.record import Report, cluster_of

MOST = 20
"""Earlier runs that are compared with, the newest."""
MOST_RANKS = 40_000
"""Ranks of all of them together: of a large job fewer runs do, as the report is waited for."""


@dataclass(frozen=True)
class Past:
    """Reports as they were found: (file, report). `left_out` counts files by why they are none."""

    path: str
    reports: tuple[tuple[str, Report], ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    def beside(self, cluster: Cluster, run: Mapping[str, Any]) -> Choice:
        """Those of the same hosts, ranks and backend, that began before this run.

        Args:
            cluster: of this run.
            run: its `id` and `started`, as in the report.
        """
        out = Counter(self.left_out)
        used: list[tuple[str, Report, Cluster]] = []
        known = {run_id(run)}
        room = max(LEAST, min(MOST, MOST_RANKS // max(1, cluster.world_size)))
        newest_first = sorted(
            self.reports, key=lambda item: (_started(item[1].run), item[0]), reverse=True
        )
        for file, report in newest_first:
            earlier = cluster_of(report)
            reason = _unfit(cluster, run, report, earlier)
            if run_id(report.run) in known:
                reason = "of this run, or of one that is there already"
            if not reason and len(used) == room:
                reason = f"older than the newest {room}"
            if reason:
                out[reason] += 1
                continue
            known.add(run_id(report.run))
            used.append((file, report, earlier))
        return Choice(self.path, tuple(used), dict(out))


@dataclass(frozen=True)
class Choice:
    """What was taken, newest first, and how many files were not, by reason."""

    path: str
    used: tuple[tuple[str, Report, Cluster], ...]
    left_out: Mapping[str, int]

    def in_words(self) -> str:
        """How many were taken, and why others were not."""
        number = len(self.used)
        text = f"{number} earlier run{'' if number == 1 else 's'} in {self.path}"
        others = ", ".join(
            f"{count} {reason}"
            for reason, count in sorted(self.left_out.items(), key=lambda each: (-each[1], each))
        )
        return f"{text}; not used: {others}" if others else text

    def to_json(self) -> dict[str, Any]:
        """For `run` of the report."""
        return {
            "path": self.path,
            "text": self.in_words(),
            "runs": [run_id(report.run) for _, report, _ in self.used],
            "left_out": dict(self.left_out),
        }


def run_id(run: Mapping[str, Any]) -> str:
    """What tells runs apart; in a file, anybody may have written anything."""
    return str(run.get("id", ""))


def _unfit(cluster: Cluster, run: Mapping[str, Any], report: Report, earlier: Cluster) -> str:
    """Why an earlier report does not count; empty if it does."""
    here, there = _names(cluster), _names(earlier)
    if not (earlier.complete and there):
        return "of one host's own view"
    if not (here <= there or there <= here):
        return "of other hosts" if report.redacted is False else "of other hosts, or redacted"
    if earlier.world_size != cluster.world_size:
        return "of another number of ranks"
    if earlier.backend != cluster.backend:
        return f"with backend {earlier.backend}"
    if _started(report.run) > _started(run):
        return "of later runs"
    return ""


def _names(cluster: Cluster) -> set[str]:
    return {host.name for host in cluster.present_hosts if host.name}


def _started(run: Mapping[str, Any]) -> str:
    """ISO 8601 in UTC sorts as text does."""
    return str(run.get("started", ""))
