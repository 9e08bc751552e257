"""Findings on hosts that left a partial report, and never signed in. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    AFTER_LOSS,
    Cluster,
    Confidence,
    Effect,
    Finding,
    Kind,
    Layer,
    Rank,
    Where,
    master_host,
    number_range,
    place_of,
)
from nccl_doctor.toolkit.firewall.portrules import shut_doors
from nccl_doctor.toolkit.hosts import lacks_torch, road_to_master
from nccl_doctor.toolkit.load_torch import TORCH_MISSING
from nccl_doctor.toolkit.shared_kinds import PORT_BLOCKED

HOST_ABSENT = Kind(
    "host-absent",
    Layer.RANKS,
    "A host never signed in",
    "Every other rank waits for its ranks until the rendezvous times out.",
    "Start the job on that host; the report there shows what keeps it from reaching the master.",
    effects=(Effect.TIMED_OUT,),
)


def kept_out(cluster: Cluster, spare: Mapping[int, str]) -> Iterator[Finding]:
    """Findings on hosts that only their own report shows.

    What keeps such a host out is on the path to rank 0's host, so that is the place, and a failure
    of a lower layer there explains it. A host that reached the store came too late, or left too
    early; one that had not tried yet was ended before: then the host is the place, unless it lived
    to say that it lost the store again, or a rule on rank 0's host came in between. Where nobody
    signed in, and two or more had reached the store, they share no more than the road to rank 0.

    Args:
        cluster: with the partial reports of hosts that never joined.
        spare: seat → code of the finding that explains why it is not there.
    """
    master = master_host(cluster)
    if master is None or not master.joined:
        return  # rank 0 did not wait for anybody
    others = [host for host in cluster.present_hosts if host.id != master.id]
    if all(host.joined for host in others):
        return
    found = {rank.host.id for rank, facts in cluster.facts("port") if _is_open(facts)}
    examined = {rank.host.id for rank, facts in cluster.observed() if any(facts.values())}
    closed = [door for door in shut_doors(cluster) if door.hit.get("anyone")]
    lost_it = {
        rank.host.id
        for rank, facts in cluster.observed()
        if any(AFTER_LOSS in rounds for rounds in facts.values())
    }
    alone = not any(host.joined for host in others) and len(found & {h.id for h in others}) > 1
    ranks_of: dict[int, list[Rank]] = {}
    for rank in cluster.ranks:
        ranks_of.setdefault(rank.host.id, []).append(rank)
    for host in (host for host in others if not host.joined):
        ranks = ranks_of.get(host.id, [])
        where = place_of(ranks) | Where(hosts=(host.label,))
        fix = f"start it within {cluster.join_timeout_s:g} s of the others, and read its own report"
        if host.id in found & lost_it:
            fix = "look at what is between the hosts, and at the load of rank 0's host at that time"
            seen = "reached the store, then lost the connection before it was signed in"
            where = road_to_master(cluster, host)
        elif host.id in found:
            seen = "reached the store, but was not signed in when rank 0 counted the hosts"
            where = road_to_master(cluster, host) if alone else where
        elif host.id not in examined:
            seen = "began, and ended or hung before it tried to sign in"
            fix = "read its own report and its log: what it did last is there"
        else:
            seen, where = "could not reach rank 0", road_to_master(cluster, host)
            fix = "read its own report: the findings about MASTER_ADDR and MASTER_PORT there"
        stopped = any(door.came_later or host.id not in found for door in closed)
        shut_out = PORT_BLOCKED.code if stopped else None
        if lacks_torch(cluster, host):
            shut_out = TORCH_MISSING
        numbers = [rank.rank for rank in ranks if rank.rank is not None]
        lacks = f"rank{'s' * (len(numbers) > 1)} {number_range(numbers)} of {cluster.world_size}"
        yield Finding(
            HOST_ABSENT,
            f"{lacks if numbers else 'unknown ranks'}: the host {seen}",
            where,
            fix=fix,
            confidence=Confidence.LIKELY,
            explained_by=next((spare[rank.seat] for rank in ranks if rank.seat in spare), shut_out),
        )


def _is_open(facts: Mapping[str, Any]) -> bool:
    """True if a host reached the store, by the facts of check port."""
    road = facts.get("knock") or {}
    answers = (road.get("last") or {}).get("answer") == "store"
    return answers and all(outcome != "dropped" for _, outcome in road.get("passed", ()))
