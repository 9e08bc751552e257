"""Attempts of groups at their collectives: who finished, who stands in the way. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nccl_doctor.cluster import Cluster, Evidence, Outcome, OutcomeStatus
from nccl_doctor.tools.groups.lagging import lagging

CONNECT = "connect to the store"
ENTRY = "init_process_group"
"""The breadcrumb of a rank that enters its group."""
NEW_GROUP = "new_group"
FORMING = (CONNECT, ENTRY, NEW_GROUP)
"""Steps before a group is there: one that is stuck in them never formed."""


def has_entered(outcome: Outcome) -> bool:
    """Whether a rank came as far as forming its group."""
    return any(crumb["step"] == ENTRY for crumb in outcome.breadcrumbs)


@dataclass(frozen=True)
class Attempt:
    """One group in one round, and how each member ended."""

    name: str
    members: tuple[Evidence, ...]

    def _ended(self, status: OutcomeStatus) -> list[Evidence]:
        return [m for m in self.members if m.outcome.status is status]

    @property
    def seats(self) -> tuple[int, ...]:
        """Seats of the group, in order of rank."""
        return tuple(m.rank.seat for m in self.members)

    @property
    def is_good(self) -> bool:
        """Every member finished."""
        return len(self._ended(OutcomeStatus.OK)) == len(self.members)

    @property
    def dead(self) -> list[Evidence]:
        """Killed by a signal, or gone with an exit code."""
        return self._ended(OutcomeStatus.DIED)

    @property
    def stuck(self) -> list[Evidence]:
        """Killed by us at the deadline."""
        return self._ended(OutcomeStatus.HUNG)

    @property
    def raised(self) -> list[Evidence]:
        """Ended by an exception."""
        return self._ended(OutcomeStatus.RAISED)

    @property
    def stopped(self) -> list[Evidence]:
        """Stopped by a signal, or waiting in the kernel where no signal reaches it."""
        return [m for m in self.stuck if m.outcome.state in ("T", "t", "D")]

    @property
    def never_came(self) -> list[Evidence]:
        """Stuck before they entered the group that others had entered."""
        out = [m for m in self.stuck if not has_entered(m.outcome)]
        return out if len(out) < len(self.stuck) else []

    @property
    def lagging(self) -> list[Evidence]:
        """Never came to the collective that the others wait in; where nobody else is to blame."""
        others = self.dead or self.stopped or self.never_came
        return [] if others else lagging(self.members)

    @property
    def has_culprit(self) -> bool:
        """Some member is to blame more than the others, or did not take part at all."""
        tried = (*self.dead, *self.stuck, *self.raised, *self._ended(OutcomeStatus.OK))
        someone_did_not = len(tried) < len(self.members)
        found = self.dead or self.stopped or self.never_came or self.lagging
        return bool(found) or someone_did_not

    @property
    def is_unexplained(self) -> bool:
        """It hangs, and no member is to blame more than the others."""
        return bool(self.stuck) and not self.has_culprit and not self.raised

    @property
    def is_failed(self) -> bool:
        """Members raised, and not because another one died."""
        return bool(self.raised) and not self.has_culprit


def attempts_of(cluster: Cluster, check: str) -> dict[str, list[Attempt]]:
    """Round → its groups, for a check that forms process groups; members in order of rank."""
    groups: dict[tuple[str, int | None], list[Evidence]] = {}
    for item in cluster.evidence(check):
        groups.setdefault((item.round, item.outcome.group), []).append(item)
    attempts: dict[str, list[Attempt]] = {}
    for (name, _), members in groups.items():
        attempts.setdefault(name, []).append(Attempt(name, tuple(members)))
    return attempts
