"""By which network would NCCL go on each host, and do all hosts take the same one?

What it checks
--------------
The RDMA ports that the kernel of each host shows (/sys/class/infiniband), their state, and by which
road NCCL would carry data there: verbs, sockets or a plug-in, from NCCL_IB_DISABLE, NCCL_IB_HCA,
NCCL_NET and NCCL_NET_PLUGIN in the environment and NCCL's configuration files. Where a port is
there: whether libibverbs and a network plug-in can be loaded, and whether this process may open the
device (/dev/infiniband/uverbs*; its ports are asked for their MTU, for check `fabric_ports`, and it
is closed again). Hosts are compared; nothing is sent. What NCCL would probably take on each host,
and why, is shown as a table (`-v`). EFA counts as a road of its own, which needs a plug-in: check
`net_plugin` says whether it loads.

Why it matters
--------------
NCCL chooses on each host by itself. A host without an active port falls back to sockets without a
word, and the hosts that use verbs wait for it. A container that was not given the devices sees them
in sysfs all the same. A port that is down, or cannot be opened, on one host alone is a rail that
its peers lack: the channels that they put there have nobody at the other end, and may hang. An
InfiniBand port whose link is up stays in INIT until a subnet manager has configured it: where none
runs, no port of the fabric can be used, and all cables are good.

How to fix
----------
Bring the port up (cable, switch, subnet manager: `ibstat`). INIT or ARMED with LinkUp: `sminfo`
asks for the subnet manager; start it on the switch that has one, or opensm on one host. Give the
container its devices: docker run --device=/dev/infiniband --ulimit memlock=-1, in Kubernetes the
RDMA device plug-in; install libibverbs1 (rdma-core) in the image. Or take the same road everywhere:
export NCCL_IB_DISABLE=1 on every host, at a great loss of speed.

When it is wrong
----------------
A port that is down on every host, or on most, is taken for one that nobody uses; where as many have
it up as down, those with it down are named, for all that it may be they that mean it so. Devices
are compared by name; hosts that name them differently are not (check `rails` says so). Of ranks
with variables of their own only the first one of each host is asked: check `ib_hca` reads the lists
of all. Whether ports lie in one fabric, check `fabric_ports` asks. A plug-in that loads may still
refuse, and one that uses verbs itself is counted as verbs. That a device opens does not say that
its driver is there for libibverbs. Pods that are given some of a host's devices cannot open the
others: where all hosts have the same number left, that is only mentioned.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
NCCL user guide, environment variables (NCCL_IB_DISABLE, NCCL_IB_HCA, NCCL_NET, NCCL_NET_PLUGIN);
NCCL src/plugin/net.cc and src/transport/net_ib/init.cc; kernel documentation,
ABI/stable/sysfs-class-infiniband; opensm(8), sminfo(8); NVIDIA/nccl issues 234, 451 and 2428;
aws/aws-ofi-nccl issue 663.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
    Where,
    odd_ones_out,
)
from nccl_doctor.toolkit.fabric.down import PortDown, ports_down, seen_by_rdma
from nccl_doctor.toolkit.fabric.hca import HCA, rdma_off
from nccl_doctor.toolkit.fabric.ports import rdma_ports
from nccl_doctor.toolkit.fabric.road import Access, admitted, choose_road, port_name
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.nccl.plugin import first_plugin

from .picks import table_of_picks
from .verbs import IBVERBS, active_mtus, barred_devices, ibverbs_error

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
RDMA_UNCONFIGURED = Kind(
    code="rdma-port-unconfigured",
    layer=Layer.ROUTE,
    title="No subnet manager has made an InfiniBand port active, though its link is up",
    why="Until one does it carries nothing: NCCL leaves it out, and goes over sockets where no "
    "other is left.",
    fix="start the fabric's subnet manager (on its switch, or opensm on one host); sminfo says "
    "whether one answers, ibstat shows the port",
    severity=Severity.WARN,
)
RDMA_UNUSABLE = Kind(
    code="rdma-unusable",
    layer=Layer.ROUTE,
    title="RDMA is there, or asked for, and this process cannot use it",
    why="NCCL leaves such devices out with a line in its log: it goes over sockets, or over fewer "
    "ports than its peers, and channels without a peer hang.",
    fix="docker run --device=/dev/infiniband --ulimit memlock=-1; in Kubernetes the RDMA device "
    "plug-in",
    severity=Severity.WARN,
)
EFA_BLOCKED = Kind(
    code="efa-maybe-blocked",
    layer=Layer.ROUTE,
    title="EFA needs a security group that admits itself",
    why="EFA is not TCP: a security group that lets the hosts' TCP through may still drop it, and "
    "then the first collective hangs without a word.",
    fix="in the security group of the EFA interfaces: all traffic from the group itself (inbound), "
    "and all traffic to the group itself (outbound); all hosts in one availability zone",
    severity=Severity.INFO,
)
_VARIABLES = ("NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET", "NCCL_NET_PLUGIN")
_EFA_ERROR = "unable to insert remote address"
"""Of the plug-in, where it cannot reach the EFA of another host."""
_LIBRARY_FIX = "install libibverbs1 (rdma-core) in the image of every host"


class Rdma(Check):
    """Compare RDMA ports and NCCL's road between hosts."""

    name = "rdma"
    layer = Layer.ROUTE
    kinds = (RDMA_MIXED, RDMA_PORT_DOWN, RDMA_UNCONFIGURED, RDMA_UNUSABLE, EFA_BLOCKED)
    root: ClassVar[Path] = Path("/")
    libraries: ClassVar[Sequence[str]] = IBVERBS

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`ports`: as of `rdma_ports`, with `wanted`; `road`, `reason`, `uses`, `lacks`: a `Road`;
        `library`, `barred`, `plugin`: an `Access`; `mtus`: port → active MTU in bytes; `picks`: a
        table; `settings`: the variables that decide, each [value, origin].
        """
        if "nccl" not in ctx.backend:
            raise Skip("the job does not use NCCL")
        settings = nccl_settings(ctx.env)
        ctx.breadcrumb("read /sys/class/infiniband")
        ports = admitted(settings, rdma_ports(self.root / "sys/class/infiniband"))
        told = {n: (s.value, s.origin) for n in _VARIABLES if (s := settings.get(n)) is not None}
        plugin, net = (told.get(name, ("",))[0] for name in ("NCCL_NET_PLUGIN", "NCCL_NET"))
        active = [port for port in ports if port["state"] == "ACTIVE"]
        verbs = [port["device"] for port in active if port["wanted"] and not rdma_off(settings)]
        library, barred, mtus, loads = "", {}, {}, None
        if verbs:
            ctx.breadcrumb(f"load {self.libraries[0]}")
            library = ibverbs_error(self.libraries)
            ctx.breadcrumb("open /dev/infiniband/uverbs*")
            barred = barred_devices(verbs, self.root)
            ctx.breadcrumb("ask the ports for their MTU")
            named = [port_name(port) for port in active if port["device"] in {*verbs} - {*barred}]
            mtus = active_mtus(named, self.libraries)
        if active and not net:
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
            "picks": table_of_picks(settings, road, ports, self.root),
            "settings": {name: list(each) for name, each in told.items()},
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

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Hosts that cannot use what they have, then those that stand alone."""
        if "nccl" not in cluster.backend:
            return
        seen = seen_by_rdma(cluster)
        # EFA without its plug-in is that check's finding.
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
        yield from _efa(cluster, seen)


def _unconfigured(
    seen: Mapping[str, Mapping[str, Any]], down: Iterable[PortDown]
) -> Iterator[Finding]:
    """Ports that wait for a subnet manager, host by host; what that does, the other hosts tell."""
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
            f"{shown}, though the link is up{others}" + "; NCCL ends" * (road == "none"),
            Where(hosts=(host,), interfaces=tuple(each.name for each in ports)),
            {"ports": [dict(each.port) for each in ports]},
            severity=Severity.FAIL if fails else None,
        )


def _unusable(seen: Mapping[str, Mapping[str, Any]], waiting: Collection[str]) -> Iterator[Finding]:
    """How bad it is, the other hosts tell; `waiting`: hosts with ports that a subnet manager would
    make usable.
    """
    usable = {host: len(facts.get("uses", ())) for host, facts in seen.items()}
    by_verbs = [host for host, facts in seen.items() if facts["road"] == "infiniband"]
    usual = Counter(usable[host] for host in by_verbs).most_common(1)
    for host, facts in seen.items():
        library, barred = facts.get("library", ""), facts.get("barred", {})
        # Where NCCL_IB_HCA leaves nothing, check ib_hca says so.
        stuck = facts["road"] == "none" and HCA not in facts["settings"] and host not in waiting
        if not (library or barred or stuck):
            continue
        names = tuple(
            port_name(port)
            for port in facts["ports"]
            if port["wanted"]
            and port["state"] == "ACTIVE"
            and (library or port["device"] in barred)
        )
        said = library or "; ".join(f"{device}: {why}" for device, why in sorted(barred.items()))
        said = said or facts["reason"]
        if facts["road"] == "infiniband":
            fewer = usable[host] < usual[0][0]
            severity = Severity.WARN if fewer else Severity.INFO  # a share of the NICs, as pods get
            then = f"{usable[host]} ports are left" + (f", {usual[0][0]} on others" * fewer)
        else:
            fails = bool(by_verbs) or facts["road"] == "none"
            severity = Severity.FAIL if fails else Severity.WARN
            then = f"NCCL would go by {facts['road']}" if facts["road"] != "none" else "NCCL ends"
        yield Finding(
            RDMA_UNUSABLE,
            f"{said}; {then}",
            Where(hosts=(host,), interfaces=names),
            {"barred": barred, "library": library},
            fix=_LIBRARY_FIX if library else "",
            severity=severity,
        )


def _mixed(
    seen: Mapping[str, Mapping[str, Any]], no_plugin: Collection[str], shut: Mapping[str, str]
) -> Iterator[Finding]:
    """`shut`: host → why it cannot go by verbs, as a code."""
    roads = {
        host: facts["road"]
        for host, facts in seen.items()
        if facts["road"] != "plugin"
        and not (host in no_plugin and (facts["road"] == "efa" or facts.get("lacks") == "plugin"))
    }
    odd = odd_ones_out(roads)
    if odd is None:
        return
    shown = [f"{len(_of(roads, road))} by {road}" for road in sorted(set(roads.values()))]
    reasons = {host: _reason(seen[host]) for host in odd.places}
    others = {road for host, road in roads.items() if host not in shut}
    yield Finding(
        RDMA_MIXED,
        f"NCCL's data would go {', '.join(shown)}; {next(iter(reasons.values()))}",
        Where(hosts=tuple(sorted(odd.places))),
        {"reasons": reasons, "roads": roads},
        confidence=Confidence.POSSIBLE if odd.tie else Confidence.LIKELY,
        # Without the hosts that cannot use what they have, all would go one way.
        explained_by=next(iter(shut.values())) if shut and len(others) == 1 else None,
    )


def _of(roads: Mapping[str, str], road: str) -> list[str]:
    return [host for host, each in roads.items() if each == road]


def _reason(facts: Mapping[str, Any]) -> str:
    told = [f"{name}={value}" for name, (value, _) in sorted(facts["settings"].items())]
    ports = [f"{port_name(p)} {p['state'] or 'unknown'}" for p in facts["ports"]]
    why = [facts["reason"]] if facts.get("lacks") else []
    return ", ".join([*why, *told, *ports][:6]) or "no RDMA device"


def _down(down: PortDown) -> Finding:
    state, physical = down.port["state"] or "in no state", down.port["physical"] or "no link"
    return Finding(
        RDMA_PORT_DOWN,
        f"{down.name} is {state} ({physical}) here, and ACTIVE on {down.up} "
        f"host{'s' * (down.up != 1)}",
        Where(hosts=(down.host,), interfaces=(down.name,)),
        {"port": dict(down.port)},
        # Half of the hosts do without it: they may mean to.
        confidence=Confidence.POSSIBLE if down.tie else Confidence.CERTAIN,
    )


def _efa(cluster: Cluster, seen: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """What nobody can see from a host, where collectives do not work although all go by EFA."""
    if len(seen) < 2 or any(facts["road"] != "efa" for facts in seen.values()):
        return
    outcomes = [each.outcome for each in cluster.evidence("collectives", "world")]
    said = ""
    if any(each.status is OutcomeStatus.RAISED and _refused(each) for each in outcomes):
        said = "a rank could not reach the EFA of another one, and nothing else has tested EFA"
    elif any(each.status is OutcomeStatus.HUNG for each in outcomes):
        said = (
            "the collective of all ranks hung, and all hosts go by EFA, whose traffic nothing else "
            "has tested"
        )
    if said:
        yield Finding(
            EFA_BLOCKED,
            said,
            Where(hosts=tuple(sorted(seen))),
            confidence=Confidence.POSSIBLE,
        )


def _refused(outcome: Outcome) -> bool:
    return any(_EFA_ERROR in text.lower() for text in (outcome.reason, outcome.log_tail))
