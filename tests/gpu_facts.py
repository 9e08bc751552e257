"""What ranks observe of builds and GPUs, on healthy hosts with and without any."""

from __future__ import annotations

from typing import Any

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
    """What a rank of a healthy host with `gpus` H100s observes."""
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
    }
    return {**made, **changes}


def cpu_facts(**changes: Any) -> dict[str, Any]:
    """What a rank of a machine without GPUs observes, with the CPU build of torch."""
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
    """What a rank observes whose GPU, one of four of its host, works."""
    facts = {
        "device": rank % 4,
        "model": H200,
        "uuid": f"GPU-{rank}",
        "context_s": 1.2,
        "wrong": [],
        "error": None,
        "peer": None,
        "tries": list(tries),
    }
    return {**facts, **changes}
