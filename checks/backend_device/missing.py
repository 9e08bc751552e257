"""Missing GPUs, and what to type: the words are those of the maker of the GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nccl_doctor.api import Finding, Kind, Layer

MISSING = Kind(
    "gpu-missing",
    Layer.DEVICE,
    "Fewer GPUs than needed",
    "A rank without its own GPU fails, or takes the GPU of another rank.",
    "Start as many ranks as the host has GPUs, or get the missing GPU back: look for Xid in "
    "`dmesg`, compare `nvidia-smi -L` with `lspci`; in a container, request all GPUs.",
    drains=True,  # only where the configuration expects more than the kernel has
)
_OF_AMD = (
    "Start as many ranks as the host has GPUs, or get the missing GPU back: look for amdgpu in "
    "`dmesg`, compare `amd-smi list` with `lspci`; in a container, request all GPUs."
)
_RANKS = {
    "srun": "srun --ntasks-per-node={gpus}",
    "mpirun": "mpirun --map-by ppr:{gpus}:node",
    "mpi": "mpiexec -ppn {gpus}",
    "deepspeed": "deepspeed --num_gpus {gpus} (slots={gpus} in a hostfile)",
    "accelerate": "accelerate launch --num_processes {all}",
    "ray": "ScalingConfig(use_gpu=True, resources_per_worker={{'GPU': 1}})",
    "env": "{gpus} ranks on this host",
}
"""How many ranks a launcher starts on a host; by torchrun's option for all others."""
_GLOO = "without GPUs use the backend gloo on all hosts"


def fix_of_missing(facts: Mapping[str, Any]) -> str:
    """The fix for GPUs of the maker that torch is built for, else of those of the host."""
    on_host = facts["host_gpus"]
    is_nvidia = facts["cuda"] or on_host["nodes"] or on_host["proc"]
    is_amd = facts["rocm"] or (on_host["kfd"] and not is_nvidia)
    return _OF_AMD if is_amd else MISSING.fix


def ranks_for(gpus: int, launcher: str, nnodes: int) -> str:
    """Option that starts as many ranks on a host as it has GPUs."""
    line = _RANKS.get(launcher, "--nproc-per-node {gpus}")
    return line.format(gpus=gpus, all=gpus * nnodes)


def no_gpu(facts: Mapping[str, Any]) -> Finding:
    """The finding on a rank whose host shows no GPU at all."""
    nouveau = facts["host_gpus"].get("nouveau")
    if nouveau and not facts["host_gpus"]["driver"]:
        held = f"{nouveau} NVIDIA {'GPU' if nouveau == 1 else 'GPUs'}"
        text = f"no GPU: the kernel driver nouveau holds {held}; NVIDIA's driver is not loaded"
        fix = "install NVIDIA's driver, blacklist nouveau, and reboot"
        return Finding(MISSING, text, fix=fix)
    fix = "load the driver (modprobe nvidia, then nvidia-smi); in a container docker run --gpus "
    fix += "all, or a pod limit nvidia.com/gpu"
    if facts["rocm"]:
        fix = "load the driver (modprobe amdgpu, then amd-smi list); in a container docker run "
        fix += "--device /dev/kfd --device /dev/dri, or a pod limit amd.com/gpu"
    return Finding(MISSING, "no GPU: no /dev/nvidia<N>, no /dev/kfd", fix=f"{fix}; {_GLOO}")
