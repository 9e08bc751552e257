"""Deadlines of attempts of groups. Pure."""

from __future__ import annotations

import math

from nccl_doctor.model.cluster import ALONE, Cluster

_MOST_S = 60.0
UNKNOWN_S = 25.0
"""Seconds if it was not measured: eight GPUs without persistence mode need about 20 s to wake."""
_STARTS = ("backend_device", "gpu_work")
"""Names of the checks whose facts hold the time that the driver took."""


def attempt_deadline(cluster: Cluster) -> float:
    """Seconds for one attempt: what the user allows, after the GPU driver has started.

    Every attempt runs in its own processes. Without persistence mode the driver releases a GPU with
    the last process that uses it, so each attempt waits until it is up again.
    """
    return cluster.collective_timeout_s + driver_start_s(cluster)


def driver_start_s(cluster: Cluster) -> float:
    """Seconds, rounded up, that the slowest rank needed for driver and context: at most 60; 0 where
    no group uses a GPU.
    """
    if cluster.backend != "nccl":
        return 0.0
    took = [
        (facts.get("start_s") or 0.0) + (facts.get("context_s") or 0.0)
        for check in _STARTS
        for _, facts in cluster.facts(check, ALONE)
        if facts.get("start_s") is not None
    ]
    return float(min(_MOST_S, math.ceil(max(took, default=UNKNOWN_S))))
