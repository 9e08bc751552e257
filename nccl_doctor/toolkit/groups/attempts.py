"""Attempts of groups at their collectives: who finished, who stands in the way. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nccl_doctor.model.cluster import Cluster, Evidence, Outcome, OutcomeStatus
from nccl_doctor.toolkit.groups.lagging import lagging
from nccl_doctor.toolkit.groups.mixups import own_collective, was_cut_off
from nccl_doctor.toolkit.groups.strays import MADE, astray

CONNECT = "connect to the store"
ENTRY = "init_process_group"
"""The breadcrumb of a rank that enters its group."""
NEW_GROUP = "new_group"
TAKE_DEVICE = "set device"
"""How the breadcrumb of a rank begins that starts the GPU driver and makes a context."""
FORMING = (CONNECT, ENTRY, NEW_GROUP, MADE)
"""Steps before a group is there: one that is stuck in them never formed."""

_VICTIM_WORDS = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "remote process",
    "ncclremoteerror",
    "ncclsystemerror",
)


def is_victim(outcome: Outcome) -> bool:
    """Whether its error says no more than that it lost another one."""
    return any(word in outcome.reason.lower() for word in _VICTIM_WORDS)


def has_entered(outcome: Outcome) -> bool:
    """Whether a rank came as far as forming its group. Of many breadcrumbs the first are lost."""
    return any(
        crumb["step"] in (ENTRY, NEW_GROUP, MADE) or "sequence" in crumb
        for crumb in outcome.breadcrumbs
    )


def is_starting(outcome: Outcome) -> bool:
    """Whether a stuck rank was at its GPU, and nobody had stopped its process."""
    return outcome.last_step.startswith(TAKE_DEVICE) and outcome.state not in ("T", "t")


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
        """Killed by a signal, or gone with an exit code, and not for what another rank sent."""
        dead = [m for m in self._ended(OutcomeStatus.DIED) if not was_cut_off(m.outcome)]
        # Where groups are not what they should be, the backend may give up anywhere.
        return [m for m in dead if m.outcome.signal != "SIGABRT"] if self.astray else dead

    @property
    def stuck(self) -> list[Evidence]:
        """Killed by us at the deadline."""
        return self._ended(OutcomeStatus.HUNG)

    @property
    def raised(self) -> list[Evidence]:
        """Ended by an exception."""
        return self._ended(OutcomeStatus.RAISED)

    @property
    def has_failed_itself(self) -> bool:
        """Some member raised, and not because it lost another one.

        One that is killed at its deadline lets others raise a moment before their own.
        """
        return any(not is_victim(m.outcome) for m in self.raised)

    @property
    def starting(self) -> list[Evidence]:
        """Still waiting for the GPU driver to start, of which they say nothing else."""
        return [m for m in self.stuck if is_starting(m.outcome)]

    @property
    def stopped(self) -> list[Evidence]:
        """Stopped by a signal, or waiting in the kernel where no signal reaches it."""
        stopped = [m for m in self.stuck if m.outcome.state in ("T", "t", "D")]
        return [m for m in stopped if not is_starting(m.outcome)]

    @property
    def never_came(self) -> list[Evidence]:
        """Stuck before they entered the group that others had entered."""
        out = [m for m in self.stuck if not has_entered(m.outcome)]
        came = len(out) < len(self.stuck)
        return [m for m in out if not is_starting(m.outcome)] if came else []

    @cached_property
    def astray(self) -> dict[int, tuple[str, bool]]:
        """Seats of those whose torch made other groups than it was asked for (see `astray`)."""
        return astray(self.members, finished=self.is_good)

    @property
    def lagging(self) -> list[Evidence]:
        """Never came to the collective that the others wait in; where nobody else is to blame."""
        others = self.dead or self.stopped or self.never_came or self.astray or self.starting
        return [] if others else lagging(self.members)

    @property
    def has_culprit(self) -> bool:
        """Some member is to blame more than the others, or did not take part at all."""
        tried = (OutcomeStatus.OK, OutcomeStatus.DIED, OutcomeStatus.HUNG, OutcomeStatus.RAISED)
        someone_did_not = any(m.outcome.status not in tried for m in self.members)
        found = self.dead or self.stopped or self.never_came or self.astray or self.lagging
        return bool(found or self.starting) or someone_did_not

    @property
    def is_mixed_up(self) -> bool:
        """Members ran different collectives, by what the backend says; who did is not said here."""
        said = any(was_cut_off(m.outcome) or own_collective(m.outcome) for m in self.members)
        return said and not self.has_culprit

    @property
    def is_unexplained(self) -> bool:
        """It hangs, and no member is to blame more than the others."""
        stuck = bool(self.stuck) and not self.has_failed_itself
        return stuck and not self.has_culprit and not self.is_mixed_up

    @property
    def is_failed(self) -> bool:
        """Members raised, and not because another one died."""
        failed = self.has_failed_itself or (bool(self.raised) and not self.stuck)
        return failed and not self.has_culprit and not self.is_mixed_up


def attempts_of(cluster: Cluster, check: str) -> dict[str, list[Attempt]]:
    """Round → its groups, for a check that forms process groups; members in order of rank."""
    groups: dict[tuple[str, int | None], list[Evidence]] = {}
    for item in cluster.evidence(check):
        groups.setdefault((item.round, item.outcome.group), []).append(item)
    attempts: dict[str, list[Attempt]] = {}
    for (name, _), members in groups.items():
        attempts.setdefault(name, []).append(Attempt(name, tuple(members)))
    return attempts
