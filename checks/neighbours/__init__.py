"""Do the hosts of one network answer for their own addresses, and is there room to remember them?

What it checks
--------------
How many neighbours the kernel remembers (net.ipv4.neigh.default.gc_thresh3, and that of IPv6),
compared with the addresses that the job has in the networks of the host, and with the table as it
is. And whether the hardware address that answers for a peer (ARP, neighbour discovery), once check
`firewall` has called it, is that of the interface which has the address: it may be another
interface of the same host, another host of the job, or a machine that nobody knows. Where two
interfaces that carry the data of the job (RoCE rails, or NCCL over sockets) are in one network,
whether the settings keep them apart: arp_ignore, and routes by source address (`ip rule`).

Why it matters
--------------
A full table drops packets to new neighbours: a job with more than 1024 addresses in one network, or
with several NICs on some hundred hosts, hangs while it connects (`neighbour: arp_cache: neighbor
table overflow!`). Where two NICs of a host are in one network, either answers for both by default,
so that the packets for one arrive at the other: it carries the data of both, and RoCE packets are
lost. An address that a second machine has as well breaks connections at random.

How to fix
----------
neighbour-table-small: sysctl -w net.ipv4.neigh.default.gc_thresh3=8192, with gc_thresh2=4096 and
gc_thresh1=1024. arp-answered-by-other-nic, arp-flux: sysctl -w
net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2 on that host, and the same in
/etc/sysctl.d for the next boot; or a network for each rail. address-answered-by-another: `ip neigh
show ADDRESS`, and the switch's table of hardware addresses shows where that machine is.

When it is wrong
----------------
In a container the limits are not visible, and none is reported. Only networks that hosts have in
common count: addresses that stand alone (/32, /128: GCE, Calico, VPC CNI) and those behind a router
need one neighbour, the gateway. A cloud that answers with one hardware address for all hosts
(Azure) is not taken for a machine: one is named only if the call failed, and if other hosts of that
network answer for themselves. Members of a bond, bridges and VLANs count as one interface. Of
interfaces that carry no data of the job nothing is said: whichever of them answers, packets arrive.

References
----------
arp(7); Kernel documentation, networking/ip-sysctl (gc_thresh3, arp_ignore, arp_announce); RFC 5227.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

from nccl_doctor.api import Check, Cluster, Context, Finding, Layer
from nccl_doctor.toolkit.host import interface_names
from nccl_doctor.toolkit.net.interfaces import hardware_address, interfaces_above

from .answers import ANOTHER, OTHER_NIC, judge_answers, judge_fixed
from .flux import FLUX, judge_flux
from .room import FAMILIES, TABLE_SMALL, judge_room, number, read_table

_MOST = 128


class NeighboursFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    tables: dict[str, Any]
    nics: dict[str, dict[str, Any]]
    arp: dict[str, int | None]


class Neighbours(Check):
    """Limits of the neighbour tables, and answers by another than the owner of an address."""

    name = "neighbours"
    layer = Layer.ROUTE
    kinds = (TABLE_SMALL, OTHER_NIC, ANOTHER, FLUX)
    reads = ("firewall", "interfaces", "rails", "rp_filter")

    def observe(self, ctx: Context) -> NeighboursFacts:
        """`tables`: `ipv4` and `ipv6` → `limit`, `entries` now, and `overflows` since the start;
        None where the kernel does not say. `nics`: interface → its hardware address, and the
        interfaces above it. `arp`: arp_ignore and arp_announce of all interfaces.
        """
        nics = {name: hardware_address(name, ctx.root) for name in interface_names()[:_MOST]}
        settings = ctx.root / "proc/sys/net/ipv4/conf/all"
        return {
            "tables": {
                family: read_table(family, table, ctx.root) for family, table in FAMILIES.values()
            },
            "nics": {
                name: {"mac": mac, "above": sorted(interfaces_above(name, ctx.root))}
                for name, mac in nics.items()
                if mac
            },
            "arp": {name: number(settings / name) for name in ("arp_ignore", "arp_announce")},
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on tables, then on addresses that another interface or machine answers for."""
        if not cluster.is_multi_host():
            return
        yield from judge_room(cluster, self.name)
        hosts = {rank.seat: facts for rank, facts in cluster.facts(self.name)}
        yield from judge_fixed(cluster, hosts)
        answers = list(judge_answers(cluster, hosts))
        yield from answers
        seen = {name for each in answers if each.kind is OTHER_NIC for name in each.where.hosts}
        yield from judge_flux(cluster, seen)
