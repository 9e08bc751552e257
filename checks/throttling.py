"""Did the kernel hold processes back by a limit of CPU time or memory while this run went on?

What it checks
--------------
The counts of every control group of this host's ranks that has a limit of CPU time (cpu.max,
cpu.cfs_quota_us of version 1) or a `memory.high`, when all ranks have signed in, and again after
all other checks: periods in which the CPU time was used up, how long the group was stopped then,
and how long processes beyond memory.high waited (memory.pressure).

Why it matters
--------------
Neither limit ends a process, and neither leaves a message. A group that has used up its CPU time
stands still until the next period, usually 0.1 s: with all its ranks, the threads that move NCCL's
data, and whoever is to answer in time. Beyond memory.high the kernel lets each process that asks
for memory sleep. Both look like a hang, a slow host or a bad link, and all other ranks wait.

How to fix
----------
More CPU time: docker update --cpus=N CONTAINER, resources.limits.cpu in Kubernetes, systemctl
set-property --runtime UNIT CPUQuota=. Or fewer threads: OMP_NUM_THREADS, DataLoader workers; many
threads use up the time of a period in its first milliseconds. memory.high: srun --mem, MemoryHigh=
of a systemd unit, resources.limits.memory in Kubernetes (MemoryQoS).

When it is wrong
----------------
A limit that stopped nobody is no finding. Where what ran took less than three times as long, it is
only information. The examination uses less CPU and memory than the job, so that the job may be held
back although the examination was not. Groups above that of a container are not seen from inside. A
limit of a group that others use too may be used up by them.

References
----------
Kernel documentation, scheduler/sched-bwc (cpu.stat) and admin-guide/cgroup-v2 (cpu.max,
memory.high, memory.events); accounting/psi; systemd.resource-control(5).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from nccl_doctor.api import (
    BEFORE,
    Check,
    Cluster,
    Command,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    Level,
    Rank,
    Round,
    Severity,
    Skip,
    Step,
    Turn,
    Where,
    export,
    shell,
)
from nccl_doctor.system.limits import NO_HIGH
from nccl_doctor.toolkit.cgroup import cpu_throttling, memory_throttling
from nccl_doctor.toolkit.containers import container_of

CPU_THROTTLED = Kind(
    "cpu-throttled",
    Layer.HOST,
    "A limit of CPU time stops the ranks of a host",
    "When the time of a period is used up, all processes of the group stand still until the next "
    "one. It looks like a hang or a slow link, and all other ranks wait.",
    Fix(
        export(OMP_NUM_THREADS="1"),
        alternatives=[
            Fix(Step(shell("# docker update --cpus=NUMBER NAME"))),
            "more of resources.limits.cpu in Kubernetes",
            Fix(
                Step(
                    shell("# systemctl set-property --runtime NAME CPUQuota="),
                    note="NAME is the unit",
                )
            ),
        ],
    ),
    Severity.WARN,
    effects=(Effect.DELAYS,),
)
MEMORY_THROTTLED = Kind(
    "memory-throttled",
    Layer.HOST,
    "A limit of memory slows the ranks of a host down",
    "Beyond memory.high the kernel lets every process that asks for memory sleep, and kills none. "
    "It looks like a hang, and all other ranks wait.",
    NO_HIGH,
    Severity.WARN,
    effects=(Effect.DELAYS,),
)

_ROUND = "late"
_CPUS, _MEMORY = "cpus", "memory"
_SLOW_TIMES = 3.0
"""Times as long as without the limit: from here on, it may be why a deadline was missed, as with a
link of a third of the usual speed."""
_SEEN_TIMES = 1.2
_LEAST_PERIODS = 10
"""A few periods are the start of processes: a second of standing still, with the usual period."""
_WAITED_SHARE = 0.1
"""Share of the examination in which some process waited for memory."""
_MIB = 1 << 20
_GIB = 1 << 30
_CONTAINER_ID = re.compile(r"[0-9a-f]{12}")
"""The name that Docker gives to the host of a container: the beginning of its id."""
_OF_CONTAINERS = re.compile("docker|libpod|kubepods")
_UNIT = re.compile(r"[\w:.@\\-]+\.(?:service|scope|slice)")


class Throttling(Check):
    """Reads the counts before and after all other checks in which ranks work together."""

    name = "throttling"
    layer = Layer.SPEED
    kinds = (CPU_THROTTLED, MEMORY_THROTTLED)
    reads = ("cpus", "memory")
    level = Level.STANDARD
    together = True
    turn = Turn.LAST

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """Two rounds: every host with such a limit, by itself."""
        limited = {
            *(r.host.id for r, facts in cluster.facts(_CPUS) if facts.get("quota") is not None),
            *(r.host.id for r, facts in cluster.facts(_MEMORY) if facts.get("throttling")),
        }
        first = [cluster.first_on(host) for host in cluster.present_hosts if host.id in limited]
        groups = tuple((rank.seat,) for rank in first if rank is not None)
        if not groups:
            raise Skip("no limit that stops or slows processes, by checks cpus and memory")
        # Dozens of checks at once, before the sign-in, are not what a job does.
        return (Round(BEFORE, groups, 10.0), Round(_ROUND, groups, 10.0))

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`cpu`: from `cpu_throttling`; `memory`: from `memory_throttling`, read at `at_s`;
        `container`: its runtime, or empty.
        """
        return {
            "cpu": cpu_throttling(ctx.root),
            "memory": memory_throttling(ctx.root),
            "at_s": time.monotonic(),
            "container": container_of(ctx.root, ctx.env),
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on each host whose counts rose: of the group that was held back most."""
        cpus = {rank.seat: facts["count"] for rank, facts in cluster.facts(_CPUS)}
        first = {rank.host.id: facts for rank, facts in cluster.facts(self.name, BEFORE)}
        for rank, late in cluster.facts(self.name, _ROUND):
            early = first.get(rank.host.id)
            if early is not None:
                yield from _cpu(cluster, rank, early, late, cpus.get(rank.seat))
                yield from _memory(rank, early, late)


# CPU time -----------------------------------------------------------------------------------------


def _cpu(
    cluster: Cluster,
    rank: Rank,
    early: Mapping[str, Any],
    late: Mapping[str, Any],
    most: int | None,
) -> Iterator[Finding]:
    """One finding or none; `most`: the CPUs that the rank may run on."""
    pairs = _pairs(early["cpu"], late["cpu"])
    rises = [(each, _rise(before, each)) for before, each in pairs]
    shown = [(each, rise) for each, rise in rises if (rise["throttled"] or 0) >= _LEAST_PERIODS]
    if not shown:
        return
    limit, rise = max(shown, key=lambda item: _times(*item))
    times, cpus = _times(limit, rise), limit["quota_us"] / limit["period_us"]
    if times < _SEEN_TIMES:
        return
    ranks = len(cluster.ranks_on(rank.host))
    wanted = max(ranks, math.ceil(cpus * times))
    yield Finding(
        CPU_THROTTLED,
        f"limit of {cpus:g} CPUs: its CPU time was used up in {rise['throttled']} of "
        f"{rise['periods']} periods of {limit['period_us'] / 1000:g} ms, so what ran took about "
        f"{times:.2g} times as long",
        Where(hosts=(rank.host.label,)),
        {"limit": dict(limit), "rise": rise, "times": round(times, 2)},
        fix=_more_cpu(limit, min(wanted, most or wanted), rank, late),
        severity=None if times >= _SLOW_TIMES else Severity.INFO,
        # The same limit, by what it did: it is no second cause.
        explained_by="cpu-limit-low" if cpus < ranks else None,
    )


def _times(limit: Mapping[str, Any], rise: Mapping[str, int | None]) -> float:
    """The least factor by which the limit made the work take longer."""
    most = limit["quota_us"] * (rise["periods"] or 0)
    used = min(most, rise["used_us"] or most)
    return 1.0 + (rise["throttled_us"] or 0) / used if used > 0 else 1.0


def _more_cpu(limit: Mapping[str, Any], cpus: int, rank: Rank, late: Mapping[str, Any]) -> str:
    file, name = limit["file"], rank.host.label
    container, fewer = _holder(file, late["container"]), Fix(export(OMP_NUM_THREADS="1"))
    if container == "kubernetes":
        more = f'resources.limits.cpu: "{cpus}" in the manifest of the pod'
        return Fix(text=more, alternatives=[fewer])
    if container:
        known = _CONTAINER_ID.fullmatch(name) is not None
        step = Step(
            shell("{} update --cpus={} {}", container, cpus, name)
            if known
            else shell("# {} update --cpus={} NAME", container, cpus),
            note="on the machine of the container" + ("" if known else "; NAME is the container's"),
        )
        return Fix(step, alternatives=[fewer])
    two = file.endswith("cpu.max")
    old = f"{limit['quota_us']} {limit['period_us']}" if two else str(limit["quota_us"])
    step = _systemctl(file, shell("CPUQuota=")) or _written(file, "max" if two else "-1", old)
    return Fix(step, alternatives=[fewer])


# Memory -------------------------------------------------------------------------------------------


def _memory(rank: Rank, early: Mapping[str, Any], late: Mapping[str, Any]) -> Iterator[Finding]:
    for before, limit in _pairs(early["memory"], late["memory"]):
        rise = _rise(before, limit)
        if not rise["events"]:
            continue
        seconds, waited = late["at_s"] - early["at_s"], rise["stalled_us"]
        if waited is None and limit["used"] < limit["high"]:
            continue  # it may have been page cache, which costs nothing to give back
        if waited is not None and waited < _WAITED_SHARE * seconds * 1e6:
            continue
        told = f"went beyond it {rise['events']} times"
        if waited is not None:
            told = f"waited for memory in {waited / 1e6:.1f} of {seconds:.0f} s"
        yield Finding(
            MEMORY_THROTTLED,
            f"memory.high is {limit['high'] / _MIB:.0f} MiB, {limit['used'] / _MIB:.0f} MiB in "
            f"use: processes {told}",
            Where(hosts=(rank.host.label,)),
            {"limit": dict(limit), "rise": rise},
            fix=_more_memory(limit["file"], limit["high"], late["container"]),
            confidence=Confidence.CERTAIN if waited is not None else Confidence.LIKELY,
        )
        return


def _more_memory(file: str, high: int, container: str) -> str:
    twice, container = math.ceil(2 * high / _GIB), _holder(file, container)
    if "slurm" in file:
        return Fix(
            Step(shell("# srun --mem={}G", twice)), alternatives=["start fewer ranks on the host"]
        )
    if container == "kubernetes":
        return f"resources.limits.memory: {twice}Gi in the manifest of the pod"
    if container:
        return ""  # where the group is on the machine cannot be seen from here
    return Fix(_systemctl(file, shell("MemoryHigh=infinity")) or _written(file, "max", str(high)))


# Both ---------------------------------------------------------------------------------------------


def _pairs(
    early: Iterable[Mapping[str, Any]], late: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The limits of both times, the same file each."""
    known = {each["file"]: each for each in early}
    return ((known[each["file"]], each) for each in late if each["file"] in known)


def _rise(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int | None]:
    """The rise of each count; None where one of both is not known."""
    names = ("periods", "throttled", "throttled_us", "used_us", "events", "stalled_us")
    return {
        name: None if None in (before[name], after[name]) else max(0, after[name] - before[name])
        for name in names
        if name in after and name in before
    }


def _holder(file: str, container: str) -> str:
    """The runtime of the container, if the group is the container's and not one made inside."""
    outermost = len(PurePosixPath(file).parts) <= (1 if file.endswith((".max", ".high")) else 2)
    return container if outermost or _OF_CONTAINERS.search(file) else ""


def _written(file: str, new: str, old: str) -> Step:
    """Step that writes a limit of a control group."""
    path = f"/sys/fs/cgroup/{file}"
    return Step(
        shell("echo {} > {}", new, path), undo=shell("echo {} > {}", old, path), note="as root"
    )


def _systemctl(file: str, setting: Command) -> Step | None:
    """Step that changes a limit of a systemd unit; None if the group is none."""
    unit = PurePosixPath(file).parent.name
    if not _UNIT.fullmatch(unit):
        return None
    who = (
        shell("systemctl --user")
        if "/user@" in f"/{file}" and unit[:5] != "user@"
        else shell("systemctl")
    )
    root = "" if "--user" in who else "as root"
    return Step(shell("{} set-property --runtime {} {}", who, unit, setting), note=root)
