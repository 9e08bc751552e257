"""Interfaces of a host in one network that nothing keeps apart (ARP flux). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Step,
    Where,
    shell,
)

from .answers import APART

FLUX = Kind(
    "arp-flux",
    Layer.ROUTE,
    "Interfaces of one host share a network, and either answers for both",
    "Other hosts learn the hardware address of the wrong one: one NIC carries the data of both, "
    "and RoCE packets are lost.",
    APART,
    Severity.WARN,
)


def judge_flux(cluster: Cluster, known: Collection[str]) -> Iterator[Finding]:
    """One finding for each network of a host, but for the hosts whose case is `known`.

    Healthy are rails that have a network each, an arp_ignore, or routes by source address.
    """
    shared = [(rank, facts["shared"]) for rank, facts in cluster.facts("rp_filter")]
    data = _data_interfaces(cluster) if any(nets for _, nets in shared) else {}
    for rank, nets in shared:
        host = rank.host.label
        carrying = data.get(rank.seat, set())
        for net, entries in nets.items() if host not in known else ():
            mine = [entry for entry in entries if entry[0] in carrying]
            # Reports of earlier versions end before these values.
            loose = [nic for nic, _, _, _, _, ignore, _ in filter(_is_whole, mine) if not ignore]
            astray = [
                (nic, address)
                for nic, address, _, _, back, *_ in filter(_is_whole, mine)
                if back is False
            ]
            if len(set(loose)) < 2 or not astray:
                continue
            nic, address = astray[0]
            yield Finding(
                FLUX,
                f"{', '.join(loose)} in {net}: arp_ignore=0, and what is sent from {address} does "
                f"not leave by {nic}",
                Where(hosts=(host,), interfaces=tuple(sorted(set(loose)))),
                {"network": net, "interfaces": mine},
                fix=Fix(*APART.steps, *_own_ways(net, astray), alternatives=APART.alternatives),
                confidence=Confidence.LIKELY,
            )


def _own_ways(net: str, astray: Iterable[tuple[str, str]]) -> Iterator[Step]:
    """The steps by which what is sent from an address leaves by its interface."""
    for table, (nic, address) in enumerate(astray, 101):
        route = shell("{} dev {} src {} table {}", net, nic, address, table)
        rule = shell("from {} table {}", address, table)
        yield Step(shell("ip route add {}", route), undo=shell("ip route del {}", route))
        yield Step(shell("ip rule add {}", rule), undo=shell("ip rule del {}", rule))


def _is_whole(entry: Collection[Any]) -> bool:
    return len(entry) == 7


def _data_interfaces(cluster: Cluster) -> Mapping[int, set[str]]:
    """Seat of a host → interfaces that carry the data of NCCL: RoCE rails, or sockets."""
    found: dict[int, set[str]] = {}
    if "nccl" not in cluster.backend:
        return found
    for rank, facts in cluster.facts("rails"):
        nics = {rail["nic"] for rail in facts["rails"] if rail["nic"] and rail["address"]}
        found.setdefault(rank.seat, set()).update(nics)
    for rank, facts in cluster.facts("interfaces"):
        if facts.get("nccl_data") == "sockets":
            picks = facts["choices"]["nccl-sockets"]["picks"]
            found.setdefault(rank.seat, set()).update(nic for nic, _ in picks)
    return found
