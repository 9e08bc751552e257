"""What may keep GPUs of one host from reaching each other's memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nccl_doctor.model.cluster import Cluster, Host, OutcomeStatus
from nccl_doctor.toolkit.fabric.direct import redirecting_bridges, translating, unread_bridges

_HAS_NONE = ("NOT_SUPPORTED", "INVALID_ARGUMENT")
"""Answers of NVML about the first link of a GPU without NVLink."""


def in_the_way(cluster: Cluster, host: Host) -> tuple[str, ...]:
    """Clauses on what check `gpu_direct` saw between the GPUs of a host, or could not read."""
    for rank, facts in cluster.facts("gpu_direct"):
        if rank.host.id == host.id:
            acs, iommu = len(redirecting_bridges(facts)), len(translating(facts))
            clauses = [f"ACS is on for {acs} PCIe bridges"] if acs else []
            clauses += [f"the IOMMU translates for {iommu} GPUs and NICs"] if iommu else []
            unread = 0 if acs else len(unread_bridges(facts))
            clauses += [f"ACS of {unread} PCIe bridges was not read: it needs root"] * bool(unread)
            return tuple(clauses)
    return ()


def joined_by_pcie(cluster: Cluster, host: Host) -> bool:
    """Whether a host has several GPUs without NVLink, as check `gpu_state` saw it."""
    for rank, facts in cluster.facts("gpu_state"):
        if rank.host.id == host.id:
            gpus = facts["gpus"]
            return len(gpus) > 1 and all(_has_no_nvlink(gpu) for gpu in gpus)
    return False


def copies_arrive(cluster: Cluster, host: Host) -> bool:
    """Whether ranks of a host copied from GPU to GPU (check `gpu_work`), and all data arrived."""
    ends = [item.outcome for item in cluster.evidence("gpu_work") if item.host.id == host.id]
    if any(end.status in (OutcomeStatus.HUNG, OutcomeStatus.DIED) for end in ends):
        return False
    peers = [peer for end in ends if (peer := end.facts.get("peer"))]
    return bool(peers) and not any(peer["error"] or peer["wrong"] for peer in peers)


def _has_no_nvlink(gpu: Mapping[str, Any]) -> bool:
    refused = {name for name, fields in (gpu.get("refused") or {}).items() if "nvlinks" in fields}
    return gpu.get("nvlinks") is not None and not any(gpu["nvlinks"]) and refused <= {*_HAS_NONE}
