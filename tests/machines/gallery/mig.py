"""MIG slices: each rank has a half of an H100 of its own, on several GPUs."""

from __future__ import annotations

from typing import Any

from tests.machines.gallery import dgx_h100
from tests.machines.host import GIB, Host
from tests.machines.program import Fault, Machine, Severity

RANKS = 4


def part(host: Host, number: int) -> str:
    """UUID of a slice."""
    return f"MIG-{host.node:04x}{number:04x}-0000-5000-8000-000000000000"


def build(host: Host) -> None:
    dgx_h100.build(host)
    for gpu in range(8):
        host.nvml[str(gpu)] |= {"nvmlDeviceGetMigMode": "1 1", "fabric": "!NOT_SUPPORTED"}
        for call in [call for call in host.nvml[str(gpu)] if "NvLink" in call or "P2P" in call]:
            host.nvml[str(gpu)][call] = "!NOT_SUPPORTED"
    give(host, lambda local: (local, local))


def give(host: Host, of_rank: Any) -> None:
    """Rank → number of its GPU, and of its slice."""
    host.env_of_rank = lambda local: {"CUDA_VISIBLE_DEVICES": part(host, of_rank(local)[1])}
    host.parts = {
        local: (host.gpus[of_rank(local)[0]], part(host, of_rank(local)[1]), 40 * GIB)
        for local in range(RANKS)
    }


def one_gpu(host: Host) -> None:
    give(host, lambda local: (0 if local == 1 else local, local))


def same_part(host: Host) -> None:
    give(host, lambda local: (2, 2) if local == 3 else (local, local))


MACHINE = Machine(
    title="MIG slices",
    about="Four ranks on each host, each with half an H100 (3g.40gb) on a GPU of its own.",
    sources=("NVIDIA MIG user guide", "NCCL 2.30.3 release notes"),
    build=build,
    ranks=RANKS,
    launcher="srun",
    faults=(
        Fault(
            "Two ranks have slices of the same GPU, which NCCL 2.28 takes for one",
            "gpu-shared-by-ranks",
            one_gpu,
            severity=Severity.FAIL,
            ranks=(0, 1),
            devices=lambda host: (part(host, 0), part(host, 1)),
        ),
        Fault(
            "Two ranks have the same slice",
            "gpu-shared-by-ranks",
            same_part,
            severity=Severity.FAIL,
            ranks=(2, 3),
            devices=lambda host: (part(host, 2),),
        ),
        Fault(
            "One GPU has errors that ECC could not repair",
            "gpu-unhealthy",
            lambda host: host.nvml["1"].update(
                {
                    "nvmlDeviceGetTotalEccErrors.1.0": 3,
                    "nvmlDeviceGetTotalEccErrors.1.1": 3,
                    "nvmlDeviceGetRemappedRows": "0 1 1 0",
                }
            ),
            severity=Severity.FAIL,
            ranks=(1,),
            devices=lambda host: (host.gpus[1].uuid,),
        ),
    ),
)
