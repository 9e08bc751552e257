"""Facts of ranks on builds and GPUs, on healthy hosts with and without any."""

from __future__ import annotations

from typing import Any

from nccl_doctor.api import Cluster
from nccl_doctor.checks.gpu_work import GpuWork
from tests.support.clusters import make_cluster

H100 = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"
ARCHS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


def gpu(node: int, index: int, name: str = H100, capability: tuple[int, int] = (9, 0)) -> dict:
    return {
        "index": index,
        "name": name,
        "uuid": f"GPU-{node}-{index}",
        "memory_bytes": 80 << 30,
        "capability": list(capability),
        "arch": None,
    }


def facts(node: int, local: int, gpus: int = 8, **changes: Any) -> dict[str, Any]:
    """Facts of a rank of a healthy host with `gpus` H100s."""
    devices = changes.pop("devices", [gpu(node, index) for index in range(gpus)])
    made = {
        "torch": "2.13.0+cu130",
        "cuda": "13.0",
        "rocm": None,
        "nccl_built": True,
        "gloo_built": True,
        "nccl": "2.28.9",
        "visible": {},
        "host_gpus": {"nodes": gpus, "proc": gpus, "kfd": 0, "driver": "580.95.05"},
        "driver_cuda": "13.0",
        "driver_error": None,
        "devices": devices,
        "device": local % len(devices) if devices else None,
        "arch_list": ARCHS,
        "start_s": 0.5,
    }
    return {**made, **changes}


def cpu_facts(**changes: Any) -> dict[str, Any]:
    """Facts of a rank of a machine without GPUs, with the CPU build of torch."""
    none = {"nodes": 0, "proc": 0, "kfd": 0, "driver": None}
    cpu = {
        "torch": "2.13.0+cpu",
        "cuda": None,
        "nccl_built": False,
        "nccl": None,
        "host_gpus": none,
        "driver_cuda": None,
        "arch_list": [],
        "devices": [],
    }
    return facts(0, 0, **{**cpu, **changes})


def worked(rank: int, *tries: dict[str, float], **changes: Any) -> dict[str, Any]:
    """Facts of a rank whose GPU, one of four of its host, works."""
    facts = {
        "device": rank % 4,
        "model": H200,
        "uuid": f"GPU-{rank}",
        "start_s": 0.5,
        "context_s": 1.2,
        "wrong": [],
        "error": None,
        "peer": None,
        "tries": list(tries),
    }
    return {**facts, **changes}


def rates(
    half: float = 700, copy: float = 4300, to_device: float = 54, to_host: float = 55
) -> dict[str, float]:
    """A healthy H200: TFLOP/s, then GB/s."""
    across = {"to_device": to_device * 1e9, "to_host": to_host * 1e9}
    return {"half": half * 1e12, "copy": copy * 1e9, **across}


def cluster(by_rank: dict[int, Any], hosts: int = 2) -> Cluster:
    """Four ranks per host; those that are not given work well, and were not measured."""
    full = {rank: by_rank.get(rank, worked(rank)) for rank in range(4 * hosts)}
    names = [f"nd{i}" for i in range(hosts)]
    return make_cluster(names, 4, check=GpuWork.name, by_rank=full, backend="nccl")


def measured(odd: dict[int, Any], hosts: int = 2, **usual: float) -> Cluster:
    """All GPUs within 2 % of each other, but for the odd ones."""
    usual = {"half": 700, "copy": 4300, **usual}
    made = {}
    for rank in range(4 * hosts):
        one = rates(**{key: value * (1 + 0.005 * (rank % 4)) for key, value in usual.items()})
        made[rank] = odd.get(rank, worked(rank, one, one))
    return cluster(made, hosts)
