"""How fast are collectives in each kind of group, and which rank or host slows the others down?

What it checks
--------------
The time of an all-reduce, for several sizes, over all ranks, inside each host (with gloo only of
three hosts or more, and with `--level full`), between neighbouring hosts (with gloo only where
check `links` did not time those links, and with `--level full`) and, with `--mesh`, in the groups
of each dimension; as latency, algorithm bandwidth and bus bandwidth (2 (n-1)/n times as much, as
nccl-tests defines it). Separately, and never added to it, the time that each rank takes to compute
a fixed product of matrices. Outliers by the median absolute deviation are measured again, beside
ranks, hosts and partners that were good; only those that are outliers again are blamed. With NCCL
and `--level full`, an all-reduce of 128 MiB inside each host is compared with what its GPUs give at
the least where NVLink joins them, by a table of models, so that hosts that are all equally slow are
found, too. Where the GPUs of a host are Hopper or later in an NVLink fabric that is set up, the
driver has multicast and NCCL is 2.24 or newer, it is then timed once more inside each host by
NVLink SHARP alone (NVLS, NCCL_ALGO=allreduce:nvls), and hosts are compared: one where it fails
while it works inside the others is found, too. The network without NVLink is measured by check
`network_speed`. The check runs after the collectives of all ranks gave right results.

Why it matters
--------------
All ranks of a synchronous job wait for the slowest in every step, so one throttled GPU, one slow
cable or one busy host costs the whole cluster that share of its time, and no library reports it.

How to fix
----------
rank-slow: look at the clock, temperature and power limit of that GPU or core, and at other work on
it. bandwidth-low: inside a host look at PCIe and NVLink (`nvidia-smi topo -m`) and at NUMA binding;
for a host with its neighbours look at its NIC, link speed and switch port; between two hosts look
at the path; where only NVLink SHARP is slow or fails, at the fabric manager. bandwidth-below-floor:
NCCL_DEBUG=INFO shows whether its channels use P2P or go through host memory (SHM) or the network
(NET); look at `nvidia-smi nvlink -s`, at the fabric manager, and at what NCCL_TOPO_FILE names.

When it is wrong
----------------
On a machine that is busy with other work everything is slow at times; where that may be the reason,
the finding is only information, and says so. With fewer than three hosts, or ranks, there is
nothing to compare with. Racks joined by slower links make pairs across racks slow by design.
A floor is about half of what healthy hosts were seen to reach, so it shows large faults only: P2P
or NVLink that is not used. There is none for GPUs on PCIe or joined by bridges, for models that are
not in the table, for parts of a GPU (MIG, vGPU), for a GPU that ranks share, for hosts with several
models, or where nvidia-ml-py does not answer. Where a setting slows NCCL down on purpose, such as
NCCL_MAX_CTAS, the finding is only information and names it. Another job on the same GPUs makes them
slow, too. NVLink SHARP is not tried where a setting slows NCCL down or turns it off, with fewer
than three ranks in a host, or where an all-reduce inside the host failed; where it works in no
host, as in some virtual machines, nothing is said. A tuner plug-in may take another way all the
same.
Not validated on hardware: gloo only so far; the floors are from published measurements, the rules
about NVLink SHARP from the sources of NCCL 2.19 to 2.30 and made-up clusters.

References
----------
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md; the sources in
checks/group_speed/floors.toml.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Evidence,
    Figure,
    Finding,
    Fix,
    Kind,
    Layer,
    Level,
    Round,
    Scope,
    Setup,
    Severity,
    Where,
    look,
    shell,
)
from nccl_doctor.toolkit.gpu.devices import own_device
from nccl_doctor.toolkit.groups.attempts import attempt_deadline
from nccl_doctor.toolkit.groups.doing import last_line
from nccl_doctor.toolkit.groups.forming import form_world
from nccl_doctor.toolkit.groups.stopwatch import Stopwatch
from nccl_doctor.toolkit.groups.timed import TIMED, slow_pairs, with_rates
from nccl_doctor.toolkit.hosts import between
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.nccl.slowing import INSIDE, NVLS_OFF, slowing
from nccl_doctor.toolkit.outliers import bus_bandwidth, slow_ones
from nccl_doctor.toolkit.shared_kinds import BANDWIDTH_LOW, BELOW_FLOOR
from nccl_doctor.toolkit.units import rate_text

from .figures import speed_figures, world_speed
from .floors import below_floor, judge_floors
from .measured import (
    AGAIN_LOW,
    AGAIN_NVLS,
    AGAIN_PAIRS,
    HOSTS,
    NVLS,
    PAIRS,
    Measured,
    measured,
    stand_out_again,
)
from .nvls import (
    BY_NVLS,
    NVLS_ALONE,
    NVLS_FIX,
    NVLS_SIZES,
    alike,
    judge_failures,
    nvls_again,
    nvls_hosts,
)

RANK_SLOW = Kind(
    "rank-slow",
    Layer.SPEED,
    "A rank computes much more slowly than the others",
    "every step waits for the slowest rank: the whole job runs at its speed",
    Fix(
        look(shell("nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE")),
        look(shell("top -b -n 1 | head -20"), "other work on its cores"),
    ),
    Severity.WARN,
    effects=(Effect.DELAYS,),
)

_SIZES = {  # bytes
    Level.STANDARD: (8, 65_536, 4_194_304),
    Level.FULL: tuple(8 << (3 * step) for step in range(9)),  # 8 B to 128 MiB
}
_BUDGET_S = {Level.STANDARD: 0.04, Level.FULL: 1.0}
"""Seconds for the repetitions of the largest size."""
_COMPARED = 3
"""Hosts of which one can be slower than the others."""
_LIMIT_S = {Level.STANDARD: 1.5, Level.FULL: 15.0}
"""Seconds for all sizes of one group."""


def _compares_hosts(cluster: Cluster, hosts: int) -> bool:
    """True if the groups inside of hosts are timed: not over gloo, with nothing to compare with."""
    least = 2 if cluster.backend == "nccl" or cluster.level is Level.FULL else _COMPARED
    return hosts >= least


class GroupSpeed(Check):
    """All-reduce and computing, timed separately, compared and confirmed."""

    name = "group_speed"
    layer = Layer.SPEED
    scope = Scope.RANK
    cost = "seconds"
    kinds = (RANK_SLOW, BANDWIDTH_LOW, BELOW_FLOOR)
    reads = (
        "backend_device", "clock", "collectives", "firewall",
        "gpu_state", "gpu_work", "links", "loss", "uplink",
    )  # fmt: skip
    level = Level.STANDARD
    together = True
    forms_groups = True
    needs = tuple(layer for layer in Layer if layer is not Layer.SPEED)

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """The rounds: each kind of group once; then the outliers again, with controls."""
        deadline_s = attempt_deadline(cluster)
        seen = measured(cluster, self.name)
        world = tuple(rank.seat for rank in cluster.present)
        planned: dict[str, list[tuple[int, ...]]] = {"world": [world]}
        inside = [seats for seats in seen.hosts.values() if len(seats) > 1]
        if inside and _compares_hosts(cluster, len(seen.hosts)):
            planned[HOSTS] = inside
        planned |= seen.ring_of_hosts()
        planned |= seen.mesh_groups()
        planned |= seen.doubtful()
        if able := nvls_hosts(seen):
            planned[NVLS] = [seen.hosts[host] for host in able]
            if odd := nvls_again(seen):
                planned[AGAIN_NVLS] = odd
        low = [seen.hosts[host] for host in below_floor(seen, tries=1)]
        if low := [seats for seats in low if seats not in planned.get("again-hosts", ())]:
            planned[AGAIN_LOW] = low
        planned = seen.without_losses(planned)
        return [
            Round(name, tuple(tuple(sorted(g, key=seen.order)) for g in groups), deadline_s)
            for name, groups in planned.items()
        ]

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Compute, then form the group and time it.

        Returns: `compute` as `Stopwatch.computing`, and `all_reduce` as `Stopwatch.all_reduce`,
        with `algbw` and `busbw` of each size in bytes per second; with NCCL also `slowing` and
        `nvls_off`: the settings of `INSIDE` and of `NVLS_OFF`; `failed`: the error of NCCL where it
        was to use NVLink SHARP alone, and did not.
        """
        import torch

        device = torch.device("cpu")
        facts: dict[str, Any] = {}
        if ctx.backend == "nccl":
            ctx.breadcrumb("set device")
            device = own_device(ctx.launch.local_rank)
            settings = nccl_settings(ctx.env, root=ctx.root)
            facts["slowing"] = slowing(settings, INSIDE)
            facts["nvls_off"] = slowing(settings, NVLS_OFF)
        sizes, by_nvls = _SIZES[ctx.level], ctx.round in (NVLS, AGAIN_NVLS)
        if by_nvls:
            os.environ.update(NVLS_ALONE)
            sizes = NVLS_SIZES
        watch = Stopwatch(ctx.breadcrumb, device, _BUDGET_S[ctx.level])
        if ctx.round in ("world", "again-ranks"):
            facts["compute"] = watch.computing()
        if len(ctx.group) > 1:
            form_world(ctx)
            limit_s = min(_LIMIT_S[ctx.level], ctx.left() / 2)
            try:
                timed = watch.all_reduce(ctx.round, sizes, limit_s)
            except RuntimeError as error:
                if not by_nvls:
                    raise
                return {**facts, "failed": last_line(str(error))}
            facts[TIMED] = with_rates(timed, len(ctx.group))
        return facts

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """Latency or bus bandwidth of each size in each group, and the time to compute."""
        return speed_figures(cluster, self.name)

    def sections(self, cluster: Cluster) -> Iterator[Setup]:
        """Latency and bus bandwidth of the group of all ranks."""
        yield from world_speed(cluster, self.name)

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on ranks, hosts and pairs that were outliers twice."""
        if cluster.complete:
            seen = measured(cluster, self.name)
            yield from _slow_ranks(seen)
            slow = list(_slow_hosts(seen, (HOSTS, "again-hosts"), seen.equals))
            yield from slow
            named = {name for found in slow for name in found.where.hosts}
            yield from judge_floors(seen, [h for h, name in seen.labels.items() if name in named])
            yield from judge_failures(seen)
            nvls = _slow_hosts(seen, (NVLS, AGAIN_NVLS), lambda each: alike(seen, each), BY_NVLS)
            for found in nvls:
                if named.isdisjoint(found.where.hosts):
                    yield found.replaced(fix=NVLS_FIX)
            yield from _slow_pairs(seen)


# Judging ------------------------------------------------------------------------------------------


def _slow_ranks(seen: Measured) -> Iterator[Finding]:
    first, again = seen.computing("world"), seen.computing("again-ranks")
    for seat in stand_out_again(slow_ones(first), first, again):
        usual = statistics.median(first.values())
        words = f"{again[seat] * 1e3:.3g} ms to compute what takes the others {usual * 1e3:.3g} ms"
        evidence = {"seconds": {"here": [first[seat], again[seat]], "median": usual}}
        where = Evidence.rank_place(seen.ranks[seat])
        on_gpus = seen.cluster.backend == "nccl"
        fix = "" if on_gpus else "look at other work on its cores: top, and limits of CPU time"
        found = Finding(RANK_SLOW, words, where, evidence, fix)
        yield _weighed(seen, found, [seat], again[seat] / usual)


def _slow_hosts(
    seen: Measured,
    rounds: tuple[str, str],
    equals: Callable[[Mapping[int, float]], Sequence[Mapping[int, float]]],
    how: str = "",
) -> Iterator[Finding]:
    """Findings on hosts that were slow in both rounds; `equals` gives those that are compared."""
    first, again = (seen.inside(name, rounds[0]) for name in rounds)
    size = seen.size(rounds[0])
    for equal in equals(first):
        for host in stand_out_again(slow_ones(equal), equal, again):
            seats = seen.hosts[host]
            rate = bus_bandwidth(size, again[host], len(seats))
            median = statistics.median(equal.values())
            usual = bus_bandwidth(size, median, len(seats))
            words = (
                f"{how}inside the host {rate_text(rate)} bus bandwidth, inside others "
                f"{rate_text(usual)}"
            )
            where = Where(hosts=(seen.labels[host],))
            evidence = {"seconds": [first[host], again[host]]}
            found = Finding(BANDWIDTH_LOW, words, where, evidence)
            yield _weighed(seen, found, seats, again[host] / median)


def _slow_pairs(seen: Measured) -> Iterator[Finding]:
    first, again = seen.pairs(PAIRS), seen.pairs(AGAIN_PAIRS)
    size = seen.size(PAIRS)
    for slow in slow_pairs(first, again, lambda seconds: bus_bandwidth(size, seconds, 2)):
        where = between([seen.labels[seen.lead_of[end]] for end in slow.ends])
        evidence = {"pairs": _named(seen, slow.pairs, first, again)}
        found = Finding(BANDWIDTH_LOW, slow.words, where, evidence)
        yield _weighed(seen, found, slow.ends, slow.times)


def _weighed(seen: Measured, found: Finding, seats: Sequence[int], times: float) -> Finding:
    """The finding on an outlier, which took so many times as long as usual; only information where
    that may come from other work of the CPU.
    """
    if not seen.is_for_lack_of_cpu(seats, times):
        return found.replaced(confidence=Confidence.LIKELY)
    return found.replaced(
        message=found.message + "; measured while the CPU was busy with other work",
        severity=Severity.INFO,
        confidence=Confidence.POSSIBLE,
    )


def _named(
    seen: Measured,
    pairs: Sequence[tuple[int, int]],
    first: Mapping[tuple[int, int], float],
    again: Mapping[tuple[int, int], float],
) -> list[dict[str, Any]]:
    return [
        {
            "hosts": [seen.labels[seen.lead_of[end]] for end in pair],
            "seconds": [first[pair], again.get(pair)],
        }
        for pair in pairs
    ]
