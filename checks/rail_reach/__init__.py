"""Does each RoCE rail of a host reach the same rail of the others?

What it checks
--------------
If NCCL would use RoCE: every host listens on the address of each of its rails (check `rails` lists
them) and connects to the same rail of the other hosts by TCP, each call bound to the interface of
its rail at both ends: 64 bytes, then 1 MiB there and back. With NCCL_CROSS_NIC=1 the next rail of
the next host is called as well; with 2, the default, only at level full, or if NCCL_PXN_DISABLE is
set; with 0 never. What fails is tried twice; then the neighbour table shows whether any host
answered for the address at all. Where that would be more than 128 calls of a host, it calls
log2(hosts) + 4 others, by chance others in each run, and each rail is called between at least two
hosts of each two leaf switches that `--topology` or Slurm (SLURM_TOPOLOGY_ADDR) tells; `--level
full` tries every pair.

Why it matters
--------------
All other traffic between hosts uses one interface; NCCL puts the data of each channel on its own
rail. One cable in the wrong switch port, one missing address or VLAN, one switch port without jumbo
frames, and a job that started well ends in `Got completion … with error 12`, or hangs.

With NCCL_CROSS_NIC=0 rings and trees stay on one rail; with 1 they change rails between hosts; with
2 only if that is faster. Send and receive, and so all-to-all, go from the NIC of one GPU to that of
the other unless it is 0 or a GPU of the other rail passes the data on (PXN). On fabrics whose rails
do not reach each other, that ends with error 12 too.

How to fix
----------
Rails that do not reach each other: NCCL_CROSS_NIC=0 on every host. Else: `ping -I <nic> <address>`
and `ip route get <address> oif <nic>` on the caller; address, VLAN and cable of the interface that
is named, and its switch port. If large packets are lost: the MTU of the switch port (9216 on RoCE
fabrics), not only that of the host.

When it is wrong
----------------
The test uses TCP, which takes the same interface, address and switch ports as RoCE, but passes the
firewall of the host and is another traffic class for the switches: a firewall that blocks TCP
between rails on purpose is reported, as possible. Priority flow control, ECN and UDP port 4791 are
not tested. InfiniBand has no addresses to call. Before Linux 5.7 only root can bind a call to an
interface. A path that carries packets of 4200 bytes, but not those of the interface's full MTU,
carries RoCE and is reported all the same.
Not validated on hardware: tested between network namespaces with a made-up sysfs.

References
----------
NCCL user guide, environment variables (NCCL_IB_HCA, NCCL_CROSS_NIC, NCCL_PXN_DISABLE); NCCL
src/graph/search.cc (`ncclTopoCompute`, `ncclTopoGetNetDev`); `rdma_resolve_ip` in the
kernel's drivers/infiniband/core/addr.c (RoCE asks the routing and neighbour tables); socket(7),
SO_BINDTODEVICE; NVIDIA/nccl issues 733 and 1591.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Cause,
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Level,
    Round,
    Severity,
    Skip,
    Untested,
    Where,
    blame_links,
    export,
    fill,
    host_labels,
    look,
    shell,
)
from nccl_doctor.toolkit.fabric.hca import rdma_settings
from nccl_doctor.toolkit.fabric.rails import rails_of
from nccl_doctor.toolkit.hosts import link_names
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.net.dial import Origin
from nccl_doctor.toolkit.peers.calls import calls_deadline, hold_calls
from nccl_doctor.toolkit.peers.listeners import Listeners
from nccl_doctor.toolkit.peers.schedule import partners_enough, plan_schedule, schedule_of
from nccl_doctor.toolkit.variables.values import as_strtoll

from .calls import RailCall, RailEnd, call_rails, rails_to_call, read_rail_calls

_LOOK_AT = "then look at address, VLAN, cable and switch port of the interface that is named"
UNREACHABLE = Kind(
    "rail-unreachable",
    Layer.ROUTE,
    "A RoCE rail does not reach the same rail of other hosts",
    "NCCL puts whole channels on this rail: the bootstrap works, but the first collective ends "
    "with error 12, or hangs.",
    Fix(
        look(shell("ping -c 3 -I NIC ADDRESS"), _LOOK_AT),
        look(shell("ip route get ADDRESS oif NIC")),
    ),
)
LARGE_LOST = Kind(
    "rail-mtu-blackhole",
    Layer.ROUTE,
    "A RoCE rail silently loses large packets",
    "RoCE sends packets of up to 4096 bytes plus headers: small messages arrive, large ones end "
    "with error 12.",
    "set the MTU of the switch ports of this rail to 9216, or that of the interface, on every "
    "host, to what the path carries",
    Severity.WARN,
)
APART = Kind(
    "rails-apart",
    Layer.ROUTE,
    "RoCE rails do not reach each other, and NCCL may try it",
    "NCCL_CROSS_NIC=2, the default, mostly stays on one rail; send and receive without PXN do not, "
    "and end with error 12.",
    Fix(export(NCCL_CROSS_NIC="0")),
    Severity.INFO,
)
Rails = Mapping[int, Sequence[Mapping[str, Any]]]
_MAY = 2
"""Value of NCCL_CROSS_NIC, the default: rings change rails only if that is faster."""
_MOST_CALLS = 128
"""Calls of one host up to which it calls all others."""


class RailReach(Check):
    """Calls every rail of the other hosts, from the same rail of each host."""

    name = "rail_reach"
    layer = Layer.PORT
    cost = "seconds"
    together = True
    kinds = (UNREACHABLE, LARGE_LOST, APART)
    reads = ("rails", "rdma")

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round with all hosts whose rails can be called."""
        roads = {rank.host.label: facts["road"] for rank, facts in cluster.facts("rdma")}
        rails = {
            rank.host.label: facts["rails"]
            for rank, facts in cluster.facts("rails")
            if roads.get(rank.host.label, "infiniband") in ("infiniband", "plugin")
        }
        callable_: dict[int, tuple[int, ...]] = {}
        for host in cluster.present_hosts:
            numbers = tuple(rails_to_call(rails.get(host.label, ())))
            if numbers and (first := cluster.first_on(host)):
                callable_[first.seat] = numbers
        seats = tuple(callable_)
        if len(seats) < 2:
            raise Skip("no two hosts with RoCE rails that NCCL would use")
        each = max(map(len, callable_.values()))
        schedule = plan_schedule(cluster, seats, 1 + _MOST_CALLS // each, rails=callable_)
        partners = len(seats) if schedule.all_pairs else partners_enough(len(seats))
        deadline_s = calls_deadline(partners * each)
        params = schedule.to_params()
        return [Round("matrix", (seats,), deadline_s, params, may_shrink=True)]

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`rails`: from `rails_of`; `calls`: from `call_rails`; `not_bound`: address → why;
        `late`: from `Visitors.late`; `cross_nic`: the value of NCCL_CROSS_NIC; `pxn`: whether NCCL
        may use PXN.
        """
        settings = rdma_settings(ctx)
        rails = rails_of(settings, ctx.root)["rails"]
        mine = rails_to_call(rails)
        if not mine:
            raise Untested("the rails of this host are gone")
        cross_nic = as_strtoll(settings.get("NCCL_CROSS_NIC", Setting("2", "")).value)
        pxn = as_strtoll(settings.get("NCCL_PXN_DISABLE", Setting("0", "")).value) == 0
        # Where rails are apart on purpose, these calls cost seconds.
        cross = cross_nic == 1 or (cross_nic == _MAY and (not pxn or ctx.level is Level.FULL))
        schedule = schedule_of(ctx.group, ctx.params)
        known = {
            rail["address"]: {"rail": number, "name": rail["name"], "interface": rail["nic"]}
            for number, rail in mine.items()
        }
        ctx.breadcrumb("listening on every rail", addresses=list(known))
        with Listeners([Origin(each["address"], each["nic"]) for each in mine.values()]) as doors:
            calls = hold_calls(
                ctx,
                doors,
                known,
                lambda entries, budget, _: call_rails(
                    entries, mine, budget, cross=cross, root=ctx.root
                ),
                of=schedule.partners(ctx.seat) if schedule else None,
            )
        found = {"rails": rails, "calls": calls, "not_bound": doors.failed, "late": doors.late()}
        return {**found, "cross_nic": cross_nic, "pxn": pxn}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on the interfaces, or else the links, that explain the failed calls."""
        reports = list(cluster.facts(self.name, "matrix"))
        made = read_rail_calls(reports)
        may = {rank.seat for rank, facts in reports if facts.get("cross_nic") == _MAY}
        calls = [each for each in made if not each.is_cross or each.call.caller not in may]
        rails = {rank.seat: facts["rails"] for rank, facts in reports}
        labels = host_labels(cluster)
        bad = {call.ends: call for call in calls if call.outcome not in ("ok", "mtu")}
        blame = blame_links((call.ends for call in calls), bad)
        yield from _findings(UNREACHABLE, blame.causes, bad, rails, labels)
        stuck = {call.stuck: call for call in calls if call.outcome == "mtu"}
        moved = (e for call in calls if call.outcome == "ok" for e in (call.ends, call.ends[::-1]))
        blame = blame_links((ends for ends in moved if ends not in stuck), stuck)
        yield from _findings(LARGE_LOST, blame.causes, stuck, rails, labels)
        pxn = all(facts.get("pxn", True) for _, facts in reports)
        cross = [each for each in made if each.is_cross and each.call.caller in may]
        if cross:
            yield from _apart(cross, calls, labels, pxn=pxn)


def _findings(
    kind: Kind,
    causes: Iterable[Cause[RailEnd]],
    failed: Mapping[tuple[RailEnd, RailEnd], RailCall],
    rails: Rails,
    labels: Mapping[int, str],
) -> Iterator[Finding]:
    """One finding for each host with bad interfaces; one for each pair of hosts with bad links.

    Args:
        kind: what is wrong.
        causes: from `blame_links`.
        failed: (from, to), in whose direction something is lost → the call that failed.
        rails: seat → rails of its host, in order.
        labels: seat → name of its host.
    """
    groups: dict[tuple[int, ...], list[Cause[RailEnd]]] = {}
    for cause in causes:
        groups.setdefault(tuple(sorted({seat for seat, _ in cause.ends})), []).append(cause)
    for seats, group in groups.items():
        pairs = sorted({pair for cause in group for pair in cause.pairs})
        calls = [failed[pair] for pair in pairs]
        bad = [
            rails[seat][at] for seat, at in sorted({end for cause in group for end in cause.ends})
        ]
        ports = ", ".join(dict.fromkeys(f"{rail['name']} ({rail['nic']})" for rail in bad))
        words = ", ".join(word for word, _ in Counter(call.words for call in calls).most_common(3))
        sure = kind is LARGE_LOST or any(call.is_surely_broken for call in calls)
        possible = any(cause.confidence is Confidence.POSSIBLE for cause in group)
        host = (labels[seats[0]],) if len(seats) == 1 else ()
        links = () if host else link_names(labels, ((a, b) for (a, _), (b, _) in pairs))
        # The best call to repeat: from a good host, to a bad one.
        to = min(calls, key=lambda c: (c.ends[1][0] not in seats[:1], labels[c.ends[0][0]]))
        (seat, number), _ = to.ends
        values = {"ADDRESS": to.address, "NIC": rails[seat][number]["nic"]}
        fix = fill(kind.fix, on=(labels[seat],), **values)
        if all(call.is_cross for call in calls):
            ways = [fix] if isinstance(fix, Fix) else [Fix(text=fix)]
            fix = Fix(export(NCCL_CROSS_NIC="0"), alternatives=ways)
        yield Finding(
            kind,
            f"{ports}: {words}, twice ({len(calls)} calls, such as to {to.address})",
            Where(hosts=host, links=links, interfaces=tuple(sorted({r["name"] for r in bad}))),
            {"calls": [call.shown(labels) for call in calls[:5]]},
            fix=fix,
            # Only TCP was tested, in place of RoCE.
            severity=None if sure else Severity.WARN,
            confidence=Confidence.LIKELY if sure and not possible else Confidence.POSSIBLE,
            explained_by="rail-order-differs" if _all_apart(pairs, rails) else None,
        )


def _apart(
    cross: Sequence[RailCall], calls: Sequence[RailCall], labels: Mapping[int, str], *, pxn: bool
) -> Iterator[Finding]:
    """A finding on rails that reach themselves, but not the next one.

    Args:
        cross: calls to the next rail, where NCCL may do without them.
        calls: all others.
        labels: seat → name of its host.
        pxn: whether every host may use PXN.
    """
    sound = {end for call in calls if call.outcome == "ok" for end in call.ends}
    tried = [call for call in cross if sound.issuperset(call.ends)]
    failed = [call for call in tried if call.outcome not in ("ok", "mtu")]
    if failed:
        words, _ = Counter(call.words for call in failed).most_common(1)[0]
        setting = "NCCL_CROSS_NIC=2" + ("" if pxn else ", NCCL_PXN_DISABLE=1")
        yield Finding(
            APART,
            f"{len(failed)} of {len(tried)} calls to the next rail of another host failed ({words})"
            f", each rail reaches itself; {setting}",
            Where(hosts=tuple(sorted({labels[seat] for c in failed for seat, _ in c.ends}))),
            {"calls": [call.shown(labels) for call in failed[:5]]},
            severity=None if pxn else Severity.WARN,
            confidence=Confidence.LIKELY,
        )


def _all_apart(pairs: Iterable[tuple[RailEnd, RailEnd]], rails: Rails) -> bool:
    """True if rails of one number are in different networks, which check `rails` reports."""
    return all(rails[a][i]["subnet"] != rails[b][j]["subnet"] for (a, i), (b, j) in pairs)
