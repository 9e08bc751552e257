"""Hosts with GPUs of several models. Pure."""

from __future__ import annotations

from collections import defaultdict

from nccl_doctor.api import Cluster


def hosts_of_several_models(cluster: Cluster) -> frozenset[int]:
    """Ids of hosts on which ranks, or NVML, see GPUs of more than one model.

    NVML also sees GPUs that a variable hides from every rank.
    """
    models: dict[int, set[str | None]] = defaultdict(set)
    for check, listed in (("backend_device", "devices"), ("gpu_state", "gpus")):
        for rank, facts in cluster.facts(check):
            models[rank.host.id].update([gpu.get("name") for gpu in facts.get(listed) or ()])
    return frozenset(host for host, names in models.items() if len(names - {None, ""}) > 1)
