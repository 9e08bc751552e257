"""MPS, NVIDIA's Multi-Process Service, in the facts of check `mps`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nccl_doctor.model.cluster import Cluster


def serves_here(facts: Mapping[str, Any]) -> bool:
    """True if processes of this job share their GPUs through MPS.

    Args:
        facts: of check `mps`. A file that a dead daemon left counts only where the processes of the
            host cannot be seen.
    """
    seen = facts["daemons"] or facts["servers"]
    return bool(facts["control"] and (seen or not facts["all_seen"]))


def hosts_with_mps(cluster: Cluster) -> dict[int, bool]:
    """Host → whether MPS serves it, for the hosts where that is known."""
    return {rank.host.id: serves_here(facts) for rank, facts in cluster.facts("mps")}
