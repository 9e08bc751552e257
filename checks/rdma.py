"""Do all hosts have the same InfiniBand or RoCE ports, and are they up?

What it checks
--------------
The RDMA ports that the kernel of each host shows (/sys/class/infiniband), their state, and by which
road NCCL would carry data there: verbs, sockets or a plug-in, from NCCL_IB_DISABLE, NCCL_IB_HCA and
NCCL_NET in the environment and NCCL's configuration files. Hosts are compared; nothing is sent.
What NCCL would probably take on each host is shown as a table (`-v`). EFA counts as a road of its
own, which needs a plug-in: check `net_plugin` says whether it loads.

Why it matters
--------------
NCCL chooses on each host by itself. A host without an active port falls back to sockets without a
word, and the hosts that use verbs wait for it. A port that is down on one host alone is a rail that
its peers lack.

How to fix
----------
Bring the port up (cable, switch, subnet manager: `ibstat`), or take the same road everywhere:
export NCCL_IB_DISABLE=1 on every host, at a great loss of speed.

When it is wrong
----------------
A port that is down on every host, or on most, is taken for one that nobody uses. Devices are
compared by name; hosts that name them differently are not. Whether
ports lie in one fabric, check `fabric_ports` asks. A plug-in that loads may still refuse.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
NCCL user guide, environment variables (NCCL_IB_DISABLE, NCCL_IB_HCA, NCCL_NET); kernel
documentation, ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
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
    Severity,
    Skip,
    Where,
    nccl_settings,
    odd_ones_out,
    rdma_admits,
    rdma_ports,
    road_by_ports,
    speaks_verbs,
    table_of_picks,
)

RDMA_MIXED = Kind(
    code="rdma-mixed",
    layer=Layer.ROUTE,
    title="Some hosts would use InfiniBand, RoCE or EFA, and others not",
    why="NCCL chooses on each host by itself: two hosts that chose differently do not connect, and "
    "the first communicator fails or hangs.",
    fix="bring the RDMA port of the odd host up (ibstat), or on every host: export "
    "NCCL_IB_DISABLE=1",
)
RDMA_PORT_DOWN = Kind(
    code="rdma-port-down",
    layer=Layer.ROUTE,
    title="An RDMA port is down here that is up on the other hosts",
    why="NCCL leaves the port out: the GPUs beside it share what is left, or rails do not match.",
    fix="ibstat; check the cable, the switch port and the subnet manager",
    severity=Severity.WARN,
)
_VARIABLES = ("NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET")


class Rdma(Check):
    """Compare RDMA ports and NCCL's road between hosts."""

    name = "rdma"
    layer = Layer.ROUTE
    kinds = (RDMA_MIXED, RDMA_PORT_DOWN)
    folder: ClassVar[Path] = Path("/sys/class/infiniband")

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`ports`: as of `rdma_ports`, with `wanted`; `road`: see `road_by_ports`; `picks`: a
        table; `settings`: the variables that decide, each [value, origin].
        """
        if "nccl" not in ctx.backend:
            raise Skip("the job does not use NCCL")
        settings = nccl_settings(ctx.env)
        ports = rdma_ports(self.folder)
        hca = settings["NCCL_IB_HCA"].value if "NCCL_IB_HCA" in settings else ""
        for port in ports:
            admitted = rdma_admits(hca, port["device"], int(port["port"]))
            port["wanted"] = admitted and speaks_verbs(port)
        road = road_by_ports(settings, ports)
        return {
            "ports": ports,
            "road": road,
            "picks": table_of_picks(settings, road, ports),
            "settings": {
                name: [settings[name].value, settings[name].origin]
                for name in _VARIABLES
                if name in settings
            },
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Hosts that stand alone."""
        if "nccl" not in cluster.backend:
            return
        seen = {rank.host.label: facts for rank, facts in cluster.facts(self.name)}
        # EFA without its plug-in is that check's finding; what NCCL does then is not known here.
        no_plugin = {
            rank.host.label for rank, facts in cluster.facts("net_plugin") if not facts["loaded"]
        }
        yield from _mixed(seen, no_plugin)
        yield from _down(seen)


def _mixed(seen: Mapping[str, Mapping[str, Any]], no_plugin: Collection[str]) -> Iterator[Finding]:
    roads = {
        host: facts["road"]
        for host, facts in seen.items()
        if facts["road"] != "plugin" and not (facts["road"] == "efa" and host in no_plugin)
    }
    odd = odd_ones_out(roads)
    if odd is None:
        return
    shown = [f"{len(_of(roads, road))} by {road}" for road in sorted(set(roads.values()))]
    reasons = {host: _reason(seen[host]) for host in odd.places}
    yield Finding(
        RDMA_MIXED,
        f"NCCL's data would go {', '.join(shown)}; {next(iter(reasons.values()))}",
        Where(hosts=tuple(sorted(odd.places))),
        {"reasons": reasons, "roads": roads},
        confidence=Confidence.POSSIBLE if odd.tie else Confidence.LIKELY,
    )


def _of(roads: Mapping[str, str], road: str) -> list[str]:
    return [host for host, each in roads.items() if each == road]


def _reason(facts: Mapping[str, Any]) -> str:
    told = [f"{name}={value}" for name, (value, _) in sorted(facts["settings"].items())]
    ports = [f"{p['device']}:{p['port']} {p['state'] or 'unknown'}" for p in facts["ports"]]
    return ", ".join([*told, *ports][:6]) or "no RDMA device"


def _down(seen: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Ports that the same device has active on most other hosts that use verbs."""
    states: dict[str, dict[str, bool]] = {}
    for host, facts in seen.items():
        for port in facts["ports"]:
            if port["wanted"] and facts["road"] == "infiniband":
                name = f"{port['device']}:{port['port']}"
                states.setdefault(name, {})[host] = port["state"] == "ACTIVE"
    for name, active in states.items():
        odd = odd_ones_out(active)
        if odd is None or odd.tie or not odd.usual:
            continue
        for host in odd.places:
            port = next(p for p in seen[host]["ports"] if f"{p['device']}:{p['port']}" == name)
            yield Finding(
                RDMA_PORT_DOWN,
                f"{name} is {port['state'] or 'in no state'} ({port['physical'] or 'no link'}) "
                f"here, and ACTIVE on {len(active) - len(odd.places)} hosts",
                Where(hosts=(host,), interfaces=(name,)),
                {"port": dict(port)},
            )
