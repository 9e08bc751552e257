"""Hosts with a lost GPU, by the facts of `gpu_state`. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nccl_doctor.model.cluster import ALONE, Cluster, Evidence, OutcomeStatus
from nccl_doctor.toolkit.gpu.nvml import STEP

CHECK = "gpu_state"
"""The check whose facts these are."""


def hosts_without_gpu(cluster: Cluster) -> frozenset[int]:
    """Ids of hosts with a lost GPU: it may be the reason that CUDA does not start there."""
    found = {
        item.rank.host.id
        for item in ended_in_driver(cluster)
        if "gpu" in item.outcome.breadcrumbs[-1]
    }
    for rank, facts in cluster.facts(CHECK):
        if any(gpu["lost"] or gpu.get("wedged") for gpu in facts["gpus"]):
            found.add(rank.host.id)
    return frozenset(found)


def ended_in_driver(cluster: Cluster) -> Iterator[Evidence]:
    """Observations that hung or died in a call to the driver."""
    for item in cluster.evidence(CHECK, ALONE):
        end = item.outcome
        if end.status in (OutcomeStatus.HUNG, OutcomeStatus.DIED) and end.last_step == STEP:
            yield item
