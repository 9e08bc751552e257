"""Did the kernel kill a process for lack of memory while this examination ran?

What it checks
--------------
How many processes the kernel has killed for lack of memory, in the control group of this host's
ranks (memory.events, or memory.oom_control of version 1) and on the machine (/proc/vmstat): the
counters at the end, compared with those that check `memory` read at the start.

Why it matters
--------------
The kernel kills with SIGKILL and without a message: all that is left of the rank is `exit code -9`,
and the others wait for it until their time-out. This check reports on which host it happened, and
that memory was the reason.

How to fix
----------
docker run --memory, resources.limits.memory in Kubernetes, srun --mem; fewer ranks or DataLoader
workers on the host; a larger /dev/shm does not help, as it counts as memory.

When it is wrong
----------------
A kill elsewhere on the machine may concern another job or container: that is only a warning. A
kernel that does not count (before 4.13), or a group whose files cannot be read, shows nothing.

References
----------
Kernel documentation, admin-guide/cgroup-v2 (memory.events) and cgroup-v1/memory; proc(5)
(/proc/vmstat, oom_kill); NVIDIA/nccl issue 395.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    Level,
    Round,
    Severity,
    Turn,
    Untested,
    Where,
    look,
    shell,
)
from nccl_doctor.system.limits import MORE_MEMORY
from nccl_doctor.toolkit.cgroup import memory_kills

KILLED = Kind(
    "out-of-memory-kill",
    Layer.HOST,
    "The kernel killed a process of this host for lack of memory",
    "The process ends without an error message (exit code -9), and all others wait for it.",
    MORE_MEMORY,
)

_WHOLE_MACHINE = Fix(
    look(shell("dmesg -T | grep -i 'killed process'"), "which one and why"),
    alternatives=["end other programs on the host, or start fewer ranks there"],
)
_ROUND = "late"
_FIRST = "memory"


class MemoryKills(Check):
    """Reads the counters after all other checks, and compares them with those of the start."""

    name = "memory_kills"
    layer = Layer.SPEED
    kinds = (KILLED,)
    reads = ("memory",)
    level = Level.STANDARD
    together = True
    turn = Turn.LAST

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round, each host alone."""
        first = [cluster.first_on(host) for host in cluster.present_hosts]
        groups = tuple((rank.seat,) for rank in first if rank is not None)
        return (Round(_ROUND, groups, 10.0),) if groups else ()

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`oom_kills` of the control group and `machine_kills`: counts, or None."""
        kills = memory_kills(ctx.root)
        if set(kills.values()) == {None}:
            raise Untested("the kernel does not count such kills here")
        return kills

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """One finding for each host whose counters rose; unknown counters are ignored."""
        first = {rank.host.id: facts for rank, facts in cluster.facts(_FIRST)}
        for rank, late in cluster.facts(self.name, _ROUND):
            early = first.get(rank.host.id, {})
            rises = {name: _rise(early.get(name), late.get(name)) for name in late}
            here, there = rises.get("oom_kills", 0), rises.get("machine_kills", 0)
            if here or there:
                count = here or there
                many = "1 process" if count == 1 else f"{count} processes"
                place = "of the control group" if here else "of the machine"
                were = "was" if count == 1 else "were"
                yield Finding(
                    KILLED,
                    f"{many} {place} {were} killed while this examination ran",
                    Where(hosts=(rank.host.label,)),
                    {"before": {name: early.get(name) for name in late}, "after": dict(late)},
                    "" if here else _WHOLE_MACHINE,
                    severity=None if here else Severity.WARN,
                    confidence=Confidence.CERTAIN if here else Confidence.POSSIBLE,
                )


def _rise(before: int | None, after: int | None) -> int:
    return 0 if before is None or after is None else max(0, after - before)
