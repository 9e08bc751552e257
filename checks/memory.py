"""Is there enough memory for the ranks of this host, under its limits?

What it checks
--------------
The memory limit of the control group (container, pod, Slurm job; version 1 or 2), and `memory.high`
of version 2, minus the memory that is in use and cannot be reclaimed, and what the kernel reports
as available on the machine. And how many processes of this group were killed for lack of memory
before.

Why it matters
--------------
The kernel kills a process that exceeds the limit, without an error message (exit code -9 or 137);
the other ranks then wait for it until their time-out, and their messages do not mention memory.
Beyond memory.high it kills nobody, but lets every process of the group that asks for memory sleep:
the job nearly stands still.

How to fix
----------
docker run --memory, resources.limits.memory in Kubernetes, srun --mem; MemoryHigh=infinity of a
systemd unit; fewer DataLoader workers; fewer ranks on a host.

When it is wrong
----------------
How much a rank needs depends on the model; only what torch and NCCL need themselves is counted
here. Kills may be old, if the group existed before this job.

References
----------
Kernel documentation, admin-guide/cgroup-v2 (memory.max, memory.events); NVIDIA/nccl issue 395.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Untested,
    Where,
    look,
    shell,
)
from nccl_doctor.system.limits import MORE_MEMORY, NO_HIGH
from nccl_doctor.toolkit.cgroup import (
    MemoryKills,
    MemoryThrottling,
    cgroup_limits,
    memory_kills,
    memory_throttling,
)
from nccl_doctor.toolkit.host import available_memory

MEMORY_LIMIT_LOW = Kind(
    code="memory-limit-low",
    layer=Layer.HOST,
    title="Too little memory for the ranks of this host",
    why="The kernel kills the rank that exceeds the limit (exit code -9), or slows it down beyond "
    "memory.high, and all others wait for it.",
    fix=MORE_MEMORY,
    severity=Severity.WARN,
)
LACKS = MEMORY_LIMIT_LOW.variant(
    fix=Fix(
        look(shell("ps aux --sort=-rss | head"), "end what should not be there"),
        alternatives=["start fewer ranks on the host"],
    ),
)
SLOWED = MEMORY_LIMIT_LOW.variant(
    why="Beyond memory.high the kernel slows every process of the group down, and all others wait "
    "for this host.",
    fix=NO_HIGH,
)
KILLED = MEMORY_LIMIT_LOW.variant(
    title="Processes of this container or job were killed for memory before",
    why="The memory that is free now was not enough for what ran here: the kernel kills the rank "
    "that exceeds the limit (exit code -9), and all others wait for it.",
)

_ON_MACHINE = "available on the machine"
_MIB = 1 << 20
_LEAST = 160 * _MIB
"""Limit for each rank, below which a rank cannot even start: the private memory of a gloo rank
after one all-reduce is 148 MB (torch 2.13). With CUDA it is more."""
_WANTED = {"gloo": 256 * _MIB, "nccl": 4096 * _MIB}
"""Left per rank: CUDA's and NCCL's own, pinned buffers, DataLoader workers."""


class MemoryFacts(MemoryKills):
    """Facts that `observe` returns; other checks read them."""

    group: dict[str, Any] | None
    available: int | None
    local_ranks: int
    throttling: list[MemoryThrottling]


class Memory(Check):
    """Compares the memory left, in the group and on the machine, with what the ranks need."""

    name = "memory"
    layer = Layer.HOST
    kinds = (MEMORY_LIMIT_LOW,)

    def observe(self, ctx: Context) -> MemoryFacts:
        """Sizes in bytes. `group`: {`limit`, `used`} of the control group or None; `available`: on
        the machine, or None; `oom_kills`, `machine_kills`: see `memory_kills`; `throttling`: see
        `memory_throttling`.
        """
        limits = cgroup_limits(ctx.root)
        available = available_memory(ctx.root)
        if available is None and limits["memory"] is None:
            raise Untested("neither /proc/meminfo nor a memory control group can be read")
        return {
            "group": limits["memory"],
            **memory_kills(ctx.root),
            "available": available,
            "local_ranks": ctx.launch.local_world_size or 1,
            "throttling": memory_throttling(ctx.root),
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on hosts with less memory than their ranks need, or with earlier kills."""
        backend = "nccl" if cluster.backend == "nccl" else "gloo"
        for rank, facts in cluster.facts(self.name):
            ranks, group, kills = facts["local_ranks"], facts["group"], facts["oom_kills"] or 0
            rooms = []
            if facts["available"] is not None:
                rooms.append((facts["available"], _ON_MACHINE))
            if group is not None:
                left = max(0, group["limit"] - group["used"])
                rooms.append((left, f"left of the control group's limit {_mib(group['limit'])}"))
            slows = _least_high(facts.get("throttling") or ())
            if slows is not None and all(slows[0] < room for room, _ in rooms):
                rooms.append(slows)  # elsewhere the group's own limit is met first
            left, words = min(rooms)
            low = left < ranks * _WANTED[backend]
            kills = kills if group is not None else 0
            if not low and not kills:
                continue
            severity = Severity.WARN if low and (backend == "nccl" or kills) else Severity.INFO
            # This program's own memory is freed before the job, so only a limit is a failure.
            if group is not None and group["limit"] < ranks * _LEAST:
                severity = Severity.FAIL
            killed = f"; {kills} of its processes were killed for memory" if kills else ""
            kind = KILLED if not low else LACKS if words == _ON_MACHINE else MEMORY_LIMIT_LOW
            if severity is Severity.FAIL:
                kind = MEMORY_LIMIT_LOW
            elif low and slows == (left, words):
                kind = SLOWED
            yield Finding(
                kind,
                f"{_mib(left)} {words}, for {ranks} ranks{killed}",
                Where(hosts=(rank.host.label,)),
                {name: facts[name] for name in ("group", "available", "oom_kills")},
                severity=severity,
                confidence=Confidence.LIKELY,
            )


def _least_high(limits: Iterable[Mapping[str, Any]]) -> tuple[int, str] | None:
    """The least that is left below a memory.high, with words; None without such a limit."""
    rooms = [(max(0, each["high"] - each["used"]), each["high"]) for each in limits]
    left, high = min(rooms, default=(0, 0))
    words = f"left of memory.high {_mib(high)}, beyond which the kernel slows processes down"
    return (left, words) if high else None


def _mib(size: int) -> str:
    return f"{size / _MIB:.0f} MiB"
