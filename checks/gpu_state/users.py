"""Users of the GPUs of a host: ranks, this examination, and others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    Step,
    look,
    number_range,
)
from nccl_doctor.toolkit.forks import OURS
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
    """The ranks of one host that take each GPU.

    `by_name`: UUID, or PCI address, → ranks. `complete`: the GPU of every expected rank of the host
    is known, so all other GPUs belong to others.
    """

    by_name: Mapping[str, tuple[Rank, ...]]
    complete: bool

    def of(self, gpu: Gpu) -> tuple[Rank, ...]:
        """The ranks that take a GPU, or a part of it."""
        found = {
            rank.seat: rank
            for name in (gpu.get("uuid"), gpu.get("bus_id"))
            for rank in self.by_name.get(str(name), ())
        }
        return tuple(found.values())

    def is_foreign(self, gpu: Gpu) -> bool:
        """Whether surely no rank takes this GPU; one that does not answer is never foreign."""
        return self.complete and is_readable(gpu) and not self.of(gpu)


def users_of(cluster: Cluster, host: Host, gpus: Sequence[Gpu]) -> Users:
    """Users of GPUs, from the facts of `backend_device` and `gpu_affinity`.

    NVML lists GPUs, torch may list MIG instances by their own UUIDs: then the PCI address shows
    which GPU it is.
    """
    by_name: dict[str, tuple[Rank, ...]] = {}
    listed = {str(gpu[name]) for gpu in gpus for name in ("uuid", "bus_id") if gpu.get(name)}
    known = set()
    for rank, name in _taken(cluster, host):
        by_name[name] = (*by_name.get(name, ()), rank)
        if name in listed:
            known.add(rank.seat)
    ranks = cluster.ranks_on(host)
    most = max((rank.launch.local_world_size or 0 for rank in ranks if rank.launch), default=0)
    complete = bool(ranks) and len(ranks) >= most and all(rank.seat in known for rank in ranks)
    return Users(by_name, complete)


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


def held_by_us(cluster: Cluster, host: Host, users: Users, gpus: Sequence[Gpu]) -> list[int]:
    """Bytes that this examination itself may hold on each GPU while it is read.

    Where the users of a GPU are unknown, one rank is assumed.
    """
    worked = {
        item.rank.seat
        for item in cluster.evidence_on("gpu_work", host)
        if item.outcome.status not in (OutcomeStatus.SKIPPED, OutcomeStatus.SILENT)
    }
    each = _WORK_BYTES.get(cluster.level, _LESS_WORK_BYTES)
    busy = [len(worked & {rank.seat for rank in users.of(gpu)}) for gpu in gpus]
    return [(count or min(1, len(worked))) * each for count in busy]


def busy_troubles(gpu: Gpu, own: Collection[int], ours: int) -> Iterator[Trouble]:
    """Troubles from other users of a GPU.

    With MIG on, the processes of all its instances are listed, and some are other tenants'. A
    process whose number is not of this PID namespace may be one of ours: of it only the memory
    counts that is in use on the GPU.

    Args:
        gpu: one that answers.
        own: process ids of the examination.
        ours: bytes that the examination may hold.
    """
    memory, processes = gpu["memory"], gpu["processes"] or ()
    if (gpu["mig"] or [0])[0]:
        return
    used = max(0, memory["used"] - ours) if memory else 0
    full = bool(memory) and memory["total"] - used < memory["total"] / 10
    severity = Severity.FAIL if full else Severity.WARN
    strange = [
        one
        for one in processes
        if one.get("here", True)
        and one["pid"] not in own
        and not (one["name"] or "").startswith((_MPS, OURS))
    ]
    if strange:
        who = ", ".join(
            f"pid {one['pid']} ({one['name'] or 'name not visible here'})" for one in strange[:4]
        )
        who += f" and {len(strange) - 4} more" if len(strange) > 4 else ""
        known = [str(one["pid"]) for one in strange if one["name"]]
        yield Trouble(
            GPU_BUSY,
            f"{who} uses it" if len(strange) == 1 else f"{who} use it",
            Fix(Step(f"kill {' '.join(known)}", note="if nobody needs it", persists=True))
            if known
            else "",
            severity,
            # One without a name is in another PID namespace, or has ended: it may be one of ours.
            Confidence.CERTAIN if known else Confidence.POSSIBLE,
        )
    elif (
        memory
        and not any(one.get("here", True) for one in processes)
        and used > max(_SOME_BYTES, memory["total"] / 20)
    ):
        yield Trouble(
            GPU_BUSY,
            f"{memory['used'] / _GIB:.0f} of {memory['total'] / _GIB:.0f} GiB in use, but no "
            "process is visible from here",
            Fix(look("fuser -v /dev/nvidia*", "on the host itself, outside containers")),
            severity,
            Confidence.LIKELY,
        )
