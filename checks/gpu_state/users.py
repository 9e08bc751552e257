"""Users of the GPUs of a host: ranks, this examination, and others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Fix,
    Host,
    Level,
    OutcomeStatus,
    Rank,
    Severity,
    look,
    number_range,
    shell,
)
from nccl_doctor.system.forks import OURS
from nccl_doctor.toolkit.advice import end_processes
from nccl_doctor.toolkit.gpu.kinds import GPU_BUSY

from .trouble import Gpu, Trouble, is_readable

_MPS = "nvidia-cuda-mps"
_GIB = 1 << 30
_SOME_BYTES = 2 * _GIB
_WORK_BYTES = {Level.FULL: 5 * _GIB}
_LESS_WORK_BYTES = 2 * _GIB
"""Bytes that `gpu_work` may hold on its rank's GPU: two contexts (a neighbour's too), buffers."""


@dataclass(frozen=True)
class Users:
    """The ranks of one host that take each of its GPUs, from the facts of `backend_device` and
    `gpu_affinity`; looked for only once somebody asks, as nobody does where nothing is wrong.

    Attributes:
        gpus: those of the host.
        seen: process ids of the examination that were seen when the GPUs were read.
    """

    cluster: Cluster
    host: Host
    gpus: Sequence[Gpu] = ()
    seen: Collection[int] = ()

    def of(self, gpu: Gpu) -> tuple[Rank, ...]:
        """The ranks that take a GPU, or a part of it."""
        found = {
            rank.seat: rank
            for name in (gpu.get("uuid"), gpu.get("bus_id"))
            for rank in self._by_name.get(str(name), ())
        }
        return tuple(found.values())

    @cached_property
    def foreign(self) -> frozenset[int]:
        """Indices of GPUs that surely no rank takes: once the GPU of every expected rank is known.
        One that does not answer is never foreign.
        """
        if not self._are_known:
            return frozenset()
        readable = (gpu for gpu in self.gpus if is_readable(gpu))
        return frozenset(gpu["index"] for gpu in readable if not self.of(gpu))

    @cached_property
    def own(self) -> Collection[int]:
        """Process ids of the examination."""
        ranks = self.cluster.ranks_on(self.host)
        return {*self.seen, *(rank.pid for rank in ranks if rank.pid)}

    def bytes_of_ours(self, gpu: Gpu) -> int:
        """Bytes that this examination itself may hold on a GPU while it is read.

        Where the users of the GPU are unknown, one rank is assumed.
        """
        each = _WORK_BYTES.get(self.cluster.level, _LESS_WORK_BYTES)
        busy = len(self._at_work & {rank.seat for rank in self.of(gpu)})
        return (busy or min(1, len(self._at_work))) * each

    @cached_property
    def _by_name(self) -> Mapping[str, tuple[Rank, ...]]:
        """UUID, or PCI address, → the ranks that take this GPU.

        NVML lists GPUs, torch may list MIG instances by their own UUIDs: then the PCI address shows
        which GPU it is.
        """
        found: dict[str, tuple[Rank, ...]] = {}
        for rank, name in _taken(self.cluster, self.host):
            found[name] = (*found.get(name, ()), rank)
        return found

    @cached_property
    def _are_known(self) -> bool:
        """True if the GPU of every expected rank of the host is known."""
        known = {rank.seat for gpu in self.gpus for rank in self.of(gpu)}
        ranks = self.cluster.ranks_on(self.host)
        most = max((rank.launch.local_world_size or 0 for rank in ranks if rank.launch), default=0)
        return bool(ranks) and len(ranks) >= most and all(rank.seat in known for rank in ranks)

    @cached_property
    def _at_work(self) -> set[int]:
        """Seats of the ranks that check `gpu_work` had compute meanwhile."""
        return {
            item.rank.seat
            for item in self.cluster.evidence_on("gpu_work", self.host)
            if item.outcome.status not in (OutcomeStatus.SKIPPED, OutcomeStatus.SILENT)
        }


def _taken(cluster: Cluster, host: Host) -> Iterator[tuple[Rank, str]]:
    for rank, facts in cluster.facts_on("backend_device", host):
        own = facts["device"]
        if own is not None and facts["devices"][own]["uuid"]:
            yield rank, facts["devices"][own]["uuid"]
    for rank, facts in cluster.facts_on("gpu_affinity", host):
        if facts.get("address"):
            yield rank, facts["address"]


def why_users_unknown(facts: Mapping[str, Any]) -> list[str]:
    """One clause about the GPUs whose users are not known; none where all are known.

    Their processes are of another PID namespace, and how much memory is in use is not known either.
    """
    numbers = [
        gpu["index"]
        for gpu in facts["gpus"]
        if is_readable(gpu)
        and not gpu["memory"]
        and not (gpu["mig"] or [0])[0]
        and not all(one.get("here", True) for one in gpu["processes"] or ())
    ]
    if not numbers:
        return []
    return [
        f"whether others use {'GPU' if len(numbers) == 1 else 'GPUs'} {number_range(numbers)} is "
        "not known: NVML gives process ids that are not of this PID namespace, and not how much "
        "memory is in use"
    ]


def busy_troubles(gpu: Gpu, users: Users) -> Iterator[Trouble]:
    """Troubles from other users of a GPU.

    With MIG on, the processes of all its instances are listed, and some are other tenants'. A
    process whose number is not of this PID namespace may be one of ours: of it only the memory
    counts that is in use on the GPU.

    Args:
        gpu: one that answers.
        users: of the GPUs of its host.
    """
    memory, processes = gpu["memory"], gpu["processes"] or ()
    if (gpu["mig"] or [0])[0]:
        return
    strange = [
        one
        for one in processes
        if one.get("here", True)
        and one["pid"] not in users.own
        and not (one["name"] or "").startswith((_MPS, OURS))
    ]
    most = max(_SOME_BYTES, memory["total"] / 20) if memory else 0
    if not strange and (not memory or memory["used"] <= most):
        return  # then it does not matter how much of it is ours
    used = max(0, memory["used"] - users.bytes_of_ours(gpu)) if memory else 0
    full = bool(memory) and memory["total"] - used < memory["total"] / 10
    severity = Severity.FAIL if full else Severity.WARN
    if strange:
        who = ", ".join(
            f"pid {one['pid']} ({one['name'] or 'name not visible here'})" for one in strange[:4]
        )
        who += f" and {len(strange) - 4} more" if len(strange) > 4 else ""
        known = [str(one["pid"]) for one in strange if one["name"]]
        yield Trouble(
            GPU_BUSY,
            f"{who} uses it" if len(strange) == 1 else f"{who} use it",
            end_processes(known) if known else "",
            severity,
            # One without a name is in another PID namespace, or has ended: it may be one of ours.
            Confidence.CERTAIN if known else Confidence.POSSIBLE,
        )
    elif used > most and not any(one.get("here", True) for one in processes):
        yield Trouble(
            GPU_BUSY,
            f"{memory['used'] / _GIB:.0f} of {memory['total'] / _GIB:.0f} GiB in use, but no "
            "process is visible from here",
            Fix(look(shell("fuser -v /dev/nvidia*"), "on the host itself, outside containers")),
            severity,
            Confidence.LIKELY,
        )
