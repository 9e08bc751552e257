"""Would the kernel drop packets of other hosts, as its answers would leave by another interface?

What it checks
--------------
On each host, whether two running interfaces have an IPv4 address in the same network, and whether
strict reverse path filtering (rp_filter=1, the greater of `all` and the interface's own) applies to
the second of them; then the kernel is asked by netlink, as `ip route get ADDRESS from PEER iif NIC`
does, whether it would take a packet from that network there. Where calls between hosts got no
answer (check `firewall`), the kernels of both ends are asked the same about these very packets,
whatever networks they are in.

Why it matters
--------------
The kernel answers to a network through one interface only. With the strict filter it silently drops
what arrives on the other one: connections to that address are never answered, which looks like a
firewall. NCCL opens connections on every interface that it finds. Hosts with a network for each NIC
and one default route meet it too: what comes from another rack's network is dropped.

How to fix
----------
sysctl -w net.ipv4.conf.all.rp_filter=2 on that host (loose: any interface will do), or routes by
source address (ip rule), or restrict the libraries to one interface: NCCL_SOCKET_IFNAME==eth0.

When it is wrong
----------------
The answer of the kernel counts routes by source address (ip rule), VRFs and marks. The kernel has
no such filter for IPv6; that of firewalld is found by check `firewall`. Where netlink is forbidden,
two interfaces in one network are named whatever rules there are. By default the other interface
answers ARP requests for both addresses (arp_ignore=0), so packets may happen to arrive where they
are taken. A filter in other network namespaces on the path is not seen.
VRFs are not validated on a machine that has them.

References
----------
Kernel documentation, networking/ip-sysctl (rp_filter, arp_ignore); RFC 3704; `inet_rtm_getroute` in
the kernel's net/ipv4/route.c; ip-route(8), ip-rule(8).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Command,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Step,
    Where,
    host_labels,
    shell,
)
from nccl_doctor.toolkit.nccl.interface_choice import subnet_prefixes
from nccl_doctor.toolkit.nccl.use_interface import use_interface
from nccl_doctor.toolkit.net.interfaces import interfaces, is_alone
from nccl_doctor.toolkit.net.routes import arp_settings, reverse_path_filter
from nccl_doctor.toolkit.net.rtnetlink import leads_back, way_in
from nccl_doctor.toolkit.peers.common_interface import common_interface, interface_fix
from nccl_doctor.toolkit.peers.matrix import (
    SILENT,
    STRICT,
    Sorted,
    filtered_ways,
    first_calls,
)

RP_FILTER_STRICT = Kind(
    code="rp-filter-strict",
    layer=Layer.ROUTE,
    title="The reverse path filter is strict, and answers leave by another interface",
    why="The kernel drops what arrives on the interface through which it would not answer: "
    "connections to that address get no answer.",
    fix=Fix(Step(shell("sysctl -w net.ipv4.conf.all.rp_filter=2"))),
    severity=Severity.WARN,
)


class RpFilterFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    shared: dict[str, list[list[Any]]]


class RpFilter(Check):
    """Finds interfaces that share a network, and what their filter would drop."""

    name = "rp_filter"
    layer = Layer.ROUTE
    kinds = (RP_FILTER_STRICT,)
    reads = ("firewall", "interfaces", "own_name")

    def observe(self, ctx: Context) -> RpFilterFacts:
        """`shared`: network with more than one interface → [interface, address, filter, taken,
        back, arp_ignore, arp_announce], in the order of the interfaces. `taken`: whether the kernel
        takes packets from that network there; None if the filter is not strict, or the kernel may
        not be asked. `back`: whether what is sent from the address leaves by the interface, or
        None. The last three are for check `neighbours`.
        """
        prefixes = subnet_prefixes()
        networks: dict[str, list[list[Any]]] = {}
        for nic in interfaces():
            for address in nic.addresses if nic.running and not nic.loopback else ():
                if ":" in address or address not in prefixes:
                    continue
                net = str(ipaddress.ip_network(f"{address}/{prefixes[address]}", strict=False))
                if is_alone(net):
                    continue
                name = nic.name.partition(":")[0]  # without a label
                entry: list[Any] = [name, address, reverse_path_filter(name, ctx.root)]
                networks.setdefault(net, []).append(entry)
        shared = {
            net: entries
            for net, entries in networks.items()
            if len({nic for nic, *_ in entries}) > 1
        }
        for net, entries in shared.items():
            other = _neighbour(net, prefixes)
            for entry in entries:
                nic, address, value = entry
                entry.append(_taken(other, nic, address, value))
                entry.append(leads_back(address, other, nic) if other else None)
                entry += arp_settings(nic, ctx.root)
        return {"shared": shared}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """A failure for addresses whose filter dropped calls; a warning for each network in which
        that may happen.
        """
        _, calls = first_calls(cluster)
        told = set()
        for finding, addresses in _dropped(cluster, calls):
            told |= {(finding.where.hosts[0], address) for address in addresses}
            yield finding
        lost = (call for call in (*calls.blocked, *calls.one_way) if call.used)
        silent = {call.address for call in lost if call.outcome in SILENT}
        for rank, facts in cluster.facts(self.name):
            for net, entries in facts["shared"].items():
                strict = [
                    (nic, address)
                    for nic, address, value, *taken in entries
                    if value == STRICT and taken[:1] != [True]
                    if (rank.host.label, address) not in told
                ]
                if strict:
                    yield _may_drop(
                        cluster, rank.host.label, net, entries, strict=strict, silent=silent
                    )


def _may_drop(
    cluster: Cluster,
    host: str,
    net: str,
    entries: Sequence[Any],
    *,
    strict: Collection[tuple[str, str]],
    silent: Collection[str],
) -> Finding:
    """A finding on interfaces that share a network.

    Args:
        cluster: with the calls between hosts.
        host: its name.
        net: the network.
        entries: from `observe`.
        strict: (interface, address) where packets would be dropped.
        silent: addresses that gave no answer.
    """
    lost = sorted({address for _, address in strict} & set(silent))
    names = ", ".join(f"{nic} {address}" for nic, address, *_ in entries)
    said = f"; no answer at {', '.join(lost)}" if lost else ""
    # The first one is that of the route, unless it would drop packets itself.
    good = next(
        (nic for nic, address, *_ in entries if (nic, address) not in strict), entries[0][0]
    )
    return Finding(
        RP_FILTER_STRICT,
        f"{names} in {net}, rp_filter=1{said}",
        Where(hosts=(host,), interfaces=tuple(sorted({nic for nic, _ in strict}))),
        {"network": net, "interfaces": entries},
        fix=_fix({host: {nic for nic, _ in strict}}, _instead(cluster, good)),
        severity=Severity.FAIL if lost else None,
        confidence=Confidence.LIKELY,
    )


def _dropped(cluster: Cluster, calls: Sorted) -> Iterator[tuple[Finding, set[str]]]:
    """Findings on calls without an answer whose packets a kernel says that it drops; with the
    addresses that were called.
    """
    silent = {
        (call.caller, call.listener, call.address): call.job and call.used
        for call in (*calls.blocked, *calls.one_way, *calls.unroutable)
        if call.outcome in SILENT
    }
    labels = host_labels(cluster)
    found: dict[int, list[Mapping[str, Any]]] = {}
    for rank, way in filtered_ways(cluster.facts("firewall", "rules")):
        called = way["own"] if rank.seat == way["listener"] else way["peer"]
        if (way["caller"], way["listener"], called) in silent:
            found.setdefault(rank.seat, []).append({**way, "called": called})
    for seat, ways in found.items():
        first = ways[0]
        other = first["caller"] if seat == first["listener"] else first["listener"]
        ends = {labels[seat]: {way["interface"] for way in ways}}
        # The answers to answers arrive at the other end by the same detour.
        ends[labels[other]] = {"all"}
        job = any(silent[way["caller"], way["listener"], way["called"]] for way in ways)
        yield (
            Finding(
                RP_FILTER_STRICT,
                f"{first['interface']} {first['own']}, rp_filter=1: packets from {first['peer']} "
                f"are dropped on arrival, as answers to it leave by {first['leaves']}",
                Where(
                    hosts=(labels[seat],),
                    interfaces=tuple(sorted({way["interface"] for way in ways})),
                ),
                {"packets": [{k: way[k] for k in _SHOWN} for way in ways]},
                fix=_fix(ends, _instead(cluster, first["leaves"])),
                severity=Severity.FAIL if job else None,
            ),
            {way["own"] for way in ways},
        )


_SHOWN = ("peer", "own", "interface", "filter", "leaves")


def _instead(cluster: Cluster, nic: str) -> list[Fix]:
    """Fixes that use another interface: the one that all hosts have in common, if calls showed it;
    `nic` where none were made.
    """
    chosen = common_interface(cluster)
    if chosen is None:
        return [Fix(use_interface(nic, gloo=False))]
    return [interface_fix(cluster, gloo=False)] if chosen else []


def _fix(strict: Mapping[str, Collection[str]], others: Sequence[Fix]) -> Fix:
    """The fix for interfaces by their hosts, with other ways to the same end."""
    loose = (
        Step(
            shell("{}=2", setting),
            (host,),
            undo=Command() if each == "all" else shell("{}=1", setting),
            note="loose; as root",
        )
        for host, nics in strict.items()
        for each in sorted(nics)
        for setting in (shell("sysctl -w {}", f"net/ipv4/conf/{each}/rp_filter"),)
    )
    return Fix(*loose, alternatives=others)


def _neighbour(net: str, own: Collection[str]) -> str:
    """An address of a network that is none of this host; empty if there is none."""
    hosts = map(str, ipaddress.ip_network(net).hosts())
    return next((address for address in hosts if address not in own), "")


def _taken(other: str, nic: str, address: str, value: int) -> bool | None:
    way = way_in(address, other, nic) if other and value == STRICT else None
    return None if way is None else not way.errno
