"""NVLink between hosts (MNNVL): which hosts share an NVLink domain, and where NCCL would use it.
Pure.

Hosts of one domain report the same cluster UUID. GPUs of one domain reach each other if they are in
the same clique, too. Source: `ncclMnnvlCheck` and `fillInfo` in NCCL's src/mnnvl.cc and
src/init.cc, 2.25.1 to 2.30.7; before, it takes the same GPUs and does not try whether they work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nccl_doctor.model.cluster import Cluster, Host
from nccl_doctor.toolkit.gpu.lost import CHECK as GPU_STATE
from nccl_doctor.toolkit.hosts import spans_machines

MNNVL = "mnnvl"
"""The check whose facts say what NCCL is told about it: `off`, `cluster_uuid`, `clique`."""


class Clique(NamedTuple):
    """GPUs that reach each other's memory over NVLink, on one host or on several."""

    cluster_uuid: str
    number: int

    def __str__(self) -> str:
        return f"clique {self.number} of NVLink domain {self.cluster_uuid}"


def fabric_gpus(facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """GPUs in the facts of `gpu_state` that answer, and report their place in the NVLink fabric."""
    for gpu in facts["gpus"]:
        if not gpu.get("lost") and gpu.get("fabric"):
            yield gpu


def clique_of(gpu: Mapping[str, Any]) -> Clique | None:
    """The clique of a GPU; None until it is registered, and in a fabric of its host alone."""
    fabric = gpu["fabric"]
    # Facts of an older version do not name the domain.
    if fabric["state"] != "COMPLETED" or fabric["status"] or not fabric.get("cluster_uuid"):
        return None
    return Clique(fabric["cluster_uuid"], fabric["clique"])


def cliques_of_hosts(cluster: Cluster) -> dict[int, Clique]:
    """Id of a host → the clique of all its GPUs; hosts without one, or with several, are left
    out.
    """
    found = {}
    for rank, facts in cluster.facts(GPU_STATE):
        cliques = {clique_of(gpu) for gpu in fabric_gpus(facts)}
        if len(cliques) == 1 and (clique := cliques.pop()) is not None:
            found[rank.host.id] = clique
    return found


def mnnvl_hosts(cluster: Cluster) -> dict[int, Host]:
    """Id → host on which NCCL would send to other GPUs by handles of the NVLink fabric.

    Those in whose clique more than one rank is, of a job of several machines. NCCL leaves it for
    the whole job if one GPU is not registered, or is in no domain; so none are returned then.
    """
    if cluster.backend != "nccl" or not spans_machines(cluster):
        return {}
    off = {rank.host.id for rank, facts in cluster.facts(MNNVL) if facts["off"]}
    hosts: dict[int, Host] = {}
    cliques: dict[int, set[Clique]] = defaultdict(set)
    for rank, facts in cluster.facts(GPU_STATE):
        for gpu in fabric_gpus(facts):
            clique = clique_of(gpu)
            if clique is None:
                return {}
            hosts[rank.host.id] = rank.host
            cliques[rank.host.id].add(clique)
    ranks: Counter[Clique] = Counter()
    for number, host in hosts.items():
        for clique in cliques[number]:
            ranks[clique] += len(cluster.ranks_on(host))
    return {
        number: host
        for number, host in hosts.items()
        if number not in off and any(ranks[clique] > 1 for clique in cliques[number])
    }


def neighbours(cluster: Cluster) -> dict[Clique, list[Host]]:
    """Clique → the hosts, two or more, between which NCCL would use NVLink."""
    cliques, found = cliques_of_hosts(cluster), defaultdict(list)
    for number, host in mnnvl_hosts(cluster).items():
        if number in cliques:
            found[cliques[number]].append(host)
    return {clique: hosts for clique, hosts in found.items() if len(hosts) > 1}
