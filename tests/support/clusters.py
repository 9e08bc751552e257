"""Made-up clusters: what a judge sees, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.model.cluster import (
    ALONE,
    Cluster,
    Facts,
    Host,
    Outcome,
    OutcomeStatus,
    Rank,
    facts_to_json,
)
from nccl_doctor.model.codec import Node
from nccl_doctor.model.findings import Level
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.report import facts_from_json


def outcome(value: Mapping[str, Any] | Outcome) -> Outcome:
    return value if isinstance(value, Outcome) else Outcome(OutcomeStatus.OK, facts=dict(value))


def make_cluster(
    hosts: Sequence[str] = ("nd0", "nd1"),
    nproc: int = 2,
    *,
    check: str = "",
    by_host: Mapping[str, Any] | None = None,
    by_rank: Mapping[int, Any] | None = None,
    round_name: str = ALONE,
    absent_nodes: Sequence[int] = (),
    backend: str = "gloo",
    env: Mapping[int, Mapping[str, str]] | None = None,
    **cluster_fields: Any,
) -> Cluster:
    """A cluster of `len(hosts)` x `nproc` ranks, healthy but for what is said.

    `by_host` and `by_rank` are the facts (or a whole `Outcome`) of `check` in `round_name`; a host
    or rank that is not in them has no outcome at all. Nodes in `absent_nodes` never signed in.
    Change single ranks afterwards with `change_rank`.
    """
    world = len(hosts) * nproc
    made_hosts = []
    ranks = []
    for node, name in enumerate(hosts):
        gone = node in absent_nodes
        facts = (by_host or {}).get(name)
        made_hosts.append(
            Host(
                id=node,
                name=None if gone else name,
                node_rank=node,
                reported=not gone,
                addresses=() if gone else (f"192.168.77.{node + 1}",),
                facts={} if facts is None or gone else {check: {round_name: outcome(facts)}},
                joined=cluster_fields.get("complete", True),
            )
        )
        for local in range(nproc):
            number = node * nproc + local
            mine = (by_rank or {}).get(number)
            ranks.append(
                Rank(
                    seat=number,
                    rank=number,
                    local_rank=local,
                    host=made_hosts[-1],
                    reported=not gone,
                    launch=None
                    if gone
                    else Launch(
                        launcher="torchrun",
                        rank=number,
                        world_size=world,
                        local_rank=local,
                        local_world_size=nproc,
                        node_rank=node,
                        nnodes=len(hosts),
                        master_addr=hosts[0],
                        master_port=29500,
                    ),
                    env=(env or {}).get(number, {}),
                    pid=None if gone else 1000 + number,
                    facts={} if mine is None or gone else {check: {round_name: outcome(mine)}},
                )
            )
    cluster = Cluster(
        world_size=world,
        nnodes=len(hosts),
        backend=backend,
        level=Level.STANDARD,
        hosts=tuple(made_hosts),
        ranks=tuple(ranks),
    )
    return replace(cluster, **cluster_fields)


def with_round(
    cluster: Cluster, check: str, name: str, by_host: Mapping[str, Mapping[str, Any] | Outcome]
) -> Cluster:
    """The same cluster with one more round of a check, by the names of hosts."""
    hosts = []
    for host in cluster.hosts:
        facts = {each: dict(rounds) for each, rounds in host.facts.items()}
        if host.name in by_host:
            facts.setdefault(check, {})[name] = outcome(by_host[host.name])
        hosts.append(replace(host, facts=reread(facts)))
    places = {host.id: host for host in hosts}
    ranks = tuple(replace(rank, host=places[rank.host.id]) for rank in cluster.ranks)
    return replace(cluster, hosts=tuple(hosts), ranks=ranks)


def shut_out(cluster: Cluster, *names: str) -> Cluster:
    """A copy in which these hosts never got in: only their own view of them is known."""
    hosts = {host.id: replace(host, joined=host.name not in names) for host in cluster.hosts}
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    return replace(cluster, hosts=tuple(hosts.values()), ranks=ranks)


def on_one_machine(cluster: Cluster, *names: str) -> Cluster:
    """A copy in which these hosts are containers with one network, as with `hostNetwork: true`."""
    first = next(host for host in cluster.hosts if host.name in names)
    hosts = {
        host.id: replace(host, key=f"digest-{host.name}.digest", addresses=first.addresses)
        if host.name in names
        else host
        for host in cluster.hosts
    }
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    return replace(cluster, hosts=tuple(hosts.values()), ranks=ranks)


def change_rank(
    cluster: Cluster, seat: int, *, launch: Mapping[str, Any] | None = None, **fields: Any
) -> Cluster:
    """A copy of the cluster with one participant changed; `launch` changes its launch record."""
    ranks = []
    for rank in cluster.ranks:
        if rank.seat == seat:
            if launch is not None and rank.launch is not None:
                fields["launch"] = replace(rank.launch, **launch)
            rank = replace(rank, **fields)
        ranks.append(rank)
    return replace(cluster, ranks=tuple(ranks))


def reread(facts: Facts) -> Facts:
    """Facts as re-read from a saved report: lists, and text for keys."""
    return facts_from_json(Node("rank", {"facts": json.loads(json.dumps(facts_to_json(facts)))}))
