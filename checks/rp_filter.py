"""Would the kernel drop packets that arrive on the second interface of one network?

What it checks
--------------
On each host, whether two running interfaces have an IPv4 address in the same network, and whether
strict reverse path filtering (rp_filter=1, the greater of `all` and the interface's own) applies to
the second of them.

Why it matters
--------------
The kernel answers to a network through one interface only. With the strict filter it silently drops
what arrives on the other one: connections to that address are never answered, which looks like a
firewall. NCCL opens connections on every interface that it finds.

How to fix
----------
sysctl -w net.ipv4.conf.all.rp_filter=2 on that host (loose: any interface will do), or routes by
source address (ip rule), or restrict the libraries to one interface: NCCL_SOCKET_IFNAME==eth0.

When it is wrong
----------------
Routes by source address make two interfaces in one network work with the strict filter too; they
are not read. A filter in other network namespaces on the path is not seen.

References
----------
Kernel documentation, networking/ip-sysctl (rp_filter); RFC 3704.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Kind,
    Layer,
    Severity,
    Where,
)
from nccl_doctor.toolkit.nccl.interface_choice import subnet_prefixes
from nccl_doctor.toolkit.net.interfaces import interfaces
from nccl_doctor.toolkit.peers.matrix import read_calls, sort_calls

RP_FILTER_STRICT = Kind(
    code="rp-filter-strict",
    layer=Layer.ROUTE,
    title="Two interfaces are in one network, and the reverse path filter is strict",
    why="The kernel drops what arrives on the interface through which it would not answer: "
    "connections to that address get no answer.",
    fix="sysctl -w net.ipv4.conf.all.rp_filter=2",
    severity=Severity.WARN,
)
_STRICT = 1


class RpFilter(Check):
    """Finds interfaces that share a network, and the filter that applies to them."""

    name = "rp_filter"
    layer = Layer.ROUTE
    kinds = (RP_FILTER_STRICT,)
    reads = ("firewall",)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`shared`: network with more than one interface → [interface, address, filter], in the
        order of the interfaces.
        """
        prefixes = subnet_prefixes()
        everywhere = _filter("all", ctx.root)
        networks: dict[str, list[list[Any]]] = {}
        for nic in interfaces():
            for address in nic.addresses if nic.running and not nic.loopback else ():
                if ":" in address or address not in prefixes:
                    continue
                net = ipaddress.ip_network(f"{address}/{prefixes[address]}", strict=False)
                entry = [nic.name, address, max(everywhere, _filter(nic.name, ctx.root))]
                networks.setdefault(str(net), []).append(entry)
        return {
            "shared": {
                net: entries
                for net, entries in networks.items()
                if len({nic for nic, _, _ in entries}) > 1
            }
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """A warning for each such network; a failure if calls to such an address got no answer."""
        calls = sort_calls(read_calls(cluster.facts("firewall", "matrix"), cluster.backend))
        dropped = {c.address for c in (*calls.blocked, *calls.one_way) if c.outcome == "dropped"}
        for rank, facts in cluster.facts(self.name):
            for net, entries in facts["shared"].items():
                strict = [entry for entry in entries if entry[2] == _STRICT]
                if not strict:
                    continue
                lost = sorted(dropped & {address for _, address, _ in strict})
                names = ", ".join(f"{nic} {address}" for nic, address, _ in entries)
                said = f"; no answer at {', '.join(lost)}" if lost else ""
                yield Finding(
                    RP_FILTER_STRICT,
                    f"{names} in {net}, rp_filter=1{said}",
                    Where(
                        hosts=(rank.host.label,),
                        interfaces=tuple(sorted({nic for nic, _, _ in strict})),
                    ),
                    {"network": net, "interfaces": entries},
                    fix=f"on {rank.host.label}: sysctl -w net.ipv4.conf.all.rp_filter=2, or "
                    f"export NCCL_SOCKET_IFNAME=={entries[0][0]}",
                    severity=Severity.FAIL if lost else None,
                    confidence=Confidence.LIKELY,
                )


def _filter(interface: str, root: Path) -> int:
    try:
        return int((root / f"proc/sys/net/ipv4/conf/{interface}/rp_filter").read_text())
    except (OSError, ValueError):
        return 0
