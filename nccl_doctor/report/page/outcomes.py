"""Every outcome of a report with its place, whatever the checks are: read as it comes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nccl_doctor.model.cluster import Facts, Outcome
from nccl_doctor.model.findings import numbered
from nccl_doctor.model.report import Report
from nccl_doctor.report.places import MOST_RANGES

T = TypeVar("T")

_MOST = 4
"""Most names of hosts in a row."""


@dataclass(frozen=True)
class Step:
    """One breadcrumb: what was about to be done, and seconds after the beginning."""

    name: str
    group: str
    is_collective: bool
    at_s: float


@dataclass(frozen=True)
class Seen:
    """Ending of one participant in one round of a check.

    `rank` is None where it spoke for its host.
    """

    check: str
    round: str
    host: str
    rank: int | None
    outcome: Outcome

    @property
    def label(self) -> str:
        """Name of the participant."""
        return self.host if self.rank is None else f"rank {self.rank} on {self.host}"

    @property
    def status(self) -> str:
        """Status of the outcome."""
        return self.outcome.status.value

    @property
    def is_good(self) -> bool:
        """True if it finished, or had nothing to do."""
        return self.status in ("ok", "skipped")

    @property
    def is_bad(self) -> bool:
        """True if it failed. An outcome that could not be tested is neither good nor bad."""
        return self.status in ("raised", "hung", "died", "silent")

    @property
    def group(self) -> int | None:
        """Lowest seat of its group; None if it observed alone."""
        return self.outcome.group if isinstance(self.outcome.group, int) else None

    @property
    def took_s(self) -> float:
        """Duration in seconds."""
        return number(self.outcome.duration_s)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Breadcrumbs of the outcome, in their order."""
        return tuple(
            Step(
                str(crumb.get("step")),
                str(crumb.get("group") or ""),
                "sequence" in crumb,
                number(crumb.get("at_s")),
            )
            for crumb in self.outcome.breadcrumbs
        )

    @property
    def last_step_s(self) -> float:
        """Seconds after the beginning of the last breadcrumb; 0 without any."""
        crumbs = self.outcome.breadcrumbs
        return number(crumbs[-1].get("at_s")) if crumbs else 0.0

    def in_words(self) -> str:
        """Ending in words."""
        words = self.status
        if self.status == "died":
            words += f" ({self.outcome.signal or f'exit code {self.outcome.exit_code}'})"
        if not self.is_good and (steps := self.steps):
            words += f" in {steps[-1].name}"
        return words


def outcomes_of(report: Report) -> dict[str, dict[str, list[Seen]]]:
    """Check → round → outcomes: checks, hosts and ranks as in the report, rounds by name."""
    found: dict[str, dict[str, list[Seen]]] = {check.name: {} for check in report.checks}
    for seen in _every(report):
        found.setdefault(seen.check, {}).setdefault(seen.round, []).append(seen)
    return {check: dict(in_order(rounds)) for check, rounds in found.items() if rounds}


def who(places: list[Seen]) -> str:
    """Several participants, in a few words."""
    ranks = [seen.rank for seen in places if seen.rank is not None]
    if ranks:
        return ranks_in_words(ranks)
    names = list(dict.fromkeys(seen.host for seen in places))
    more = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {more} more" if more > 0 else "")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0–2, 5`."""
    return numbered("rank", ranks, MOST_RANGES)


def number(value: Any) -> float:
    """A number that is none becomes 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    try:
        return max(0.0, float(value)) if math.isfinite(value) else 0.0
    except OverflowError:  # JSON knows whole numbers of any size
        return 0.0


def mapping(value: Any) -> Mapping[str, Any]:
    """The value, or an empty mapping if it is none."""
    return value if isinstance(value, Mapping) else {}


def in_order(values: Mapping[Any, T]) -> list[tuple[Any, T]]:
    """Items by name, as in a saved report: a page must not depend on a trip through a file."""
    return sorted(values.items(), key=lambda item: str(item[0]))


def _every(report: Report) -> Iterator[Seen]:
    places: list[tuple[str, int | None, Facts]] = [
        (host.label, None, host.facts) for host in report.cluster.hosts
    ]
    for rank in report.cluster.ranks:
        places.append((rank.host.label, -1 if rank.rank is None else rank.rank, rank.facts))
    for name, number_of, facts in places:
        for check, rounds in facts.items():
            for round_name, outcome in rounds.items():
                yield Seen(check, round_name, name, number_of, outcome)
