"""Does every rank have a CPU of its own?

What it checks
--------------
On every rank, the CPUs that it may run on (its affinity), those that the control group allows, and
the share of CPU time that the group is limited to (cpu.max). All ranks of a host are added up.

Why it matters
--------------
NCCL moves data over the network with threads of its own, that spin; torch adds autograd, watchdog
and DataLoader workers. With less than one CPU for each rank they take turns: start-up looks like a
hang, and every step is slow. A wrong binding often puts all ranks of a host on one core.

How to fix
----------
srun --cpus-per-task=N (and --cpu-bind=cores), mpirun --bind-to none, no taskset around the
launcher; docker run --cpus or resources.limits.cpu: several for each rank.
NCCL_IGNORE_CPU_AFFINITY=1 lets NCCL's threads leave a binding that was inherited.

When it is wrong
----------------
Jobs on CPUs with more ranks than CPUs are common in tests: without GPUs only a binding to fewer
CPUs than the group allows is a warning. A program that binds its ranks itself, later, is not seen.

References
----------
sched_setaffinity(2); NCCL user guide (NCCL_IGNORE_CPU_AFFINITY); Kernel documentation,
admin-guide/cgroup-v2 (cpu.max, cpuset).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Figure,
    Finding,
    Kind,
    Layer,
    Rank,
    Scope,
    Severity,
    Where,
    cgroup_limits,
    number_range,
    place_of,
)

CPU_LIMIT_LOW = Kind(
    code="cpu-limit-low",
    layer=Layer.HOST,
    title="Less than one CPU for each rank",
    why="The threads that move NCCL's data wait for a CPU: start-up looks like a hang, and every "
    "step is slow.",
    fix="srun --cpus-per-task=N, mpirun --bind-to none, docker run --cpus=N, or fewer ranks",
    severity=Severity.WARN,
)


class Cpus(Check):
    """CPUs of every rank, judged host by host."""

    name = "cpus"
    layer = Layer.HOST
    scope = Scope.RANK
    kinds = (CPU_LIMIT_LOW,)
    root: ClassVar[Path] = Path("/")

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`affinity`: numbers of the CPUs, as text (`0–3, 8`), and `count` of them; `allowed`: how
        many there are for the control group; `quota`: CPUs' worth of time, or None.
        """
        mine = sorted(os.sched_getaffinity(0))
        limits = cgroup_limits(self.root)
        return {
            "affinity": number_range(mine),
            "count": len(mine),
            "allowed": limits["cpuset"] or os.cpu_count() or len(mine),
            "quota": limits["cpus"],
        }

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """What the control group allows to each host."""
        for rank, facts in cluster.facts(self.name):
            quota = "" if facts["quota"] is None else f", {facts['quota']:g} CPUs' worth of time"
            said = f"{facts['allowed']}{quota}"
            yield Figure("CPUs allowed", said, Where(hosts=(rank.host.label,)))

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Of each host, the CPUs of all its ranks together."""
        by_host: dict[int, list[tuple[Rank, Mapping[str, Any]]]] = defaultdict(list)
        for rank, facts in cluster.facts(self.name):
            by_host[rank.host.id].append((rank, facts))
        for seen in by_host.values():
            allowed = max(facts["allowed"] for _, facts in seen)
            bound = len(set().union(*(_cpus(facts["affinity"]) for _, facts in seen)))
            quotas = [facts["quota"] for _, facts in seen if facts["quota"] is not None]
            nccl = cluster.backend == "nccl"
            held = bound < min(allowed, len(seen))  # by a binding, not for want of CPUs
            if min(bound, *quotas, len(seen)) == len(seen):
                # Enough for all, but a rank with one core has NCCL's threads on it as well.
                seen = [(r, f) for r, f in seen if nccl and f["count"] == 1 < allowed]
            if not seen:
                continue
            bindings = list(dict.fromkeys(facts["affinity"] for _, facts in seen))
            many = f"{len(seen)} ranks" if len(seen) > 1 else "1 rank"
            limit = f", CPU time for {min(quotas):g}" if quotas else ""
            yield Finding(
                CPU_LIMIT_LOW,
                f"{many} on CPU {' and '.join(bindings[:4])} of {allowed}{limit}",
                place_of(rank for rank, _ in seen),
                {"affinity": bindings[:16], "allowed": allowed, "quota": min(quotas, default=None)},
                severity=Severity.WARN if nccl or held else Severity.INFO,
                confidence=Confidence.LIKELY,
            )


def _cpus(text: str) -> set[int]:
    """The numbers of `0–3, 8`."""
    found: set[int] = set()
    for part in text.split(", "):
        first, _, last = part.partition("–")
        found |= set(range(int(first), int(last or first) + 1))
    return found
