"""Missing GPUs, and what to type: the words are those of the maker of the GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nccl_doctor.api import Effect, Finding, Fix, Kind, Layer, On, Step, look, shell

_WAYS = ("start as many ranks as the host has GPUs", "in a container: request all")
MISSING = Kind(
    "gpu-missing",
    Layer.DEVICE,
    "Fewer GPUs than needed",
    "A rank without its own GPU fails, or takes the GPU of another rank.",
    Fix(
        look(shell("nvidia-smi -L"), "compare with the PCI bus"),
        look(shell("dmesg | grep -e Xid -e NVRM"), "why a GPU is gone"),
        alternatives=_WAYS,
    ),
    effects=(Effect.DRAINS,),  # only where the configuration expects more than the kernel has
)
HELD = Fix(
    look(shell("nvidia-smi --query-gpu=compute_mode --format=csv")),
    Step(shell("nvidia-smi -c DEFAULT"), note="as root, if it is Exclusive_Process", persists=True),
    alternatives=["end the process that has the GPU"],
)
"""For a setting or a process that keeps others from a GPU."""
_OF_AMD = Fix(
    look(shell("amd-smi list"), "compare with the PCI bus"),
    look(shell("dmesg | grep amdgpu"), "why a GPU is gone"),
    alternatives=_WAYS,
)
_RANKS = {
    "srun": "# --ntasks-per-node={}",
    "mpirun": "# --map-by ppr:{}:node",
    "mpi": "# -ppn {}",
    "pals": "# --ppn {}",
    "flux": "# --tasks-per-node={}",
    "jsrun": "# --tasks_per_rs {}",
    "deepspeed": "# --num_gpus {}",
    "accelerate": "# --num_processes {}",  # of all hosts
}
_BY_TORCHRUN = "# --nproc-per-node {}"
"""How many ranks a launcher starts on a host; by torchrun's option for all others."""
_BY_HAND = {
    "ray": "ScalingConfig(use_gpu=True, resources_per_worker={{'GPU': 1}})",
    "env": "start {gpus} ranks on this host",
}
_GLOO = "without GPUs use the backend gloo on all hosts"
_NVIDIA_DRIVER = Fix(
    Step(shell("modprobe nvidia"), note="as root, on the host itself"),
    look(shell("nvidia-smi")),
    alternatives=[
        Fix(Step(shell("# docker run --gpus all"))),
        "in Kubernetes: a limit nvidia.com/gpu",
        _GLOO,
    ],
)
_AMD_DRIVER = Fix(
    Step(shell("modprobe amdgpu"), note="as root, on the host itself"),
    look(shell("amd-smi list")),
    alternatives=[
        Fix(Step(shell("# docker run --device /dev/kfd --device /dev/dri"))),
        "in Kubernetes: a limit amd.com/gpu",
        _GLOO,
    ],
)


def fix_of_missing(facts: Mapping[str, Any]) -> str:
    """The fix for GPUs of the maker that torch is built for, else of those of the host."""
    on_host = facts["host_gpus"]
    is_nvidia = facts["cuda"] or on_host["nodes"] or on_host["proc"]
    is_amd = facts["rocm"] or (on_host["kfd"] and not is_nvidia)
    return _OF_AMD if is_amd else MISSING.fix


def ranks_for(gpus: int, launcher: str, nnodes: int, other: str) -> str:
    """The fix that starts as many ranks on a host as it has GPUs; `other`: another way."""
    if launcher in _BY_HAND:
        return Fix(text=_BY_HAND[launcher].format(gpus=gpus), alternatives=[other])
    option = _RANKS.get(launcher, _BY_TORCHRUN)
    line = shell(option, gpus * nnodes if launcher == "accelerate" else gpus)
    where = "in the line that starts the job"
    slots = f"; and slots={gpus} in its hostfile" if launcher == "deepspeed" else ""
    return Fix(Step(line, On.EVERY, note=where + slots), alternatives=[other])


def no_gpu(facts: Mapping[str, Any], *, needed: bool) -> Finding:
    """The finding on a rank whose host shows no GPU at all; `needed`: it should have some."""
    nouveau = facts["host_gpus"].get("nouveau")
    if nouveau and not facts["host_gpus"]["driver"]:
        held = f"{nouveau} NVIDIA {'GPU' if nouveau == 1 else 'GPUs'}"
        text = f"no GPU: the kernel driver nouveau holds {held}; NVIDIA's driver is not loaded"
        fix = "install NVIDIA's driver, blacklist nouveau, and reboot"
        return Finding(MISSING, text, fix=fix)
    fix = _AMD_DRIVER if facts["rocm"] else _NVIDIA_DRIVER
    if needed:
        others = [each for each in fix.alternatives if each != _GLOO]
        fix = Fix(*fix.steps, alternatives=others)
    return Finding(MISSING, "no GPU: no /dev/nvidia<N>, no /dev/kfd", fix=fix)


def show_all(facts: Mapping[str, Any]) -> Fix:
    """The fix for GPUs that variables hide."""
    return Fix(Step(shell("unset {:variable}", list(facts["visible"]))))
