"""How fast is the network between hosts by itself, without NVLink?

What it checks
--------------
With NCCL and `--level full`: all-reduces of 1, 16 and 128 MiB between ranks of equal number on
neighbouring hosts, all ranks of a host at once, each pair in a group of its own. NVLink and shared
memory are off (NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1, NCCL_MNNVL_ENABLE=0), so that nothing but
the network is between two ranks. The bus bandwidth, as nccl-tests defines it, is shown as a figure:
of each pair of ranks, and of all those of two hosts together. Hosts that use InfiniBand or RoCE
then try each NIC by itself with the NIC of the same number on the neighbours; all NICs at once, if
there are enough ranks. Where both hosts have `ib_write_bw` (package perftest), it writes by RDMA,
one way and then the other, from memory of the host; else `pyverbs` does that where both have it
(rdma-core, for the Python that runs nccl-doctor; package python3-pyverbs); else NCCL, by a rank
whose GPU is beside the NIC (NCCL_IB_HCA names it alone). Hosts, paths and NICs are outliers as in
check `group_speed`: slow ones are measured again, beside hosts that were good, and only those that
are slow again are named. With two hosts the NICs are compared among themselves. NICs that are all
equally slow are compared with what their rate gives at the least, by a table. Inside a host
`group_speed` measures the other part, by NVLink or PCIe alone. The check runs after the collectives
of all ranks gave right results, and not where all hosts are in one NVLink domain (MNNVL), as NCCL
then uses no network.

Why it matters
--------------
In one all-reduce over all ranks, fast NVLinks hide a slow network while messages are small, and a
slow network hides NVLinks that do not work. The first ranks of two hosts use one NIC of each: what
`group_speed` measures between them shows nothing about the other seven.

How to fix
----------
bandwidth-low: for a host with its neighbours look at its NICs (`ibstat`, `nvidia-smi topo -m`),
their negotiated speed, PCIe slot and switch ports; between two hosts look at the path. rail-slow:
cable, switch port and PCIe slot of the NIC that is named. bandwidth-below-floor: `ib_write_bw`
between two hosts shows whether the fabric or NCCL is slow; then GPUDirect RDMA, PCIe slots, and for
RoCE priority flow control.

When it is wrong
----------------
On a machine that is busy with other work everything is slow at times; then the finding is only
information, and says so. With fewer than three hosts there is nothing to compare with: only the
figures are shown. Only equals are compared: as many ranks, the same model of GPU, NICs of the same
rate and as near. Racks joined by slower links are slow by design. Where the settings of NCCL leave
it one NIC for all ranks, the ranks share it. Four to ten rounds take a minute or two; if
`--timeout` leaves less, the check is unknown. At most four NICs are tried for each rank of a host.
A floor is about half of what healthy NICs were seen to reach, and less where the PCIe link of NIC
or GPU carries less. There is none for other rates than 100, 200 and 400 Gb/s, for other drivers
than mlx5, for virtual functions and in virtual machines (a cloud may limit them), with EFA,
plug-ins or sockets; with NCCL without GPUDirect RDMA, or where no GPU of a rank is beside the NIC;
and without the facts of checks `fabric_ports`, `gpu_affinity`, `gpu_direct` and `gpu_state`. Where
a setting slows NCCL down on purpose, the finding is only information and names it. A fabric with
less than half of its capacity between switches is below the floor by design. Another job on the
same NICs or switches makes them slow, too.
`ib_write_bw` opens a TCP port on every address of the host, for some seconds; `pyverbs` opens none.
`ib_write_bw` is used with IPv4 only, and has no result where a NIC carries less than some 8 Gb/s;
NCCL is used then.
Not validated on hardware: the measuring has run with gloo, with a program that speaks as
`ib_write_bw` does, and with a package that behaves as `pyverbs` does; the rules on made-up
clusters. The floors are from published measurements.

References
----------
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md; NCCL user guide, environment
variables (NCCL_P2P_DISABLE, NCCL_SHM_DISABLE, NCCL_IB_HCA, NCCL_NET); linux-rdma/perftest,
src/write_bw.c; linux-rdma/rdma-core, pyverbs; the sources in checks/network_speed/floors.toml.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Figure,
    Finding,
    Layer,
    Level,
    Round,
    Scope,
    Skip,
    Untested,
    Where,
)
from nccl_doctor.toolkit.fabric.hca import HCA
from nccl_doctor.toolkit.fabric.rails import rails_of
from nccl_doctor.toolkit.gpu.mnnvl import neighbours
from nccl_doctor.toolkit.groups.attempts import attempt_deadline
from nccl_doctor.toolkit.groups.forming import form_world
from nccl_doctor.toolkit.groups.stopwatch import Stopwatch
from nccl_doctor.toolkit.groups.timed import TIMED, slow_pairs, with_rates
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.nccl.slowing import BETWEEN, slowing
from nccl_doctor.toolkit.outliers import Edge, second_try
from nccl_doctor.toolkit.shared_kinds import BANDWIDTH_LOW, BELOW_FLOOR
from nccl_doctor.toolkit.units import size_text

from .floors import judge_floors, low_lanes
from .lanes import Lane, Lanes, quiet, rates_of, together
from .rails import RAIL_SLOW, RAILS, Rails
from .verbs import written_both_ways

NETWORK_ALONE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
"""Variables of NCCL with which only the network is left."""
_NETWORK, _AGAIN = "network", "again-network"
"""How the names of rounds begin."""
_SIZES = (1 << 20, 1 << 24, 1 << 27)
_BUDGET_S = 0.3
"""Seconds for the repetitions of the largest size."""
_LIMIT_S = 6.0
"""Seconds for all sizes of one group."""


class NetworkSpeed(Check):
    """All-reduce between hosts with everything but the network turned off."""

    name = "network_speed"
    layer = Layer.SPEED
    scope = Scope.RANK
    cost = "minutes"
    kinds = (BANDWIDTH_LOW, RAIL_SLOW, BELOW_FLOOR)
    reads = (
        "backend_device",
        "clock",
        "collectives",
        "fabric_ports",
        "firewall",
        "gpu_affinity",
        "gpu_direct",
        "gpu_state",
        "gpu_work",
        "loss",
        "mnnvl",
        "rails",
        "rdma",
        "uplink",
    )
    level = Level.FULL
    together = True
    forms_groups = True
    needs = tuple(layer for layer in Layer if layer is not Layer.SPEED)

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """Every host with its neighbours, with all NICs and with each alone; then the outliers
        again with good partners.

        Raises:
            Skip: the backend is not NCCL, or NCCL uses no network in this job.
        """
        if cluster.backend != "nccl":
            raise Skip(f"the backend is {cluster.backend}")
        lanes = Lanes(cluster, self.name)
        if not lanes.schedule():
            raise Skip("the job has one host, and so no network")
        if any(len(hosts) == len(cluster.present_hosts) for hosts in neighbours(cluster).values()):
            raise Skip("all hosts are in one NVLink domain: NCCL uses no network between them")
        rails = Rails(cluster, lanes)
        none: dict[str, int] = {}
        planned = {
            f"{_NETWORK}-{number}": (lanes.groups(edges), none)
            for number, edges in enumerate(lanes.schedule())
        } | rails.first_rounds()
        if lanes.were_held(planned):
            first = together(rails.pairs_alike(lanes.measured(_NETWORK)))
            for number, edges in enumerate(second_try(first)):
                planned[f"{_AGAIN}-{number}"] = (lanes.groups(edges), none)
            planned |= rails.second_rounds(low_lanes(cluster, rails))
        deadline_s = attempt_deadline(cluster)
        return [
            Round(name, tuple(groups), deadline_s, {"rails": taken} if taken else {})
            for name, (groups, taken) in planned.items()
        ]

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Form the group with the network alone, or with one NIC of it, and time it; through one
        NIC time RDMA writes instead, where both ends can.

        Returns: `all_reduce` as `Stopwatch.all_reduce`, with `algbw` and `busbw` of each size;
        `slowing`: the settings of `slowing`; of a round with one NIC, `nic`, and `rail`: its number
        in NCCL's order; of RDMA writes `by`: what wrote, and `gbps`: of each direction.

        Raises:
            Untested: the NIC is gone.
        """
        settings = nccl_settings(ctx.env, root=ctx.root)
        facts: dict[str, Any] = {"slowing": slowing(settings, BETWEEN)}
        os.environ.update(NETWORK_ALONE)
        if "rails" in ctx.params:
            rail = ctx.params["rails"][str(ctx.launch.local_rank)]
            rails = rails_of(settings, ctx.root)["rails"]
            if rail >= len(rails):
                raise Untested("the NICs of this host are not those that check rails saw")
            facts |= {"rail": rail, "nic": rails[rail]["name"]}
            if written := written_both_ways(ctx, rails[rail]["name"], settings):
                seen = {**{name: written.pop(name) for name in ("by", "gbps")}, "slowing": {}}
                return {TIMED: with_rates([written], len(ctx.group)), **facts, **seen}
            # NCCL_NET, so that it fails where it cannot use this NIC, and takes no other network.
            os.environ.update({HCA: f"={rails[rail]['name']}", "NCCL_NET": "IB"})
        device = form_world(ctx)
        watch = Stopwatch(ctx.breadcrumb, device, _BUDGET_S)
        timed = watch.all_reduce(ctx.round, _SIZES, min(_LIMIT_S, ctx.left() / 2))
        return {TIMED: with_rates(timed, len(ctx.group)), **facts}

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """Bus bandwidth of each pair of ranks, and of all those of two hosts together."""
        lanes = Lanes(cluster, self.name)
        for edge, here in lanes.measured(_NETWORK).items():
            where = lanes.where(sorted(edge, key=lanes.labels.__getitem__))
            size = min(lane.bytes for lane in here.values())
            for local, lane in sorted(here.items()):
                what = f"all-reduce over the network alone, local rank {local}"
                yield _figure(f"{what}, {size_text(lane.bytes)}", where, [lane])
            what = f"all-reduce over the network alone, {len(here)} pairs of ranks at once"
            yield _figure(f"{what}, {size_text(size)}", where, list(here.values()))
        for seen in Rails(cluster, lanes).measured(RAILS).values():
            for edge, (lane, nics, _, by) in seen.items():
                where = lanes.where(sorted(edge, key=lanes.labels.__getitem__))
                where |= Where(interfaces=tuple(sorted(set(nics.values()))))
                what = f"all-reduce through one NIC alone, {size_text(lane.bytes)}"
                what = f"RDMA writes through one NIC alone, {by}" if by else what
                yield _figure(what, where, [lane])

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on NICs, then on hosts and the paths between them, that were slow twice; and on
        NICs that are slower than any such NIC should be.
        """
        if not cluster.complete or not cluster.evidence(self.name):
            return
        lanes = Lanes(cluster, self.name)
        rails = Rails(cluster, lanes)
        slow = list(rails.judge())
        yield from slow
        places = [set(lanes.hosts_in(found.where)) for found in slow]
        for found in _slow_hosts(lanes, rails):
            same = any(set(lanes.hosts_in(found.where)) == place for place in places)
            yield found.replaced(explained_by=RAIL_SLOW.code if same else None)
        blamed = {
            (host, nic)
            for found in slow
            for host in lanes.hosts_in(found.where)
            for nic in found.where.interfaces
        }
        yield from judge_floors(cluster, self.name, rails, blamed)


def _figure(what: str, where: Any, lanes: Sequence[Lane]) -> Figure:
    rate = round(sum(lane.busbw for lane in lanes) / 1e9, 5)
    counts = not any(lane.was_busy for lane in lanes)
    return Figure(what, rate, where, "GB/s", "higher", 0.0, counts)


# Judging ------------------------------------------------------------------------------------------


def _slow_hosts(lanes: Lanes, rails: Rails) -> Iterator[Finding]:
    """Findings on hosts and paths that are slow with all NICs, among pairs of equal hosts."""
    repeated = lanes.measured(_AGAIN)
    first = together(rails.pairs_alike(lanes.measured(_NETWORK)))
    again = together(repeated)
    for slow in slow_pairs(first, again, lambda seconds: 1 / seconds):
        found = Finding(
            BANDWIDTH_LOW,
            f"over the network alone, all ranks at once, {slow.words}",
            lanes.where(slow.ends),
            {"pairs": list(_named(lanes, slow.pairs, first, again))},
            confidence=Confidence.LIKELY,
        )
        yield quiet(
            found, [lane for edge in slow.pairs for lane in repeated.get(edge, {}).values()]
        )


def _named(lanes: Lanes, edges: Sequence[Edge], *tries: Mapping[Edge, float]) -> Iterator[Any]:
    for edge, rates in zip(edges, rates_of(edges, *tries), strict=True):
        yield {"hosts": [lanes.labels[end] for end in edge], "busbw": rates}
