"""Kinds of finding about the state of a GPU that more than one check uses. Pure."""

from __future__ import annotations

from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Effect, Kind, Layer, Severity
from nccl_doctor.model.fixes import Fix, Step, look

# Drains: GPU_IS_LOST, or a reader held in state D or ended by a fault signal. What else makes that:
# the kernel that kills for memory, a scheduler or a person that stops or kills the reader, a paused
# container, a library on a file server that is gone (nothing is known then: `ends`); a busy host,
# and GPUs that wake one after the other (likely); a library that crashes at every GPU; a reset, a
# diagnosis or a new driver under way (`in_service`); a rank that works with the GPU all the same.
BUNDLE = Fix(look(shell("nccl-doctor report bundle FILE"), "has what is needed to fix nccl-doctor"))
"""What to do where the state of a GPU cannot be read."""

GPU_LOST = Kind(
    "gpu-lost",
    Layer.DEVICE,
    "A GPU does not answer any more",
    "It fell off the PCIe bus, or the driver waits for it forever; a rank that uses it fails "
    "or hangs, and CUDA may not start on this host at all.",
    Fix(
        look(shell("dmesg | grep -e Xid -e NVRM")),
        alternatives=[
            "drain the host and power-cycle it; if the GPU is lost again, have it reseated or "
            "replaced"
        ],
    ),
    effects=(Effect.DRAINS,),
)
GPU_BUSY = Kind(
    "gpu-busy",
    Layer.DEVICE,
    "Something else uses the GPU",
    "The job has less GPU memory, and a shared GPU is slower; all ranks wait for the slowest.",
    Fix(
        look(
            shell(
                "nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv"
            ),
            "end the processes that should not be there",
        )
    ),
    Severity.WARN,
)
GPU_THROTTLED = Kind(
    "gpu-throttled",
    Layer.DEVICE,
    "The GPU holds its clocks down",
    "All ranks wait for the slowest GPU.",
    Fix(
        look(shell("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER")),
        alternatives=["look at fans, airflow and power supplies"],
    ),
    Severity.WARN,
)
PCIE_DEGRADED = Kind(
    "pcie-degraded",
    Layer.DEVICE,
    "The PCIe link of a GPU is slower than it can be",
    "Copies to host memory and to network cards go at a fraction of the speed.",
    Fix(
        look(
            shell(
                "nvidia-smi --query-gpu=pci.bus_id,pcie.link.gen.current,pcie.link.gen.max,"
                "pcie.link.width.current,pcie.link.width.max --format=csv"
            ),
            "reseat the GPU or its riser",
        )
    ),
    Severity.WARN,
)
CLOCKS_LIMITED = Kind(
    "gpu-clocks-limited",
    Layer.DEVICE,
    "The clocks or the power of a GPU are limited by hand",
    "All ranks wait for the slowest GPU. A limit that was set for a test, or to save power, "
    "stays until the driver is loaded again.",
    Fix(
        Step(shell("nvidia-smi --reset-gpu-clocks"), note="as root", persists=True),
        Step(shell("nvidia-smi --reset-applications-clocks"), note="as root", persists=True),
    ),
    Severity.WARN,
)
STATE_UNREAD = Kind(
    "gpu-state-unread",
    Layer.DEVICE,
    "Part of the state of the GPUs could not be read",
    "A fault that is visible only there was not seen.",
    "Run the examination again, on the host itself and as root.",
    Severity.INFO,
)
NVLINK_DOWN = Kind(
    "nvlink-down",
    Layer.DEVICE,
    "NVLinks of a GPU are down",
    "NCCL uses the links that are left, or PCIe, and all ranks wait for it.",
    Fix(
        look(shell("nvidia-smi nvlink --status")),
        look(shell("dmesg | grep -e 'Xid.*: 74' -e SXid")),
        alternatives=["reset the GPUs of the host or reboot it"],
    ),
    Severity.WARN,
)
NVLINK_ERRORS = Kind(
    "nvlink-errors",
    Layer.DEVICE,
    "NVLinks of a GPU had to recover from errors",
    "Each recovery stops the link for a moment; a link that does it often is about to fail.",
    Fix(
        look(
            shell("nvidia-smi nvlink --errorcounters"),
            "again after a job; if they grow, have the GPU checked",
        )
    ),
    Severity.WARN,
)
DCGM_UNHEALTHY = Kind(
    "dcgm-unhealthy",
    Layer.DEVICE,
    "DCGM does not find a part of the host healthy",
    "DCGM watches GPUs, NVSwitches and drivers all the time; what it reports has hurt a job, or "
    "may hurt the next one.",
    Fix(
        look(shell("dcgmi health -c")), look(shell("dcgmi diag -r 2"), "while no job uses the GPUs")
    ),
    Severity.WARN,
)
