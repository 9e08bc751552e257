"""True if the kernel can remember all neighbours that the job gives a host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Severity,
    Step,
    Where,
    shell,
)
from nccl_doctor.toolkit.host import text_of
from nccl_doctor.toolkit.net.interfaces import is_alone, is_link_local, is_loopback, leads_inside

TABLE_SMALL = Kind(
    "neighbour-table-small",
    Layer.ROUTE,
    "The kernel cannot remember all neighbours of the host",
    "Packets to a neighbour for which there is no room are dropped: connections time out at random "
    "while the job starts (`neighbor table overflow!` in dmesg).",
    Fix(
        Step(
            shell(
                "sysctl -w net.ipv4.neigh.default.gc_thresh3=8192 "
                "net.ipv4.neigh.default.gc_thresh2=4096"
            )
        )
    ),
    Severity.WARN,
)

FAMILIES = {4: ("ipv4", "arp_cache"), 6: ("ipv6", "ndisc_cache")}
"""IP version → its name in /proc/sys/net, and in /proc/net/stat."""
_NEAR = 0.9


def read_table(family: str, table: str, root: Path) -> dict[str, int | None]:
    """`limit`, `entries` now and `overflows` since the start; None where the kernel does not say,
    as in a container.
    """
    limit = root / f"proc/sys/net/{family}/neigh/default/gc_thresh3"
    return {"limit": number(limit), **_counts(root / "proc/net/stat" / table)}


def number(path: Path) -> int | None:
    """The number in a file; None where there is none."""
    text = text_of(path)
    return int(text) if text.isdecimal() else None


def _counts(path: Path) -> dict[str, int | None]:
    """`entries`, which is the same in each row, and `overflows`, counted by each CPU."""
    rows = [line.split() for line in text_of(path).splitlines()]
    none: dict[str, int | None] = {"entries": None, "overflows": None}
    if len(rows) < 2 or "table_fulls" not in rows[0]:
        return none
    at = rows[0].index("table_fulls")
    try:
        return {
            "entries": int(rows[1][0], 16),
            "overflows": sum(int(row[at], 16) for row in rows[1:]),
        }
    except (ValueError, IndexError):
        return none


def judge_room(cluster: Cluster, name: str) -> Iterator[Finding]:
    """Findings on tables that are too small for the job, or were; `name`: of the check."""
    networks = {rank.host.id: networks_of(facts) for rank, facts in cluster.facts("interfaces")}
    members = Counter(net for nets in networks.values() for net in nets.elements())
    scale = max(1.0, (cluster.nnodes - 1) / max(1, len(networks) - 1))
    for rank, facts in cluster.facts(name):
        mine = networks.get(rank.host.id, Counter())
        for version, (family, _) in FAMILIES.items():
            if not facts["tables"][family]["limit"]:
                continue
            nets = [net for net in mine if (":" in net) == (version == 6)]
            wanted = round(scale * sum(members[net] - mine[net] for net in nets))
            yield from _table(rank, family, facts["tables"][family], wanted)


def networks_of(facts: Mapping[str, Any]) -> Counter[str]:
    """Networks of a host that may hold neighbours → number of its addresses there."""
    return Counter(
        net
        for nic in facts["interfaces"]
        if nic["running"] and not (nic["loopback"] or leads_inside(nic["name"]))
        for net in nic.get("subnets", ())
        if not is_alone(net) and not is_link_local(address := net.partition("/")[0])
        if not is_loopback(address)
    )


def _table(rank: Rank, family: str, table: Mapping[str, Any], wanted: int) -> Iterator[Finding]:
    limit, entries, overflows = table["limit"], table["entries"], table["overflows"]
    said = ""
    if wanted > _NEAR * limit:
        said = f"the job has {wanted} other addresses in its networks"
    elif overflows and entries is not None and entries > _NEAR * limit:
        said = f"{entries} are taken, and there was no room {overflows} times since the start"
    if said:
        size = 1 << (4 * max(wanted, limit) - 1).bit_length()
        keys = shell("net.{:name}.neigh.default.gc_thresh", family)
        yield Finding(
            TABLE_SMALL,
            f"room for {limit} {family.replace('ip', 'IP')} neighbours (gc_thresh3); {said}",
            Where(hosts=(rank.host.label,)),
            dict(table),
            fix=Fix(
                Step(
                    shell(
                        "sysctl -w {}3={} {}2={} {}1={}",
                        keys,
                        size,
                        keys,
                        size // 2,
                        keys,
                        size // 8,
                    )
                )
            ),
            confidence=Confidence.LIKELY,
        )
