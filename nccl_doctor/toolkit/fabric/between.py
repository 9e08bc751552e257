"""Obstacles to direct copies between the GPUs of one host. Pure."""

from __future__ import annotations

from nccl_doctor.model.cluster import Cluster, Host
from nccl_doctor.toolkit.fabric.direct import redirecting_bridges, translating, unread_bridges

CHECK = "gpu_direct"
"""The check whose facts these are."""


def in_the_way(cluster: Cluster, host: Host) -> tuple[str, ...]:
    """Clauses on what check `gpu_direct` saw between the GPUs of a host, or could not read."""
    for rank, facts in cluster.facts(CHECK):
        if rank.host.id == host.id:
            acs, iommu = len(redirecting_bridges(facts)), len(translating(facts))
            clauses = [f"ACS is on for {acs} PCIe bridges"] if acs else []
            clauses += [f"the IOMMU translates for {iommu} GPUs and NICs"] if iommu else []
            unread = 0 if acs else len(unread_bridges(facts))
            clauses += [f"ACS of {unread} PCIe bridges was not read: it needs root"] * bool(unread)
            return tuple(clauses)
    return ()
