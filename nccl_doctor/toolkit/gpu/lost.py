"""Rules for facts of `gpu_state` that several checks use: lost GPUs, the fabric manager, programs
that work on the GPUs. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.model.cluster import Cluster, Evidence
from nccl_doctor.model.findings import Confidence, Effect, Finding
from nccl_doctor.toolkit.gpu.ends import certainty_of, is_gone
from nccl_doctor.toolkit.gpu.nvml import STEP

CHECK = "gpu_state"
"""The check whose facts these are."""
AMD = "amd_gpus"
"""The check that does the same for AMD GPUs."""
_STARTING_S = 600


def hosts_without_gpu(cluster: Cluster) -> frozenset[int]:
    """Ids of hosts with a lost GPU: it may be why CUDA or HIP does not start there."""
    found = {
        item.rank.host.id
        for item in ended_in_driver(cluster)
        if "gpu" in item.outcome.breadcrumbs[-1] and certainty_of(item.outcome) is not None
    }
    for check in (CHECK, AMD):
        for rank, facts in cluster.facts(check):
            if any(is_gone(gpu) for gpu in facts["gpus"]):
                found.add(rank.host.id)
    return frozenset(found)


def ended_in_driver(cluster: Cluster) -> Iterator[Evidence]:
    """Observations that hung or died in a call to the driver."""
    return (item for item in cluster.ended(CHECK) if item.outcome.last_step == STEP)


def facts_by_host(cluster: Cluster) -> dict[int, Mapping[str, Any]]:
    """Id of a host → what `gpu_state` saw there."""
    return {rank.host.id: facts for rank, facts in cluster.facts(CHECK)}


def manager_is_down(seen: Mapping[str, Any] | None) -> bool:
    """True if this host has NVSwitches of its own, and no fabric manager sets them up.

    Not so in a virtual machine, or where other hosts do it (no switches here), in a container, and
    just after the start, when its turn may still come.

    Args:
        seen: `fabric_manager` of the facts of `gpu_state`.
    """
    if not seen or not seen["switches"] or seen["running"] is not False:
        return False
    up_s = seen.get("up_s")
    return up_s is None or up_s > _STARTING_S


def unless_serviced(found: Finding, facts: Mapping[str, Any]) -> Finding:
    """The finding; only likely while a program resets the GPUs of the host, tests them, or installs
    a driver: then they answer no other program, and nothing is broken.

    `facts` are those of `gpu_state` on its host, empty if there are none.
    """
    names = facts.get("in_service") or ()
    if not (
        names and Effect.DRAINS in found.kind.effects and found.confidence is Confidence.CERTAIN
    ):
        return found
    return found.replaced(
        message=f"{found.message}; but right now somebody works on the GPUs: {', '.join(names)}",
        confidence=Confidence.LIKELY,
    )
