"""Did the kernel kill a process for lack of memory while this examination ran?

What it checks
--------------
How many processes the kernel has killed for lack of memory, in the control group of this host's
ranks (memory.events, or memory.oom_control of version 1) and on the machine (/proc/vmstat), at the
end, against what check `memory` read at the start.

Why it matters
--------------
The kernel kills with SIGKILL and tells nobody: of the rank only `exit code -9` is left, and the
others wait for it until their time-out. Here it is said where it happened, and that it was memory.

How to fix
----------
docker run --memory, resources.limits.memory in Kubernetes, srun --mem; fewer ranks or DataLoader
workers on the host; more room in /dev/shm does not help, as it counts as memory.

When it is wrong
----------------
A kill elsewhere on the machine may concern another job or container: that is a warning only. A
kernel that does not count (before 4.13), or a group whose files cannot be read, shows nothing.

References
----------
Kernel documentation, admin-guide/cgroup-v2 (memory.events) and cgroup-v1/memory; proc(5)
(/proc/vmstat, oom_kill); NVIDIA/nccl issue 395.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Kind,
    Layer,
    Level,
    Round,
    Severity,
    Untested,
    Where,
)
from nccl_doctor.toolkit.cgroup import memory_kills

KILLED = Kind(
    "out-of-memory-kill",
    Layer.HOST,
    "The kernel killed a process of this host for lack of memory",
    "It is gone without a word (exit code -9), and all others wait for it.",
    "docker run --memory=…, resources.limits.memory, srun --mem=…, or fewer ranks on the host",
)

_ROUND = "late"
_FIRST = "memory"


class MemoryKills(Check):
    """Read the counts when all else is done, and compare with those of the start."""

    name = "memory_kills"
    layer = Layer.SPEED
    kinds = (KILLED,)
    level = Level.STANDARD
    together = True
    root: ClassVar[Path] = Path("/")

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """Every host by itself."""
        first = [cluster.first_on(host) for host in cluster.present_hosts]
        groups = tuple((rank.seat,) for rank in first if rank is not None)
        return (Round(_ROUND, groups, 10.0),) if groups else ()

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`oom_kills` of the control group and `machine_kills`: counts, or None."""
        kills = memory_kills(self.root)
        if set(kills.values()) == {None}:
            raise Untested("the kernel shows no count of such kills here")
        return kills

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Counts that rose; what is not known at both times says nothing."""
        first = {rank.host.id: facts for rank, facts in cluster.facts(_FIRST)}
        for rank, late in cluster.facts(self.name, _ROUND):
            early = first.get(rank.host.id, {})
            rises = {name: _rise(early.get(name), late.get(name)) for name in late}
            here, there = rises.get("oom_kills", 0), rises.get("machine_kills", 0)
            if here or there:
                many = (
                    "1 process was" if (here or there) == 1 else f"{here or there} processes were"
                )
                place = "of the control group" if here else "of the machine"
                yield Finding(
                    KILLED,
                    f"{many} killed {place}, while this examination ran",
                    Where(hosts=(rank.host.label,)),
                    {"before": {name: early.get(name) for name in late}, "after": dict(late)},
                    severity=None if here else Severity.WARN,
                    confidence=Confidence.CERTAIN if here else Confidence.POSSIBLE,
                )


def _rise(before: int | None, after: int | None) -> int:
    return 0 if before is None or after is None else max(0, after - before)
