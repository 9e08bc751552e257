"""Slurm with one GPU per task: CUDA_VISIBLE_DEVICES shows each rank its own GPU, as number 0."""

from __future__ import annotations

from tests.machines.gallery import dgx_h100
from tests.machines.host import Host
from tests.machines.program import Fault, Machine, Severity


def build(host: Host) -> None:
    dgx_h100.build(host)
    host.env_of_rank = lambda local: {"CUDA_VISIBLE_DEVICES": str(local)}


def same_gpu_twice(host: Host) -> None:
    host.env_of_rank = lambda local: {"CUDA_VISIBLE_DEVICES": "3" if local == 4 else str(local)}


def none_for_one(host: Host) -> None:
    host.env_of_rank = lambda local: {"CUDA_VISIBLE_DEVICES": "" if local == 6 else str(local)}


def constrained(host: Host) -> None:
    """Every task sees one GPU, as number 0, and so does NVML."""
    host.env_of_rank = lambda local: {"CUDA_VISIBLE_DEVICES": "0"}
    host.seen_by_rank = lambda local: (local,)
    host.nvml = {"-": {**host.nvml["-"], "nvmlDeviceGetCount_v2": 1}, "0": host.nvml["0"]}


MACHINE = Machine(
    title="Slurm, one GPU per task",
    about="`srun --gpus-per-task=1` on such hosts, with CUDA_VISIBLE_DEVICES alone: NCCL copies "
    "between GPUs though each rank sees only its own.",
    sources=("Slurm documentation, gres.html and cgroup.conf", "NCCL, src/transport/p2p.cc"),
    build=build,
    launcher="srun",
    faults=(
        Fault(
            "Two tasks were given the same GPU",
            "gpu-shared-by-ranks",
            same_gpu_twice,
            severity=Severity.FAIL,
            ranks=(3, 4),
            devices=lambda host: (host.gpus[3].uuid,),
        ),
        Fault(
            "One task was given no GPU",
            "gpu-hidden",
            none_for_one,
            severity=Severity.FAIL,
            ranks=(6,),
        ),
        Fault(
            "Control groups hide the GPUs of the other tasks (ConstrainDevices)",
            "gpu-hidden",
            constrained,
            ranks=tuple(range(8)),
        ),
    ),
)
