"""The NCCL that each rank loads, which may differ from the one that torch was built with. Pure."""

from __future__ import annotations

from nccl_doctor.model.cluster import Cluster

CHECK = "nccl_library"
"""The check whose facts these are."""


def loaded_nccl(cluster: Cluster) -> dict[int, str]:
    """Seat → version of NCCL, as check `nccl_library` found it.

    If NCCL is linked into torch, the version that torch was built with. Ranks whose version is not
    known are left out.
    """
    found = {}
    for rank, facts in cluster.facts(CHECK):
        version = (facts.get("loaded") or {}).get("version") or facts.get("built")
        if version:
            found[rank.seat] = version
    return found
