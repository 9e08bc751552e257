"""Hosts that took long to reach a store that was up, for no reason that another check sees. Pure.

A participant takes the time of its own joining (`Rank.joining`). Only two phases of it are judged:
the connection to the store, and taking a seat there. They take milliseconds wherever the store is
up: what comes before them is the start of torch, the examination of the host and its search for
rank 0, and what comes after is the wait for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    Rank,
    Severity,
    Where,
    fill,
    look,
    master_host,
    shell,
)
from nccl_doctor.toolkit.peers.loss import read_losses

SLOW = Kind(
    "joining-slow",
    Layer.RANKS,
    "A host took long to reach the store, and no check says why",
    "The job's own start connects to the same store in the same way, and takes as long or longer.",
    Fix(
        look(
            shell("time getent ahostsv6 ADDRESS; time getent hosts ADDRESS; time getent hosts NAME")
        ),
        look(shell("ss -tin dport = :NUMBER"), "while the job starts: retransmissions"),
    ),
    Severity.INFO,
)
_JUDGED = ("connect_s", "seat_s")
_LEAST_S = 2.0
"""A healthy connection takes milliseconds; one look-up that times out in this program, a second."""
_BUSY = 1.0
"""Load of a machine for each of its CPUs: from here on it explains slowness by itself."""


def slow_joining(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each host all of whose participants were slow, without an explanation."""
    slow = {host.id: (host, first) for host, first in _slow_hosts(cluster)}
    if not slow:
        return
    named = _with_slow_names(cluster)
    master = master_host(cluster)
    # The store looks up each of its clients, and shares the CPUs of its host.
    at_store = master is not None and (master.id in named or _is_busy(cluster, master))
    lossy = {seat for cause in read_losses(cluster).causes for pair in cause.pairs for seat in pair}
    could = _saw_store(cluster) - named
    for host, first in slow.values():
        seats = {rank.seat for rank in cluster.ranks_on(host)}
        if at_store or host.id not in could or lossy & seats or _is_busy(cluster, host):
            continue
        took = sum(first.joining.get(name, 0.0) for name in _JUDGED)
        yield Finding(
            SLOW,
            f"{took:.1f} s to connect to a store that was up and to take a seat there, "
            f"{first.joining.get('cpu_waited_s', 0.0):.1f} s of them without a CPU",
            Where(hosts=(host.label,)),
            {"phases": dict(first.joining)},
            _fix(first),
            confidence=Confidence.POSSIBLE,
        )


def _fix(rank: Rank) -> str:
    """The commands, with the address and the port of this job where they are known."""
    launch = rank.launch
    if launch is None or launch.master_addr is None:
        return ""
    name = rank.host.name or "NAME"
    return fill(SLOW.fix, ADDRESS=launch.master_addr, NUMBER=str(launch.master_port), NAME=name)


def _slow_hosts(cluster: Cluster) -> Iterator[tuple[Host, Rank]]:
    """Hosts with the participant that was the quickest, if even that one was slow."""
    quickest: dict[int, Rank] = {}
    for rank in cluster.present:
        known = quickest.get(rank.host.id)
        if rank.joining and (known is None or _lost_s(rank) < _lost_s(known)):
            quickest[rank.host.id] = rank
    for rank in quickest.values():
        if _lost_s(rank) >= _LEAST_S:
            yield rank.host, rank


def _lost_s(rank: Rank) -> float:
    took = sum(rank.joining.get(name, 0.0) for name in _JUDGED)
    return took - rank.joining.get("cpu_waited_s", 0.0)


def _is_busy(cluster: Cluster, host: Host) -> bool:
    return any(rank.joining.get("load", 0.0) > _BUSY for rank in cluster.ranks_on(host))


def _with_slow_names(cluster: Cluster) -> set[int]:
    """Ids of hosts with a slow look-up, which check `master_addr` reports."""
    found: set[int] = set()
    for rank, facts in cluster.facts("master_addr"):
        asked = [facts["master"], facts.get("ipv6") or {}, *facts["reverse"]]
        found |= {rank.host.id} if _any_slow(asked) else set()
    for rank, facts in cluster.facts("own_name"):
        found |= {rank.host.id} if _any_slow([facts["own"]]) else set()
    for rank, facts in cluster.facts("firewall", "matrix"):
        found |= {rank.host.id} if _any_slow(facts.get("clients", ())) else set()
    return found


def _any_slow(asked: Iterable[Mapping[str, Any]]) -> bool:
    return any(each.get("slow") or each.get("timed_out") for each in asked)


def _saw_store(cluster: Cluster) -> set[int]:
    """Ids of hosts that had found the store before they connected: the others waited for it."""
    return {
        rank.host.id
        for rank, facts in cluster.facts("port")
        if facts["server"] == "self"
        or ((facts.get("knock") or {}).get("last") or {}).get("answer") == "store"
    }
