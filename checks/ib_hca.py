"""Does NCCL_IB_HCA name ports that are there and up?

What it checks
--------------
NCCL_IB_HCA, from the environment and NCCL's configuration files, is read as NCCL reads it: `^`
excludes, `=` (after it) wants whole names, else prefixes, and `:1` is a port. Every name is held
against the ports that the kernel of the host shows (/sys/class/infiniband). Nothing is sent.

Why it matters
--------------
A list that admits no active port is no error to NCCL: it goes over sockets without a word, many
times slower; where NCCL_NET=IB, it fails. Where that happens on some hosts alone, they do not
connect to the others. Without `=` a name is a prefix: `mlx5_1` means mlx5_10 to mlx5_19 as well.

How to fix
----------
List the devices with `ibv_devices` or `ls /sys/class/infiniband`, and write whole names:
export NCCL_IB_HCA==mlx5_0:1,mlx5_3:1. Or unset it: NCCL then takes every active port.

When it is wrong
----------------
A list for several kinds of hosts names devices that this one has not: a name that is met on another
host is not called wrong. A container may show devices in sysfs that it may not open. Plug-ins have
rules of their own.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
NCCL user guide, environment variables (NCCL_IB_HCA); NCCL src/transport/net_ib/init.cc and
src/misc/utils.cc.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from nccl_doctor.api import (
    HCA,
    Check,
    Cluster,
    Context,
    Finding,
    HcaList,
    Kind,
    Layer,
    Severity,
    Skip,
    Where,
    rdma_ports,
    rdma_settings,
    speaks_verbs,
)

_LIST = "ibv_devices shows the names; export NCCL_IB_HCA==<device>:<port>,… or unset NCCL_IB_HCA"

UNMATCHED = Kind(
    "ib-hca-unmatched",
    Layer.ENV,
    "NCCL_IB_HCA names devices that are not there",
    "NCCL leaves them out without a word; where none is left, it goes over sockets.",
    _LIST,
    Severity.WARN,
)
PORT_DOWN = Kind(
    "ib-hca-port-down",
    Layer.ENV,
    "NCCL_IB_HCA names a port that is not active",
    "NCCL leaves it out without a word; where none is left, it goes over sockets.",
    "bring the port up (ibstat; cable, switch, subnet manager), or name another in NCCL_IB_HCA",
    Severity.WARN,
)
OVERMATCH = Kind(
    "ib-hca-overmatch",
    Layer.ENV,
    "NCCL_IB_HCA admits devices that it does not name",
    "Without `=` every name is a prefix: devices are used, or left out, that nobody meant.",
    "whole names: export NCCL_IB_HCA==<device>:<port>,…",
    Severity.WARN,
)


class IbHca(Check):
    """Read the list as NCCL does, host by host."""

    name = "ib_hca"
    layer = Layer.ENV
    kinds = (UNMATCHED, PORT_DOWN, OVERMATCH)
    root: ClassVar[Path] = Path("/")

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`hca`: the value and its `origin`; `net`: of NCCL_NET; `ports`: [device, port, state]."""
        settings = rdma_settings(ctx)
        if HCA not in settings or not HcaList.parse(settings[HCA].value).entries:
            raise Skip(f"{HCA} is not set")
        ctx.breadcrumb("read /sys/class/infiniband")
        ports = rdma_ports(self.root / "sys/class/infiniband")
        return {
            "hca": settings[HCA].value,
            "origin": settings[HCA].origin,
            "net": settings["NCCL_NET"].value if "NCCL_NET" in settings else "",
            "ports": [
                [port["device"], int(port["port"]), port["state"]]
                for port in ports
                if speaks_verbs(port)
            ],
            "others": len([port for port in ports if not speaks_verbs(port)]),
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """What is left on each host; then single names, against what the other hosts have."""
        seen = {rank.host.label: facts for rank, facts in cluster.facts(self.name)}
        usable = {host: bool(_active(facts)) for host, facts in seen.items()}
        # A host that is not told, or that has RDMA by a list of its own, goes by RDMA as well.
        roads = [facts["road"] for _, facts in cluster.facts("rdma")]
        somebody = any(usable.values()) or "infiniband" in roads
        for host, facts in seen.items():
            if not usable[host]:
                yield from _nothing_left(host, facts, others_go=somebody)
            else:
                yield from _single_names(host, facts, seen)


def _wanted(facts: Mapping[str, Any]) -> list[list[Any]]:
    hca = HcaList.parse(facts["hca"])
    return [port for port in facts["ports"] if hca.admits(port[0], port[1])]


def _active(facts: Mapping[str, Any]) -> list[list[Any]]:
    return [port for port in _wanted(facts) if port[2] == "ACTIVE"]


def _nothing_left(host: str, facts: Mapping[str, Any], *, others_go: bool) -> Iterator[Finding]:
    """A list that leaves nothing: a failure where the others go by RDMA, or NCCL has to."""
    if not facts["ports"] and facts["others"]:
        return  # EFA alone, which this list does not choose
    told = f"{HCA}={facts['hca']} ({facts['origin']})"
    wanted = _wanted(facts)
    there = any(port[2] == "ACTIVE" for port in facts["ports"])
    # Without any active port, it is not the list that is wrong: check rdma compares the hosts.
    severity = Severity.FAIL if there and (others_go or _has_to(facts)) else None
    if wanted:
        yield Finding(
            PORT_DOWN,
            f"{told} leaves {_names(wanted)}, and none is active; active: {_names(_up(facts))}",
            Where(hosts=(host,), interfaces=tuple(f"{d}:{p}" for d, p, _ in wanted)),
            {"ports": facts["ports"]},
            severity=severity,
        )
    else:
        yield Finding(
            UNMATCHED,
            f"{told} admits no port; there are: {_names(facts['ports'])}",
            Where(hosts=(host,)),
            {"ports": facts["ports"]},
            severity=severity,
        )


def _has_to(facts: Mapping[str, Any]) -> bool:
    return bool(facts["net"].lower() == "ib")


def _single_names(
    host: str, facts: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]]
) -> Iterator[Finding]:
    hca = HcaList.parse(facts["hca"])
    devices = {device for device, _, _ in facts["ports"]}
    everywhere = [(d, p, state) for each in seen.values() for d, p, state in each["ports"]]
    listed = {entry.name for entry in hca.entries}
    told = f"{HCA}={facts['hca']} ({facts['origin']})"
    for entry in dict.fromkeys(hca.entries):
        met = [(d, p, s) for d, p, s in everywhere if hca.hits(entry, d, p)]
        if not met:
            yield Finding(
                UNMATCHED,
                f"{told}: {entry} is on no host; there are: {_names(facts['ports'])}",
                Where(hosts=(host,)),
            )
        # Up elsewhere: check rdma names the port. A prefix of many may mean some that are unused.
        named = entry.name in devices and not hca.exclude
        mine = [
            [d, p, s] for d, p, s in facts["ports"] if d == entry.name and hca.hits(entry, d, p)
        ]
        if named and mine and not any(s == "ACTIVE" for d, _, s in met if d == entry.name):
            yield Finding(
                PORT_DOWN,
                f"{told}: {_names(mine)}",
                Where(hosts=(host,), interfaces=tuple(f"{d}:{p}" for d, p, _ in mine)),
            )
        more = sorted(d for d in devices - listed if d.startswith(entry.name))
        if entry.name in devices and more and not hca.exact:
            does = "leaves out" if hca.exclude else "admits"
            yield Finding(
                OVERMATCH,
                f"{told}: {entry} {does} {', '.join(more)} as well",
                Where(hosts=(host,), interfaces=tuple(more)),
                fix=f"export {HCA}={'^' * hca.exclude}={','.join(map(str, hca.entries))}",
            )


def _up(facts: Mapping[str, Any]) -> list[list[Any]]:
    return [port for port in facts["ports"] if port[2] == "ACTIVE"]


def _names(ports: Iterable[Iterable[Any]]) -> str:
    return ", ".join(f"{d}:{p} {state or 'unknown'}" for d, p, state in ports) or "none"
