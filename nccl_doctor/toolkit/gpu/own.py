"""The whole GPU that a rank has to itself, and what the driver says of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.toolkit.gpu.lost import CHECK as GPU_STATE

_WHOLE = (0, 1)
"""NVML_GPU_VIRTUALIZATION_MODE_*: none, and passed through to a virtual machine."""


@dataclass(frozen=True)
class OwnGpu:
    """A GPU: `model` is the name that torch gives, `state` its facts of check `gpu_state`, `seen`
    those of `backend_device`.
    """

    model: str
    state: Mapping[str, Any]
    seen: Mapping[str, Any]

    @property
    def is_passed_through(self) -> bool:
        """True if this is a virtual machine: its PCIe may not be that of the host."""
        return bool(self.state["virtualization"])


def own_gpus(cluster: Cluster) -> Mapping[int, OwnGpu]:
    """Seat → the GPU that the rank takes.

    Published rates are those of a whole GPU. So ranks are left out whose GPU is not known to the
    driver, does not answer, is shared with another rank, is a part of one (MIG) or a virtual one.
    """
    return cluster.once(own_gpus, (GPU_STATE, "backend_device"), lambda: _own_gpus(cluster))


def _own_gpus(cluster: Cluster) -> dict[int, OwnGpu]:
    states = {
        (rank.host.id, gpu["uuid"]): gpu
        for rank, facts in cluster.facts(GPU_STATE)
        for gpu in facts["gpus"]
        if gpu.get("uuid")
    }
    taken: dict[int, tuple[int, Mapping[str, Any]]] = {}
    for rank, facts in cluster.facts("backend_device"):
        index = facts["device"]
        if index is not None and facts["devices"][index]["uuid"]:
            taken[rank.seat] = (rank.host.id, facts["devices"][index])
    users = Counter(device["uuid"] for _, device in taken.values())
    return {
        seat: OwnGpu(str(device["name"]), state, device)
        for seat, (host, device) in taken.items()
        if users[device["uuid"]] == 1
        and (state := states.get((host, device["uuid"]))) is not None
        and _is_whole(state)
    }


def _is_whole(state: Mapping[str, Any]) -> bool:
    answers = not (state["lost"] or "wedged" in state or "raised" in state)
    return (
        answers
        and state.get("virtualization") in _WHOLE
        and not (state.get("mig") and state["mig"][0])
    )
