"""Do the rails of all hosts match: the same slots, the same order, the same networks?

What it checks
--------------
The InfiniBand and RoCE ports that NCCL's settings allow (NCCL_IB_HCA), in the order in which NCCL
counts them (by PCI address): device, slot, NUMA node, and the network that each is in: for RoCE the
IPv4 subnet of its GIDs. `-v` shows them as a table. Hosts are compared position by position;
nothing is sent.

Why it matters
--------------
NCCL connects hosts channel by channel: the first NIC of one host to the first NIC of the next. On a
fabric with one switch per rail, a host with swapped cables, or with a list of names that means
other slots, sends everything through the upper switches, or to a rail that does not reach the other
one: `Got completion … with error 12`. The driver assigns device names in the order of discovery:
the same name may be another slot on another host.

How to fix
----------
Swapped networks: swap the cables or the addresses of the two NICs; until then exclude both rails on
every host (export NCCL_IB_HCA==<device>:<port>,… of the others). If rails do not reach each other,
NCCL_CROSS_NIC=0 on every host keeps each ring on one rail; it does not help if rails are swapped.
Other slots: name the ports separately for each kind of host, in a file (/etc/nccl.conf), or give
the devices persistent names by udev rules (rdma-core, rdma_rename).

When it is wrong
----------------
Hosts with other slots (another board) are compared by networks only. Networks are compared only if
every port of a host is in a network of its own and all hosts have the same networks: a fabric with
one subnet for all rails, or with one for each link, shows nothing about the order, nor does
InfiniBand with one subnet manager. If all rails reach each other, a swapped one is only slower. If
ranks of one host have different variables, only those of its first rank are checked. Ports that are
down or cannot be opened are reported by check `rdma`; a different number of ports by check
`fabric_ports`.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
NCCL user guide, environment variables (NCCL_IB_HCA, NCCL_CROSS_NIC, NCCL_IB_DEVICE_PCI_ORDER); NCCL
src/transport/net_ib/init.cc; NVIDIA/nccl issues 733, 1277 and 1591.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Kind,
    Layer,
    Severity,
    Skip,
    Where,
    odd_ones_out,
)
from nccl_doctor.toolkit.fabric.hca import HCA, rdma_settings
from nccl_doctor.toolkit.fabric.rails import RailsSeen, rails_of
from nccl_doctor.toolkit.hosts import WHO, who_has_what

ORDER = Kind(
    "rail-order-differs",
    Layer.ROUTE,
    "The rails of this host are in a different order than on the other hosts",
    "NCCL connects the first NIC of one host to the first NIC of the next: through the upper "
    "switches, slower, or not at all if rails are separate networks (error 12).",
    "swap the cables, or the addresses, of the NICs that are named; until then, on every host, "
    "NCCL_IB_HCA without these rails, and NCCL_CROSS_NIC=0 if rails do not reach each other",
    Severity.WARN,
    effects=(Effect.DIFFERENCE,),
)
SLOTS = Kind(
    "rail-slots-differ",
    Layer.ROUTE,
    "NCCL would use NICs in other slots than on the other hosts",
    "Device names mean other slots on this host: rails do not match, and GPUs are far from their "
    "NICs.",
    "name the ports of this host separately (NCCL_IB_HCA in /etc/nccl.conf), or give devices "
    "persistent names by udev rules (rdma_rename)",
    Severity.WARN,
    effects=(Effect.DIFFERENCE,),
)
NAMES = Kind(
    "rdma-names-differ",
    Layer.ROUTE,
    "The same slot has a different device name than on the other hosts",
    "One NCCL_IB_HCA for all hosts would mean other NICs on some hosts.",
    "leave NCCL_IB_HCA unset, or give devices persistent names by udev rules (rdma_rename)",
    Severity.INFO,
)

Rail = Mapping[str, Any]


class RailsFacts(RailsSeen):
    """Facts that `observe` returns; other checks read them."""

    hca: str
    table: dict[str, Any]


class Rails(Check):
    """Lists the ports of each host in NCCL's order, and compares hosts."""

    name = "rails"
    layer = Layer.ROUTE
    kinds = (ORDER, SLOTS, NAMES)

    def observe(self, ctx: Context) -> RailsFacts:
        """Rails of `rails_of`; `table`: the same as text; `hca`: the value of NCCL_IB_HCA."""
        settings = rdma_settings(ctx)
        ctx.breadcrumb("read /sys/class/infiniband")
        found = rails_of(settings, ctx.root)
        if not found["rails"]:
            raise Skip("no InfiniBand or RoCE port that NCCL may use")
        columns = ["rail", "port", "slot", "NUMA node", "state", "network"]
        rows = [
            [number, *(rail[key] for key in ("name", "pci", "numa", "state", "subnet"))]
            for number, rail in enumerate(found["rails"])
        ]
        hca = settings[HCA].value if HCA in settings else ""
        return {**found, "hca": hca, "table": {"columns": columns, "rows": rows}}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on the order of networks; then, for equal boards, on slots and device names."""
        seen = {rank.host.label: facts for rank, facts in cluster.facts(self.name)}
        rails = {host: facts["rails"] for host, facts in seen.items()}
        yield from _order(rails)
        boards = {host: tuple(facts["slots"]) for host, facts in seen.items()}
        for board in dict.fromkeys(filter(None, boards.values())):
            alike = {host: seen[host] for host, slots in boards.items() if slots == board}
            yield from _slots(alike)


def _order(rails: Mapping[str, list[Rail]]) -> Iterator[Finding]:
    """Hosts that have the networks of most hosts, but in another order."""
    subnets = {host: tuple(rail["subnet"] for rail in mine) for host, mine in rails.items()}
    telling = {
        host: mine
        for host, mine in subnets.items()
        if len(mine) > 1 and all(mine) and len(set(mine)) == len(mine)
    }
    sets = Counter(frozenset(mine) for mine in telling.values()).most_common(1)
    same = {host: mine for host, mine in telling.items() if sets and frozenset(mine) == sets[0][0]}
    odd = odd_ones_out(same)
    who = who_has_what((host, ", ".join(map(str, mine))) for host, mine in same.items())
    for host in odd.places if odd else ():
        usual = odd.usual if odd and odd.usual else None
        others = [usual] if usual else [mine for mine in same.values() if mine != same[host]]
        wrong = [at for at, net in enumerate(same[host]) if any(net != one[at] for one in others)]
        shown = ", ".join(
            f"{rails[host][at]['name']} is rail {at} in {same[host][at]}, elsewhere rail {at} is "
            f"in {' or '.join(sorted({one[at] for one in others}))}"
            for at in wrong
        )
        yield Finding(
            ORDER,
            shown,
            Where(hosts=(host,), interfaces=tuple(rails[host][at]["name"] for at in wrong)),
            {"networks": list(same[host]), WHO: who},
            confidence=Confidence.LIKELY if usual else Confidence.POSSIBLE,
        )


def _slots(seen: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Hosts of one board that use other slots than most; then those with other device names."""
    used = {host: tuple(rail["pci"] for rail in facts["rails"]) for host, facts in seen.items()}
    counts = Counter(map(len, used.values())).most_common(1)
    used = {host: mine for host, mine in used.items() if len(mine) == counts[0][0]}
    odd = odd_ones_out(used)
    who = who_has_what((host, ", ".join(map(str, mine))) for host, mine in used.items())
    for host in odd.places if odd else ():
        usual = odd.usual if odd and odd.usual else None
        others = [usual] if usual else [mine for mine in used.values() if mine != used[host]]
        known = {pci for mine in others for pci in mine}
        mine = [rail for rail in seen[host]["rails"] if rail["pci"] not in known]
        hca = seen[host]["hca"]
        yield Finding(
            SLOTS,
            f"{HCA}={hca}: " * bool(hca)
            + ", ".join(f"{rail['name']} is {rail['pci']}" for rail in mine)
            + f"; the other hosts use {', '.join(sorted(known - set(used[host])))}",
            Where(hosts=(host,), interfaces=tuple(rail["name"] for rail in mine)),
            {"rails": seen[host]["rails"], WHO: who},
            confidence=Confidence.LIKELY if usual else Confidence.POSSIBLE,
        )
    alike = [host for host in used if odd is None or host not in odd.places]
    names = {host: tuple(rail["name"] for rail in seen[host]["rails"]) for host in alike}
    other = odd_ones_out(names)
    who = who_has_what((host, ", ".join(mine)) for host, mine in names.items())
    for host in other.places if other else ():
        usual = other.usual if other else None
        pairs = zip(seen[host]["rails"], usual or [""] * len(used[host]), strict=True)
        shown = [
            f"{rail['pci']} is {rail['name']}" + (f", elsewhere {name}" if name else "")
            for rail, name in pairs
            if rail["name"] != name
        ]
        yield Finding(NAMES, "; ".join(shown), Where(hosts=(host,)), {WHO: who})
