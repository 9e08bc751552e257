"""Attempts of groups: which members finished, and which ones block the others. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from nccl_doctor.model.cluster import (
    ALONE,
    Cluster,
    Evidence,
    Outcome,
    OutcomeStatus,
    Rank,
)
from nccl_doctor.model.findings import Where
from nccl_doctor.toolkit.groups.lagging import lagging
from nccl_doctor.toolkit.groups.mixups import own_collective, was_cut_off
from nccl_doctor.toolkit.groups.strays import MADE, astray
from nccl_doctor.toolkit.hosts import road_to_master
from nccl_doctor.toolkit.peers.loss import loses_heavily, roads_are_slow

CONNECT = "connect to the store"
ENTRY = "init_process_group"
"""The breadcrumb of a rank that enters its group."""
NEW_GROUP = "new_group"
TAKE_DEVICE = "set device"
"""Prefix of the breadcrumb of a rank that starts the GPU driver and makes a context."""
FORMING = (CONNECT, ENTRY, NEW_GROUP, MADE)
"""Steps before a group exists: a group that is stuck in them never formed."""

_VICTIM_WORDS = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "remote process",
    "ncclremoteerror",
    "ncclsystemerror",
)
_LATE_WORDS = ("timed out", "timeout", "time out", "failed with: address already in use")
"""The last is gloo's where no port is free, until one in TIME_WAIT comes free again."""


def is_victim(outcome: Outcome) -> bool:
    """True if the error of a member only shows that it lost another member."""
    return any(word in outcome.reason.lower() for word in _VICTIM_WORDS)


def ran_out_of_time(outcome: Outcome) -> bool:
    """True if the error of a member only shows that something took too long, or was lost."""
    words = outcome.reason.lower()
    return is_victim(outcome) or any(word in words for word in _LATE_WORDS)


def has_entered(outcome: Outcome) -> bool:
    """True if a rank began to form its group. If there are many breadcrumbs, the first are lost."""
    return any(
        crumb["step"] in (ENTRY, NEW_GROUP, MADE) or "sequence" in crumb
        for crumb in outcome.breadcrumbs
    )


def is_starting(outcome: Outcome) -> bool:
    """True if a stuck rank was starting its GPU, and its process was not stopped."""
    return outcome.last_step.startswith(TAKE_DEVICE) and outcome.state not in ("T", "t")


@dataclass(frozen=True)
class Attempt:
    """A group in a round, with the outcome of each member.

    `roads`: seat → the link to rank 0's host, where the store is, of members on other hosts.
    `start_s`: seconds that GPUs and communicators need to start here, as far as it was seen.
    """

    name: str
    members: tuple[Evidence, ...]
    roads: Mapping[int, Where] = field(default_factory=dict)
    start_s: float = 0.0

    @cached_property
    def _statuses(self) -> frozenset[OutcomeStatus]:
        return frozenset(m.outcome.status for m in self.members)

    def _ended(self, status: OutcomeStatus) -> list[Evidence]:
        if status not in self._statuses:  # as in nearly all groups, but for `ok`
            return []
        return [m for m in self.members if m.outcome.status is status]

    @property
    def seats(self) -> tuple[int, ...]:
        """Seats of the group, in order of rank."""
        return tuple(m.rank.seat for m in self.members)

    @property
    def is_good(self) -> bool:
        """True if every member finished."""
        return self._statuses <= {OutcomeStatus.OK}

    @property
    def is_untried(self) -> bool:
        """True if no member took part: the group says nothing of any of them."""
        return self._statuses <= {OutcomeStatus.SKIPPED, OutcomeStatus.UNTESTED}

    @property
    def dead(self) -> list[Evidence]:
        """Members that died by a signal or exit code, and not because of what another rank sent."""
        dead = [m for m in self._ended(OutcomeStatus.DIED) if not was_cut_off(m.outcome)]
        # Where groups are wrong, the backend may abort anywhere.
        return [m for m in dead if m.outcome.signal != "SIGABRT"] if dead and self.astray else dead

    @property
    def stuck(self) -> list[Evidence]:
        """Members that we killed at the deadline."""
        return self._ended(OutcomeStatus.HUNG)

    @property
    def is_cut_short(self) -> bool:
        """True if it was ended before a group can have started here: the run had no more time. That
        somebody was still at it then says nothing.
        """
        return any(m.outcome.duration_s < self.start_s for m in self.stuck)

    @property
    def raised(self) -> list[Evidence]:
        """Members that ended by an exception."""
        return self._ended(OutcomeStatus.RAISED)

    @property
    def has_failed_itself(self) -> bool:
        """True if some member raised, and not because it lost another one.

        When one is killed at its deadline, others may raise just before their own.
        """
        return any(not is_victim(m.outcome) for m in self.raised)

    @property
    def starting(self) -> list[Evidence]:
        """Members that still wait for the GPU driver to start."""
        return [m for m in self.stuck if is_starting(m.outcome) and not self.is_cut_short]

    @property
    def stopped(self) -> list[Evidence]:
        """Members stopped by a signal, or waiting in the kernel where no signal reaches them."""
        stopped = [m for m in self.stuck if m.outcome.state in ("T", "t", "D")]
        return [m for m in stopped if not is_starting(m.outcome)]

    @property
    def never_came(self) -> list[Evidence]:
        """Members that are stuck before they entered the group that others entered."""
        out = [m for m in self.stuck if not has_entered(m.outcome)]
        came = len(out) < len(self.stuck) and not self.is_cut_short
        return [m for m in out if not is_starting(m.outcome)] if came else []

    @cached_property
    def astray(self) -> dict[int, tuple[str, bool]]:
        """Seats of members whose torch made other groups than requested (see `astray`)."""
        return astray(self.members, finished=self.is_good)

    def unconnected(self, members: list[Evidence]) -> list[Evidence]:
        """Members, of the given ones, that did not reach the store of the group on another host:
        the one end, the other, or something between them is the reason.
        """
        return [m for m in members if m.outcome.last_step == CONNECT and m.rank.seat in self.roads]

    @property
    def lagging(self) -> list[Evidence]:
        """Members that never came to the collective of the others, where no other is to blame."""
        others = self.dead or self.stopped or self.never_came or self.astray or self.starting
        return [] if others or self.is_cut_short else lagging(self.members)

    @property
    def has_culprit(self) -> bool:
        """True if some member is more to blame than the others, or did not take part at all."""
        tried = (OutcomeStatus.OK, OutcomeStatus.DIED, OutcomeStatus.HUNG, OutcomeStatus.RAISED)
        someone_did_not = any(m.outcome.status not in tried for m in self.members)
        found = self.dead or self.stopped or self.never_came or self.astray or self.lagging
        return bool(found or self.starting) or someone_did_not

    @property
    def is_mixed_up(self) -> bool:
        """True if the backend reports that members ran different collectives; not which members."""
        if self.is_good or self.is_untried:
            return False
        said = any(was_cut_off(m.outcome) or own_collective(m.outcome) for m in self.members)
        return said and not self.has_culprit

    @property
    def is_unexplained(self) -> bool:
        """True if it hangs, and no member is more to blame than the others."""
        if not self.stuck or self.has_failed_itself:
            return False
        return not (self.has_culprit or self.is_mixed_up or self.is_cut_short)

    @property
    def is_failed(self) -> bool:
        """True if members raised, and not because another one died."""
        failed = self.has_failed_itself or (bool(self.raised) and not self.stuck)
        return failed and not self.has_culprit and not self.is_mixed_up


def attempts_of(cluster: Cluster, check: str) -> dict[str, list[Attempt]]:
    """Round → its groups, for a check that forms process groups; members in order of rank."""
    key, read = (attempts_of, check), (check, *GROUP_READS)
    found = cluster.once(key, read, lambda: _attempts_of(cluster, check))
    return {name: list(attempts) for name, attempts in found.items()}


def _attempts_of(cluster: Cluster, check: str) -> dict[str, list[Attempt]]:
    groups: dict[tuple[str, int | None], list[Evidence]] = {}
    for item in cluster.evidence(check):
        groups.setdefault((item.round, item.outcome.group), []).append(item)
    hung = any(m.outcome.status is OutcomeStatus.HUNG for each in groups.values() for m in each)
    start_s, away = _least_s(cluster) if hung else 0.0, _roads(cluster)
    attempts: dict[str, list[Attempt]] = {}
    for (name, _), members in groups.items():
        attempts.setdefault(name, []).append(Attempt(name, tuple(members), away, start_s))
    return attempts


def _roads(cluster: Cluster) -> Mapping[int, Where]:
    """Seat → the link to rank 0's host, of the ranks on other hosts."""
    return cluster.once(_roads, (), lambda: _roads_to_master(cluster))


def _roads_to_master(cluster: Cluster) -> Mapping[int, Where]:
    roads = {host.id: road_to_master(cluster, host) for host in cluster.present_hosts}
    return {r.seat: roads[r.host.id] for r in cluster.present if roads[r.host.id].links}


FIRST, WORLD = "first", "world"
"""Rounds of check `collectives`: one rank of each host alone, before any other group; all ranks."""
UNKNOWN_S = 25.0
"""Seconds if it was not measured: eight GPUs without persistence mode need about 20 s to wake."""
FIRST_S = 60.0
"""Seconds more as long as no group has finished: without a JIT cache and without code for the GPU
in NCCL, a B200 took 55 s for its first communicator (NVIDIA/nccl issue 1646)."""
_STARTS = ("backend_device", "gpu_work")
"""Names of the checks whose facts hold the time that the driver took."""
GROUP_READS = (
    "backend_device", "clock", "collectives", "firewall", "gpu_work", "loss", "uplink",
)  # fmt: skip
"""Names of the checks whose facts tell what time a group needs here."""
_MOST_START_S = 60.0
_MOST_GROUP_S = 120.0
_INCLUDED_S = 5.0
"""A group that took no longer needs nothing more than what the user allows."""
_GLOO_S = 2.0
"""Seconds in which a group of gloo surely forms on a busy host too; on a quiet one it takes 0.1."""
_SLOW_ROADS_S = 15.0
"""Seconds more where roads are slow: TCP sends a SYN again after 1, 3, 7 and 15 s (RFC 6298)."""
_HEAVY_LOSS_S = 40.0
"""The same where a tenth and more is lost: the job still runs there. With a quarter of what one of
three hosts sends lost, plain torchrun is done 22 s later (torch 2.13, gloo), with a third 50 s.
"""
_COMMUNICATOR_S = 6.0
"""Seconds for one more communicator, if none was measured (nccl issue 534: 7 in 31 to 42 s)."""
_RANKS_PER_S = 200
"""The bootstrap of NCCL goes from rank to rank: 5 ms for each."""


def attempt_deadline(cluster: Cluster, communicators: int = 1) -> float:
    """Seconds for one attempt: what the user allows for one group, what slow roads need, and with
    NCCL what the start of GPUs and communicators takes here.

    Every attempt runs in its own processes. Without persistence mode the driver releases a GPU with
    the last process that uses it, so each attempt waits until it is up again.

    Args:
        cluster: with what was observed so far.
        communicators: number of groups that a rank forms, one after the other.
    """
    key, read = (attempt_deadline, communicators), GROUP_READS
    return cluster.once(key, read, lambda: _attempt_deadline(cluster, communicators))


def _attempt_deadline(cluster: Cluster, communicators: int) -> float:
    allowed_s = cluster.collective_timeout_s
    roads_s = _roads_s(cluster)
    if cluster.backend != "nccl":
        return allowed_s + roads_s
    more_s = (communicators - 1) * min(allowed_s, _another_s(cluster))
    by_size_s = min(_MOST_START_S, cluster.world_size // _RANKS_PER_S)
    start_s = driver_start_s(cluster) + _group_start_s(cluster)
    return allowed_s + roads_s + start_s + by_size_s + more_s


def _roads_s(cluster: Cluster) -> float:
    """Seconds more that a group needs on slow roads."""
    if loses_heavily(cluster):
        return _HEAVY_LOSS_S
    return _SLOW_ROADS_S if roads_are_slow(cluster) else 0.0


def driver_start_s(cluster: Cluster) -> float:
    """Seconds, rounded up, that the slowest rank needed for driver and context: at most 60; 0 where
    no group uses a GPU.
    """
    if cluster.backend != "nccl":
        return 0.0
    took = driver_starts(cluster)
    return float(min(_MOST_START_S, math.ceil(max((s for _, s in took), default=UNKNOWN_S))))


def driver_starts(cluster: Cluster) -> list[tuple[Rank, float]]:
    """Ranks, with the seconds that each needed for driver and context, where it was measured."""
    return cluster.once(driver_starts, _STARTS, lambda: _driver_starts(cluster))


def _driver_starts(cluster: Cluster) -> list[tuple[Rank, float]]:
    return [
        (rank, (facts.get("start_s") or 0.0) + (facts.get("context_s") or 0.0))
        for check in _STARTS
        for rank, facts in cluster.facts(check, ALONE)
        if facts.get("start_s") is not None
    ]


def group_times(cluster: Cluster, round_name: str) -> list[tuple[Rank, float]]:
    """Members that finished their group in a round of check `collectives`, with the seconds that
    each needed for it after its GPU had started.
    """
    key = (group_times, round_name)
    return cluster.once(key, ("collectives",), lambda: _group_times(cluster, round_name))


def _group_times(cluster: Cluster, round_name: str) -> list[tuple[Rank, float]]:
    found = []
    for item in cluster.evidence("collectives", round_name):
        outcome = item.outcome
        if outcome.status is not OutcomeStatus.OK:
            continue
        first = next((c for c in outcome.breadcrumbs if c.get("step") == CONNECT), {})
        from_s = first.get("at_s")
        if isinstance(from_s, (int, float)):
            found.append((item.rank, outcome.duration_s - from_s))
    return found


def _least_s(cluster: Cluster) -> float:
    """Seconds without which no group can be said to hang; 0 where that is not known: with NCCL, as
    long as no first one was tried.
    """
    if cluster.backend != "nccl":
        return _roads_s(cluster) + min(_GLOO_S, cluster.collective_timeout_s / 2)
    first = cluster.evidence("collectives", FIRST)
    if not first:
        return 0.0
    done = all(item.outcome.status is OutcomeStatus.OK for item in first)
    return driver_start_s(cluster) + (_group_start_s(cluster) if done else FIRST_S)


def _slowest_s(cluster: Cluster, round_name: str) -> float | None:
    return max((took for _, took in group_times(cluster, round_name)), default=None)


def _group_start_s(cluster: Cluster) -> float:
    """Seconds that one group needs beyond what the user allows, by the last one that finished: what
    the first one compiled may be cached now, or not.
    """
    took = _slowest_s(cluster, WORLD)
    took = _slowest_s(cluster, FIRST) if took is None else took
    if took is None:
        return FIRST_S
    return 0.0 if took <= _INCLUDED_S else float(min(_MOST_GROUP_S, math.ceil(took)))


def _another_s(cluster: Cluster) -> float:
    """Seconds for one more communicator of a process: twice what a whole group of all took."""
    took = _slowest_s(cluster, WORLD)
    return _COMMUNICATOR_S if took is None else float(math.ceil(2 * took))
