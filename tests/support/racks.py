"""Facts of hosts whose GPUs share an NVLink domain (GB200 NVL72), on made-up clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nccl_doctor.api import ALONE, Cluster, Outcome
from tests.support.clusters import outcome
from tests.support.gpu_states import cluster_of, gpu, in_fabric, state

RACK = "11111111-2222-3333-4444-555555555555"
OTHER_RACK = "99999999-2222-3333-4444-555555555555"
GPUS = 4
MANAGED_ELSEWHERE = {"switches": 0, "running": None, "misfit": None}


def tray(
    node: int, domain: str | None = RACK, clique: int = 32766, chassis: str | None = "c1", **of: Any
) -> dict[str, Any]:
    """Facts of `gpu_state` on a healthy compute tray; `of` changes every GPU."""
    place = {"fabric": in_fabric(cluster_uuid=domain, clique=clique), "chassis": chassis}
    made = [gpu(node, index, **{"name": "NVIDIA GB200", **place, **of}) for index in range(GPUS)]
    return state(node, made, on_pci=GPUS, fabric_manager=MANAGED_ELSEWHERE)


def may(**changes: Any) -> dict[str, Any]:
    """Facts of `mnnvl` on a host with a channel, and nothing set."""
    made = {"channels": ["channel0"], "refused": {}, "off": "", "cluster_uuid": "", "clique": ""}
    return {**made, **changes}


def address(node: int) -> str:
    return f"192.168.77.{node + 1}"


def serves(*nodes: int, **changes: Any) -> dict[str, Any]:
    """Facts of `imex_service` on a host whose list names these hosts."""
    made = {
        "running": True,
        "file": "/etc/nvidia-imex/nodes_config.cfg",
        "nodes": [address(node) for node in nodes],
    }
    return {**made, **changes}


def rack(
    *trays: dict[str, Any] | Outcome | None,
    settings: Mapping[int, Any] | None = None,
    services: Mapping[int, Any] | None = None,
    **fields: Any,
) -> Cluster:
    """Hosts nd0, nd1, … with these facts of `gpu_state`; None: nothing is known.

    Every host has a channel, and a service that knows all of them, but for `settings` and
    `services`: node → what it has in place of them (None: nothing is known).
    """
    count = len(trays)
    given = {
        "mnnvl": {node: may() for node in range(count)} | dict(settings or {}),
        "imex_service": {node: serves(*range(count)) for node in range(count)}
        | dict(services or {}),
    }
    cluster = cluster_of(*trays, nproc=GPUS, **fields)
    hosts = {}
    for host in cluster.hosts:
        facts = dict(host.facts)
        for check, by_node in given.items():
            if by_node[host.id] is not None:
                facts[check] = {ALONE: outcome(by_node[host.id])}
        hosts[host.id] = replace(host, facts=facts)
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    return replace(cluster, hosts=tuple(hosts.values()), ranks=ranks)
