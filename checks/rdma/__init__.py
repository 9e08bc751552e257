"""Which network would NCCL use on each host, and do all hosts use the same one?

What it checks
--------------
The RDMA ports that the kernel of each host shows (/sys/class/infiniband), their state, and which
network NCCL would use there: verbs, sockets or a plug-in, from NCCL_IB_DISABLE, NCCL_IB_HCA,
NCCL_NET and NCCL_NET_PLUGIN in the environment and NCCL's configuration files. If there is a port:
whether libibverbs and a network plug-in can be loaded, and whether this process may open the device
(/dev/infiniband/uverbs*, of EFA too; the MTU of its ports is read for check `fabric_ports`, and the
device is closed again). Hosts are compared; nothing is sent. What NCCL would probably use on each
host, and why, is shown as a table (`-v`). EFA counts as a network of its own, which needs a
plug-in: check `net_plugin` reports whether it loads.

Why it matters
--------------
NCCL chooses on each host separately. A host without an active port silently falls back to sockets,
and the hosts that use verbs wait for it. A container that was not given the devices still sees them
in sysfs. A port that is down, or cannot be opened, on one host only is a rail that its peers lack:
the channels on that rail have no partner, and may hang. An InfiniBand port whose link is up stays
in INIT until a subnet manager has configured it: if none runs, no port of the fabric can be used,
although all cables are good.

How to fix
----------
Bring the port up (cable, switch, subnet manager: `ibstat`). INIT or ARMED with LinkUp: `sminfo`
queries the subnet manager; start it on the switch that has one, or opensm on one host. Give the
container its devices: docker run --device=/dev/infiniband --ulimit memlock=-1, in Kubernetes the
RDMA or EFA device plug-in; install libibverbs1 (rdma-core) in the image. Or use sockets everywhere:
export NCCL_IB_DISABLE=1 on every host, which is much slower.

When it is wrong
----------------
A port that is down on every host, or on most, is taken as unused; if it is up on half of the hosts
and down on the other half, those with it down are named, although they may be right. Devices are
compared by name; hosts that name them differently are not compared (check `rails` reports that). If
ranks of one host have different variables, only those of its first rank are checked: check `ib_hca`
reads the lists of all. Whether ports are in one fabric is for check `fabric_ports`. A plug-in that
loads may still refuse to work, and one that uses verbs itself counts as verbs. A device that opens
may still lack its driver for libibverbs. Pods that are given some of a host's devices cannot open
the others: if all hosts have the same number left, that is only a note.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
NCCL user guide, environment variables (NCCL_IB_DISABLE, NCCL_IB_HCA, NCCL_NET, NCCL_NET_PLUGIN);
NCCL src/plugin/net.cc and src/transport/net_ib/init.cc; kernel documentation,
ABI/stable/sysfs-class-infiniband; opensm(8), sminfo(8); NVIDIA/nccl issues 234, 451 and 2428;
aws/aws-ofi-nccl issues 663 and 1020.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Figure,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Setup,
    Severity,
    Skip,
    Step,
    Where,
    export,
    look,
    odd_ones_out,
    shell,
)
from nccl_doctor.toolkit.fabric.down import PortDown, ports_down, seen_by_rdma
from nccl_doctor.toolkit.fabric.hca import HCA, rdma_off
from nccl_doctor.toolkit.fabric.ports import rdma_ports, speaks_verbs
from nccl_doctor.toolkit.fabric.road import (
    Access,
    admitted,
    choose_road,
    efa_ports,
    needs_plugin_alone,
    port_name,
)
from nccl_doctor.toolkit.hosts import sides_in_words
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.nccl.plugin import first_plugin

from .efa import EFA_BLOCKED, EFA_FIX, maybe_blocked
from .picks import table_of_picks
from .verbs import IBVERBS, active_mtus, barred_devices, ibverbs_error

RDMA_MIXED = Kind(
    code="rdma-mixed",
    layer=Layer.ROUTE,
    title="Some hosts would use InfiniBand, RoCE or EFA, and others would not",
    why="NCCL chooses on each host separately: two hosts that chose differently cannot connect, "
    "and the first communicator fails or hangs.",
    fix=Fix(
        look(shell("ibstat"), "bring the RDMA port of the odd host up"),
        alternatives=[Fix(export(NCCL_IB_DISABLE="1"))],
    ),
)
RDMA_PORT_DOWN = Kind(
    code="rdma-port-down",
    layer=Layer.ROUTE,
    title="An RDMA port is down on this host and up on the others",
    why="NCCL ignores the port: the GPUs next to it share the ports that are left, or rails do "
    "not match.",
    fix=Fix(look(shell("ibstat"), "check the cable, the switch port and the subnet manager")),
    severity=Severity.WARN,
)
RDMA_UNCONFIGURED = Kind(
    code="rdma-port-unconfigured",
    layer=Layer.ROUTE,
    title="No subnet manager has activated an InfiniBand port whose link is up",
    why="Until then it carries no data: NCCL ignores it, and uses sockets if no other port is "
    "left.",
    fix=Fix(
        look(shell("sminfo"), "whether a subnet manager answers"),
        look(shell("ibstat")),
        alternatives=["start the fabric's subnet manager (on its switch, or opensm on one host)"],
    ),
    severity=Severity.WARN,
)
RDMA_UNUSABLE = Kind(
    code="rdma-unusable",
    layer=Layer.ROUTE,
    title="RDMA is available or requested, but this process cannot use it",
    why="NCCL ignores such devices, with a line in its log: it uses sockets, or fewer ports than "
    "its peers, and channels without a peer hang.",
    fix=Fix(
        Step(shell("# docker run --device=/dev/infiniband --ulimit memlock=-1")),
        alternatives=["in Kubernetes: the RDMA device plug-in"],
    ),
    severity=Severity.WARN,
)
_VARIABLES = ("NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET", "NCCL_NET_PLUGIN")
_LIBRARY_FIX = "install libibverbs1 (rdma-core) in the image of every host"
_NONE_LEFT = Fix(
    look(shell("ibstat"), "bring an RDMA port of the host up"),
    alternatives=[Fix(Step(shell("unset NCCL_NET"), On.EVERY))],
)
_NO_DEVICE = Fix(
    look(shell("ibv_devices")),
    look(shell("lspci"), "load the driver, if the adapter is there"),
    alternatives=[
        Fix(Step(shell("# docker run --device=/dev/infiniband"))),
        Fix(export(NCCL_IB_DISABLE="1")),
    ],
)
_SHOWN = 4


class RdmaFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    ports: list[dict[str, Any]]
    road: str
    reason: str
    uses: list[str]
    lacks: str
    library: str
    barred: dict[str, str]
    mtus: dict[str, int]
    plugin: str | None
    picks: dict[str, Any]
    settings: dict[str, list[str]]


class Rdma(Check):
    """Compares RDMA ports, and the network that NCCL would use, between hosts."""

    name = "rdma"
    layer = Layer.ROUTE
    kinds = (RDMA_MIXED, RDMA_PORT_DOWN, RDMA_UNCONFIGURED, RDMA_UNUSABLE, EFA_BLOCKED)
    reads = ("collectives", "net_plugin")
    libraries: ClassVar[Sequence[str]] = IBVERBS

    def observe(self, ctx: Context) -> RdmaFacts:
        """`ports`: of `rdma_ports`, with `wanted`; `road`, `reason`, `uses`, `lacks`: a `Road`;
        `library`, `barred`, `plugin`: an `Access`; `mtus`: port → active MTU in bytes; `picks`: a
        table; `settings`: the variables that decide, each [value, origin].
        """
        if "nccl" not in ctx.backend:
            raise Skip("the job does not use NCCL")
        settings = nccl_settings(ctx.env, root=ctx.root)
        ctx.breadcrumb("read /sys/class/infiniband")
        ports = admitted(settings, rdma_ports(ctx.root / "sys/class/infiniband"))
        values = {n: (s.value, s.origin) for n in _VARIABLES if (s := settings.get(n)) is not None}
        plugin, net = (values.get(name, ("",))[0] for name in ("NCCL_NET_PLUGIN", "NCCL_NET"))
        active = [port for port in ports if port["state"] == "ACTIVE"]
        verbs = [port["device"] for port in active if port["wanted"] and not rdma_off(settings)]
        efa = [port["device"] for port in efa_ports(settings, ports)]
        library, barred, mtus, loads = "", {}, {}, None
        if verbs:
            ctx.breadcrumb(f"load {self.libraries[0]}")
            library = ibverbs_error(self.libraries)
        if verbs or efa:
            ctx.breadcrumb("open /dev/infiniband/uverbs*")
            barred = barred_devices([*verbs, *efa], ctx.root)
        if verbs:
            ctx.breadcrumb("ask the ports for their MTU")
            named = [port_name(port) for port in active if port["device"] in {*verbs} - {*barred}]
            mtus = active_mtus(named, self.libraries)
        if (active or needs_plugin_alone(settings)) and not net:
            _, loads = first_plugin(plugin, ctx.breadcrumb)
        road = choose_road(settings, ports, Access(library, barred, loads))
        return {
            "ports": ports,
            "road": road.name,
            "reason": road.reason,
            "uses": list(road.ports),
            "lacks": road.lacks,
            "library": library,
            "barred": barred,
            "mtus": mtus,
            "plugin": loads,
            "picks": table_of_picks(settings, road, ports, ctx.root),
            "settings": {name: list(each) for name, each in values.items()},
        }

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """The network that NCCL would use, and every port."""
        for rank, facts in cluster.facts(self.name):
            where = Where(hosts=(rank.host.label,))
            yield Figure("NCCL's network", facts["road"], where)
            for port in facts["ports"]:
                words = (port["state"], port["link"], port["rate"])
                said = ", ".join(str(word) for word in words if word)
                yield Figure(f"RDMA port {port['device']}:{port['port']}", said, where)

    def sections(self, cluster: Cluster) -> Iterator[Setup]:
        """Every port."""
        for rank, facts in cluster.facts(self.name):
            for port in facts.get("ports") or ():
                yield Setup("RDMA port", port, rank.host.id)

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on hosts that cannot use their ports, then on those that differ from others."""
        if "nccl" not in cluster.backend:
            return
        seen = seen_by_rdma(cluster)
        # EFA without its plug-in is a finding of check net_plugin.
        no_plugin = {
            rank.host.label for rank, facts in cluster.facts("net_plugin") if not facts["loaded"]
        }
        down = ports_down(seen)
        waiting = {each.host for each in down if each.unconfigured}
        alone = [*_unconfigured(seen, down), *_unusable(seen, waiting)]
        yield from alone
        shut = {f.where.hosts[0]: f.code for f in alone if f.level is Severity.FAIL}
        yield from _mixed(seen, no_plugin, shut)
        yield from (_down(each) for each in down if not each.unconfigured)
        yield from maybe_blocked(cluster, seen)


def _unconfigured(
    seen: Mapping[str, Mapping[str, Any]], down: Iterable[PortDown]
) -> Iterator[Finding]:
    """Ports that wait for a subnet manager, by host; the severity depends on the other hosts."""
    hosts: dict[str, list[PortDown]] = {}
    for each in down:
        if each.unconfigured:
            hosts.setdefault(each.host, []).append(each)
    somebody = any(facts["road"] == "infiniband" for facts in seen.values())
    for host, ports in hosts.items():
        road = seen[host]["road"]
        fails = road == "none" or (road != "infiniband" and somebody)
        shown = ", ".join(f"{each.name} {each.port['state']}" for each in ports)
        others = "; ACTIVE on other hosts" if all(each.up for each in ports) else ""
        yield Finding(
            RDMA_UNCONFIGURED,
            f"{shown}, though the link is up{others}" + "; NCCL fails" * (road == "none"),
            Where(hosts=(host,), interfaces=tuple(each.name for each in ports)),
            {"ports": [dict(each.port) for each in ports]},
            severity=Severity.FAIL if fails else None,
        )


def _unusable(seen: Mapping[str, Mapping[str, Any]], waiting: Collection[str]) -> Iterator[Finding]:
    """Hosts that cannot use RDMA, or not all of it; the severity depends on the other hosts.

    `waiting`: hosts with ports that a subnet manager would make usable.
    """
    usable = {host: len(facts.get("uses", ())) for host, facts in seen.items()}
    roads = {host: facts["road"] for host, facts in seen.items()}
    fabrics = {"infiniband", "efa"}.intersection(roads.values())
    for host, facts in seen.items():
        library, barred = facts.get("library", ""), facts.get("barred", {})
        # If NCCL_IB_HCA leaves no port, check ib_hca reports it.
        road = roads[host]
        stuck = road == "none" and HCA not in facts["settings"] and host not in waiting
        if not (library or barred or stuck):
            continue
        active = [port for port in facts["ports"] if port["state"] == "ACTIVE"]
        verbs = [p for p in active if p["wanted"] and (library or p["device"] in barred)]
        efa = [p for p in active if not speaks_verbs(p) and p["device"] in barred]
        each_said = [f"{device}: {why}" for device, why in sorted(barred.items())]
        if len(each_said) > _SHOWN:
            each_said[_SHOWN:] = [f"{len(each_said) - _SHOWN} more like these"]
        said = library or "; ".join(each_said) or facts["reason"]
        if road == "infiniband" or (road == "efa" and not (verbs and "infiniband" in fabrics)):
            counts = Counter(usable[each] for each in seen if roads[each] == road)
            usual = max(counts, key=lambda left: (counts[left], left))
            fewer = usable[host] < usual
            severity = Severity.WARN if fewer else Severity.INFO  # a share of the NICs, as pods get
            then = f"{usable[host]} ports are left" + (f", {usual} on other hosts" * fewer)
        else:
            fails = bool(fabrics) or road == "none"
            severity = Severity.FAIL if fails else Severity.WARN
            then = f"NCCL would use {road}" if road != "none" else "NCCL fails"
        yield Finding(
            RDMA_UNUSABLE,
            f"{said}; {then}",
            Where(hosts=(host,), interfaces=tuple(map(port_name, [*verbs, *efa]))),
            {"barred": barred, "library": library},
            fix=_LIBRARY_FIX if library else EFA_FIX if efa else "" if barred else _NONE_LEFT,
            severity=severity,
        )


def _mixed(
    seen: Mapping[str, Mapping[str, Any]], no_plugin: Collection[str], shut: Mapping[str, str]
) -> Iterator[Finding]:
    """Finding on hosts with another network; `shut`: host → code of why it cannot use verbs."""
    roads = {
        host: facts["road"]
        for host, facts in seen.items()
        if facts["road"] != "plugin"
        and not (host in no_plugin and (facts["road"] == "efa" or facts.get("lacks") == "plugin"))
    }
    odd = odd_ones_out(roads)
    if odd is None:
        return
    shown = sides_in_words({road: sorted(_of(roads, road)) for road in set(roads.values())})
    # Of as many hosts that can as cannot, or with their ports up as down, the latter are named.
    cannot = [host for host in odd.places if host in shut or _is_down(seen[host])]
    places = (odd.tie and cannot) or odd.places
    reasons = {host: _reason(seen[host]) for host in places}
    others = {road for host, road in roads.items() if host not in shut}
    yield Finding(
        RDMA_MIXED,
        f"NCCL would use {shown}: {next(iter(reasons.values()))}",
        Where(hosts=tuple(sorted(places))),
        {"reasons": reasons, "roads": roads},
        _fix_of_mixed(seen, places),
        confidence=Confidence.POSSIBLE if odd.tie else Confidence.LIKELY,
        # Without the hosts that cannot use their ports, all would use the same network.
        explained_by=next(iter(shut.values())) if shut and len(others) == 1 else None,
    )


def _fix_of_mixed(seen: Mapping[str, Mapping[str, Any]], places: Iterable[str]) -> str:
    """The fix for hosts whose settings, or want of a device, decide; else empty."""
    odd = [seen[host] for host in places]
    names = {
        name
        for facts in odd
        for name, value in facts["settings"].items()
        if any(other["settings"].get(name) != value for other in seen.values())
    }
    if names:
        unset = Step(shell("unset {:variable}", sorted(names)))
        return Fix(unset, alternatives=["set the same on every host"])
    return "" if any(facts["ports"] for facts in odd) else _NO_DEVICE


def _is_down(facts: Mapping[str, Any]) -> bool:
    """True if a host has ports that NCCL would use, and none of them is ACTIVE."""
    wanted = [port for port in facts["ports"] if port["wanted"]]
    return bool(wanted) and all(port["state"] != "ACTIVE" for port in wanted)


def _of(roads: Mapping[str, str], road: str) -> list[str]:
    return [host for host, each in roads.items() if each == road]


def _reason(facts: Mapping[str, Any]) -> str:
    shown = [f"{name}={value}" for name, (value, _) in sorted(facts["settings"].items())]
    ports = [f"{port_name(p)} {p['state'] or 'unknown'}" for p in facts["ports"]]
    why = [facts["reason"]] if facts.get("lacks") else []
    return ", ".join([*why, *shown, *ports][:6]) or "no RDMA device"


def _down(down: PortDown) -> Finding:
    state, physical = down.port["state"] or "unknown", down.port["physical"] or "no link"
    return Finding(
        RDMA_PORT_DOWN,
        f"{down.name} is {state} ({physical}) here, and ACTIVE on {down.up} "
        f"host{'s' * (down.up != 1)}",
        Where(hosts=(down.host,), interfaces=(down.name,)),
        {"port": dict(down.port)},
        # Half of the hosts have it down: that may be intended.
        confidence=Confidence.POSSIBLE if down.tie else Confidence.CERTAIN,
    )
