"""Does every rank have its own CPU at full speed, and do all hosts have the same kind of CPU?

What it checks
--------------
On every rank: the CPUs that it may run on (its affinity), those that the control group allows, and
the limit of CPU time of the group (cpu.max). All ranks of a host are added up. With NCCL also the
architecture and, on x86, the maker of the CPUs, from /proc/cpuinfo, compared with the other hosts.
For the CPUs that a rank may run on: the governor and the driver that set their clock (cpufreq in
sysfs), on their own and compared with the other hosts.

Why it matters
--------------
NCCL moves data over the network with its own threads, which spin; torch adds autograd, watchdog and
DataLoader workers. With less than one CPU for each rank they take turns: start-up looks like a
hang, and every step is slow. A wrong binding often puts all ranks of a host on one core.
NCCL chooses algorithms and protocols by the CPU: from 2.18 until 2.22 each rank uses its own CPU
for this, so jobs that mix Intel and AMD CPUs hang at some message sizes.
The governor powersave of a driver such as acpi-cpufreq keeps CPUs at their lowest clock at any
load: kernels are launched late, NCCL's threads move less data, and the GPUs wait.

How to fix
----------
srun --cpus-per-task=N (and --cpu-bind=cores), mpirun --bind-to none, no taskset around the
launcher; docker run --cpus or resources.limits.cpu: several CPUs for each rank.
NCCL_IGNORE_CPU_AFFINITY=1 lets NCCL's threads leave an inherited binding. cpu-differs: NCCL 2.22.3
or newer, or export NCCL_NET_OVERHEAD=1000 on every rank. cpu-clock-held-low: cpupower frequency-set
-g performance, and a tuned profile or firmware setting that keeps it.

When it is wrong
----------------
CPU-only jobs with more ranks than CPUs are common in tests: without GPUs, only a binding to fewer
CPUs than the group allows is a warning. A program that binds its ranks later by itself is not seen.
CPUs that differ do not hang every network and topology. There is no finding where
NCCL_NET_OVERHEAD, or NCCL_ALGO and NCCL_PROTO, have the same value on every rank. That part is not
validated on hardware.
With intel_pstate or amd_pstate in active mode, powersave is the usual governor and follows the
load: no finding there, nor with drivers that are not known here. Firmware may hold clocks down
without a trace in sysfs, and virtual machines show no clocks. Where the lowest allowed clock is
close to the highest, powersave does no harm. Different governors may be right for different hosts.
Not validated on hardware: tested with made-up folders of sysfs.

References
----------
sched_setaffinity(2); NCCL user guide (NCCL_IGNORE_CPU_AFFINITY); Kernel documentation,
admin-guide/cgroup-v2 (cpu.max, cpuset) and admin-guide/pm (cpufreq, intel_pstate, amd-pstate);
NVIDIA/nccl issue 1136, and src/init.cc of 2.22.3 (NCCL_TOPO_CPU_VENDOR_MIXED).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Figure,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Rank,
    Scope,
    Severity,
    Step,
    Where,
    export,
    look,
    number_range,
    place_of,
    shell,
)
from nccl_doctor.toolkit.cgroup import cgroup_limits
from nccl_doctor.toolkit.versions import disagreement, release

from .governors import holds_low, read_governors

CPU_LIMIT_LOW = Kind(
    code="cpu-limit-low",
    layer=Layer.HOST,
    title="Less than one CPU for each rank",
    why="The threads that move NCCL's data wait for a CPU: start-up looks like a hang, and every "
    "step is slow.",
    fix=Fix(
        Step(shell("# srun --cpus-per-task=NUMBER"), note="Slurm"),
        alternatives=[
            Fix(Step(shell("# mpirun --bind-to none"))),
            Fix(Step(shell("# docker run --cpus=NUMBER"))),
            "start fewer ranks",
            Fix(
                replace(
                    export(NCCL_IGNORE_CPU_AFFINITY="1"),
                    note="if the binding must stay: NCCL's threads leave it",
                )
            ),
        ],
    ),
    severity=Severity.WARN,
)


ONE_CPU = CPU_LIMIT_LOW.variant(
    title="A rank may use only one CPU",
    why="The threads that move NCCL's data share it with the rank itself: both wait for each other "
    "at every step.",
)
CPU_DIFFERS = Kind(
    code="cpu-differs",
    layer=Layer.HOST,
    title="Hosts have CPUs of different kinds",
    why="NCCL chooses algorithms and protocols by the CPU; before 2.22.3 each rank uses its "
    "own CPU for this, and ranks that choose differently wait for each other at some "
    "message sizes.",
    fix=Fix(export(NCCL_NET_OVERHEAD="1000"), alternatives=["upgrade to NCCL 2.22.3 or newer"]),
    severity=Severity.INFO,
    effects=(Effect.DIFFERENCE,),
)

ALL_AGREE = CPU_DIFFERS.variant(
    why="This release of NCCL makes the same choice on all ranks, so nothing hangs; hosts with the "
    "slower CPUs may be slower.",
    fix="nothing for NCCL; check group_speed shows whether a host is slower",
)
CPU_HELD_LOW = Kind(
    code="cpu-clock-held-low",
    layer=Layer.HOST,
    title="CPUs are held at their lowest clock",
    why="Kernels are launched late, and the threads that move NCCL's data are slow: the GPUs "
    "of all hosts wait.",
    fix=Fix(
        look(shell("tuned-adm active"), "what sets it at boot"),
        Step(shell("cpupower frequency-set -g performance"), note="as root, on the host itself"),
    ),
    severity=Severity.WARN,
)

GOVERNOR_DIFFERS = Kind(
    code="cpu-governor-differs",
    layer=Layer.HOST,
    title="Hosts use different rules for their CPU clocks",
    why="On otherwise equal hosts, those with the more power-saving rule are slower.",
    fix=Fix(
        Step(
            shell("cpupower frequency-set -g performance"),
            On.EVERY,
            note="as root, on the host itself",
        )
    ),
    severity=Severity.INFO,
    effects=(Effect.DIFFERENCE,),
)

_BY_VENDOR, _AGREES = (2, 18, 0), (2, 22, 3)
"""NCCL from the first uses the CPU maker of its own host; from the second those of all hosts."""
_PINS = (("NCCL_NET_OVERHEAD",), ("NCCL_ALGO", "NCCL_PROTO"))
_VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD", "HygonGenuine": "Hygon"}
_FIRST_LINES = 40


class CpusFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    affinity: str
    count: int
    allowed: int
    quota: float | None
    machine: str
    vendor: str | None
    clock: dict[str, Any] | None


class Cpus(Check):
    """CPUs of every rank, judged host by host."""

    name = "cpus"
    layer = Layer.HOST
    scope = Scope.RANK
    kinds = (CPU_LIMIT_LOW, CPU_DIFFERS, CPU_HELD_LOW, GOVERNOR_DIFFERS)
    reads = ("nccl_library",)

    def observe(self, ctx: Context) -> CpusFacts:
        """Read the CPUs of this rank and their limits.

        Returns: `affinity`: numbers of the CPUs, as text (`0–3, 8`), and `count` of them;
        `allowed`: CPUs of the control group; `quota`: CPU time in CPUs, or None; `machine`: the
        architecture, as uname has it; `vendor` of the CPUs, None where the kernel names none;
        `clock`: from `read_governors`.
        """
        mine = sorted(os.sched_getaffinity(0))
        limits = cgroup_limits(ctx.root)
        return {
            "affinity": number_range(mine),
            "count": len(mine),
            "allowed": limits["cpuset"] or os.cpu_count() or len(mine),
            "quota": limits["cpus"],
            "machine": os.uname().machine,
            "vendor": _vendor(ctx.root),
            "clock": read_governors(mine, ctx.root),
        }

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """The CPUs that the control group of each host allows."""
        for rank, facts in cluster.facts(self.name):
            quota = "" if facts["quota"] is None else f", CPU time of {facts['quota']:g} CPUs"
            said = f"{facts['allowed']}{quota}"
            yield Figure("CPUs allowed", said, Where(hosts=(rank.host.label,)))

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on the CPUs of all ranks of each host together; then on differences of hosts."""
        yield from self._few(cluster)
        yield from self._clocks(cluster)
        kinds = ((rank, _kind(facts)) for rank, facts in cluster.facts(self.name))
        story = disagreement(CPU_DIFFERS, "CPU", kinds, of_host=True)
        if story is not None and cluster.backend == "nccl" and not _is_pinned(cluster):
            versions = [
                release((facts["loaded"] or {}).get("version") or facts["built"])
                for _, facts in cluster.facts("nccl_library")
            ]
            hangs = any(_BY_VENDOR <= version < _AGREES for version in versions)
            yield story.finding.replaced(
                kind=ALL_AGREE if versions and not hangs else CPU_DIFFERS,
                fix="",
                severity=Severity.WARN if hangs else Severity.INFO,
                confidence=Confidence.LIKELY if hangs else Confidence.CERTAIN,
            )

    def _clocks(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on hosts whose CPUs are held low; then on different governors of the others."""
        by_host: dict[int, list[tuple[Rank, Mapping[str, Any]]]] = defaultdict(list)
        for rank, facts in cluster.facts(self.name):
            if facts.get("clock"):
                by_host[rank.host.id].append((rank, facts["clock"]))
        rules = []
        for seen in by_host.values():
            low = [clock for _, clock in seen if holds_low(clock)]
            if low:
                yield _held_low(seen[0][0], low)
            else:
                names = sorted({name for _, clock in seen for name in clock["governors"]})
                rules += [(rank, f"{clock['driver']} {'/'.join(names)}") for rank, clock in seen]
        story = disagreement(GOVERNOR_DIFFERS, "governor", rules, of_host=True)
        if story is not None:
            yield story.finding.replaced(fix="")

    def _few(self, cluster: Cluster) -> Iterator[Finding]:
        by_host: dict[int, list[tuple[Rank, Mapping[str, Any]]]] = defaultdict(list)
        for rank, facts in cluster.facts(self.name):
            by_host[rank.host.id].append((rank, facts))
        for seen in by_host.values():
            allowed = max(facts["allowed"] for _, facts in seen)
            bound = len(_cpus(frozenset(facts["affinity"] for _, facts in seen)))
            quotas = [facts["quota"] for _, facts in seen if facts["quota"] is not None]
            nccl = cluster.backend == "nccl"
            ranks = max(len(seen), *(_forked_with(rank) for rank, _ in seen))
            held = bound < min(allowed, ranks)  # a binding, not a lack of CPUs
            enough = min(bound, *quotas, ranks) == ranks
            if enough:
                # Enough for all, but NCCL's threads share the core of a rank that has only one.
                seen = [(r, f) for r, f in seen if nccl and f["count"] == 1 < allowed]
                ranks = len(seen)
            if not seen:
                continue
            bindings = list(dict.fromkeys(facts["affinity"] for _, facts in seen))
            many = f"{ranks} ranks" if ranks > 1 else "1 rank"
            limit = f", CPU time of {min(quotas):g} CPUs" if quotas else ""
            yield Finding(
                ONE_CPU if enough else CPU_LIMIT_LOW,
                f"{many} on CPU {' and '.join(bindings[:4])} of {allowed}{limit}",
                place_of(rank for rank, _ in seen),
                {"affinity": bindings[:16], "allowed": allowed, "quota": min(quotas, default=None)},
                severity=Severity.WARN if nccl or held else Severity.INFO,
                confidence=Confidence.LIKELY,
            )


def _forked_with(rank: Rank) -> int:
    """Ranks that our own launcher forks from this one, itself included, on the same CPUs: a host
    that could not sign in has not started them.
    """
    launch = rank.launch
    ours = launch is not None and launch.launcher == "nccl-doctor"
    return (launch.local_world_size or 1) if launch is not None and ours else 1


def _held_low(rank: Rank, low: Sequence[Mapping[str, Any]]) -> Finding:
    lists = frozenset(clock["governors"]["powersave"] for clock in low)
    cpus = number_range(sorted(_cpus(lists)))
    lowest, highest = low[0]["lowest_khz"], low[0]["highest_khz"]
    at = "at their lowest clock"
    if lowest and highest:
        at = f"at {lowest / 1e6:.1f} of {highest / 1e6:.1f} GHz"
    return Finding(
        CPU_HELD_LOW,
        f"governor powersave of {low[0]['driver']} holds CPU {cpus} {at}",
        Where(hosts=(rank.host.label,)),
        {"driver": low[0]["driver"], "cpus": cpus, "lowest_khz": lowest, "highest_khz": highest},
    )


def _is_pinned(cluster: Cluster) -> bool:
    """True if the environment sets the same choice on all ranks."""
    return any(
        all(len({rank.env.get(name) for rank in cluster.present}) == 1 for name in names)
        and all(rank.env.get(name) for rank in cluster.present for name in names)
        for names in _PINS
    )


def _kind(facts: Mapping[str, Any]) -> str | None:
    machine, vendor = facts.get("machine"), facts.get("vendor")
    return f"{vendor} {machine}" if machine and vendor else machine


def _vendor(root: Path) -> str | None:
    try:
        with (root / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in islice(file, _FIRST_LINES):
                name, _, value = line.partition(":")
                if name.strip() == "vendor_id":
                    return _VENDORS.get(value.strip(), value.strip())
    except OSError:
        pass
    return None


@lru_cache(maxsize=256)
def _cpus(lists: frozenset[str]) -> frozenset[int]:
    """All numbers of lists such as `0–3, 8`; most hosts have the same lists."""
    found: set[int] = set()
    for part in ", ".join(lists).split(", "):
        first, _, last = part.partition("–")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
