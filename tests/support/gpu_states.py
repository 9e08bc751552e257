"""Facts of hosts on their GPUs by NVML, on made-up clusters: healthy, lost, cut off."""

from __future__ import annotations

from typing import Any

from nccl_doctor.api import ALONE, Cluster
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.gpu_facts import H100
from tests.support.gpu_facts import facts as seen_by_torch

GIB = 1 << 30


def in_fabric(**changes: Any) -> dict[str, Any]:
    """The place of a healthy GPU in a fabric that its host has to itself."""
    made = {
        "state": "COMPLETED",
        "status": 0,
        "degraded": False,
        "health_mask": 0,
        "cluster_uuid": None,
        "clique": 0,
    }
    return {**made, **changes}


def gpu(node: int, index: int, **changes: Any) -> dict[str, Any]:
    """A healthy H100; an argument changes a field."""
    made = {
        "index": index,
        "lost": False,
        "refused": {},
        "uuid": f"GPU-{node}-{index}",
        "bus_id": f"0000:{0x18 + index:02x}:00.0",
        "name": H100,
        "numa": 0,
        "vbios": "96.00.99.00.01",
        "persistence": 1,
        "compute_mode": 0,
        "pstate": 0,
        "temperature": 31,
        "slowdown_temperature": 92,
        "margin_temperature": None,
        "memory_temperature": 40,
        "memory_max_temperature": 105,
        "power_mw": 70_000,
        "power_limit_mw": 700_000,
        "default_power_limit_mw": 700_000,
        "sm_clock_mhz": 1980,
        "max_sm_clock_mhz": 1980,
        "max_memory_clock_mhz": 2619,
        "set_sm_clock_mhz": 1980,
        "default_sm_clock_mhz": 1980,
        "set_memory_clock_mhz": 2619,
        "default_memory_clock_mhz": 2619,
        "virtualization": 0,
        "pcie_generation": 5,
        "max_pcie_generation": 5,
        "pcie_width": 16,
        "max_pcie_width": 16,
        "pcie_replays": 0,
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "ecc_uncorrected_lifetime": 0,
        "retired_pages_pending": None,
        "retired_pages": None,
        "memory": {"total": 80 * GIB, "used": GIB},
        "processes": [],
        "banks_without_spare": 0,
        "sram_threshold_exceeded": 0,
        "ecc": [1, 1],
        "mig": [0, 0],
        "remapped": {"corrected": 0, "uncorrected": 0, "pending": 0, "failed": 0},
        "throttle": 1,
        "recovery_action": "NONE",
        "gsp": [1, 1],
        "c2c": [],
        "nvlinks": [1] * 18,
        "nvlink_errors": {"replay": 0, "recovery": 0, "crc_flit": 0},
        "fabric": in_fabric(),
        "chassis": None,
    }
    return {**made, **changes}


def pairs_of(count: int) -> list[list[int]]:
    return [[one, other] for one in range(count) for other in range(one + 1, count)]


def near(count: int) -> list[list[int]]:
    """Pairs on one socket: the first half of the GPUs, and the second."""
    half = count // 2
    return [[a, b] for a, b in pairs_of(count) if (a < half) == (b < half)]


def far(count: int) -> list[list[int]]:
    return [pair for pair in pairs_of(count) if pair not in near(count)]


def p2p(reason: str, *bad: list[int], count: int = 8) -> dict[str, list[list[int]]]:
    """All pairs reach each other, but for these."""
    return {"OK": [pair for pair in pairs_of(count) if pair not in bad], reason: list(bad)}


def lost(index: int) -> dict[str, Any]:
    refused = {"GPU_IS_LOST": ["handle"]}
    return {"index": index, "lost": True, "refused": refused}


def state(node: int, gpus: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """Facts of a host with eight healthy GPUs."""
    made = [gpu(node, index) for index in range(8)] if gpus is None else gpus
    return {
        "error": None,
        "on_pci": 8,
        "driver": "580.95.05",
        "nvml": "13.580.95.05",
        "cuda": "13.0",
        "count": len(made),
        "gpus": made,
        "p2p": {"OK": pairs_of(len(made))},
        "nearest": {"NODE": near(len(made)), "SYSTEM": far(len(made))},
        "pairs_refused": {"p2p": {}, "nearest": {}},
        "pairs_error": None,
        "p2p_off": False,
        "kernel_log": {"source": "/dev/kmsg", "reason": "", "xids": [], "sxids": []},
        "fabric_manager": {"switches": 4, "running": True, "misfit": None},
        "own": [],
        **changes,
    }


def every(node: int, **changes: Any) -> dict[str, Any]:
    return state(node, [gpu(node, index, **changes) for index in range(8)])


def cluster_of(*hosts: Any, nproc: int = 8, **fields: Any) -> Cluster:
    names = [f"nd{node}" for node in range(len(hosts))]
    by_host = dict(zip(names, hosts, strict=True))
    fields = {"backend": "nccl", **fields}
    return make_cluster(names, nproc, check="gpu_state", by_host=by_host, **fields)


def with_backend(cluster: Cluster, by_rank: dict[int, Any]) -> Cluster:
    """The same with what `backend_device` observed at some ranks."""
    for seat, seen in by_rank.items():
        facts = {"backend_device": {ALONE: outcome(seen)}}
        cluster = change_rank(cluster, seat, facts=facts)
    return cluster


def torch_sees(hosts: int, **changes: Any) -> dict[int, Any]:
    return {
        node * 8 + local: seen_by_torch(node, local, **changes)
        for node in range(hosts)
        for local in range(8)
    }
