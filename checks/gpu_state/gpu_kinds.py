"""Kinds of finding about the state of an NVIDIA GPU; those of GPUs of any vendor are in
`nccl_doctor.toolkit.gpu.kinds`. Pure.
"""

from __future__ import annotations

from nccl_doctor.api import Effect, Fix, Kind, Layer, Severity, Step, export, look, shell

C2C_DOWN = Kind(
    "c2c-down",
    Layer.DEVICE,
    "Links between a GPU and its CPU (NVLink-C2C) are down",
    "Copies to and from host memory go at a fraction of the speed, and all ranks wait for them.",
    Fix(
        look(shell("nvidia-smi c2c -s")),
        alternatives=["reboot the host, and have the board checked if it comes back"],
    ),
    Severity.WARN,
)
P2P_UNAVAILABLE = Kind(
    "gpu-p2p-unavailable",
    Layer.DEVICE,
    "Two GPUs of a host cannot reach each other's memory, where others can",
    "NCCL sends the data between them through host memory: all ranks wait for it.",
    Fix(
        look(shell("nvidia-smi topo -p2p r")),
        alternatives=[
            "look at IOMMU and ACS, at the options of the driver's module, and at the slots of "
            "these GPUs"
        ],
    ),
    Severity.WARN,
)
# Drains only while the fabric reports, now, that a GPU gets less than it should: the log keeps what
# was before a reset, for as long as the machine is up.
NVSWITCH_ERROR = Kind(
    "nvswitch-error",
    Layer.DEVICE,
    "An NVSwitch had a fatal error",
    "Traffic through it stalls: GPUs of this host hang in their next collective, or NCCL works "
    "without NVLink.",
    Fix(
        Step(
            shell("nvidia-smi --gpu-reset"),
            note="drain the host before: it resets all its GPUs together",
            persists=True,
        ),
        alternatives=["reboot it; if it comes back, have the NVSwitch board checked"],
    ),
    Severity.WARN,
    effects=(Effect.DRAINS,),
)
GPU_VIRTUAL = Kind(
    "gpu-virtual",
    Layer.DEVICE,
    "The GPU is a vGPU",
    "CUDA's unified memory, which NCCL needs, is off in a vGPU unless it is turned on: NCCL then "
    "ends with `operation not supported`.",
    "on the hypervisor: enable_uvm=1 among the plugin parameters of the vGPU",
    Severity.INFO,
)
P2P_UNSUPPORTED = Kind(
    "gpu-p2p-unsupported",
    Layer.DEVICE,
    "GPUs copy directly to each other though NVIDIA's driver does not support it",
    "The driver is patched, or is an early release with this error: NCCL relies on it, and may "
    "hang in its first collective or add up wrong numbers.",
    Fix(export(NCCL_P2P_DISABLE="1"), alternatives=["install a current NVIDIA driver"]),
    Severity.WARN,
)
PERSISTENCE_OFF = Kind(
    "gpu-persistence-off",
    Layer.DEVICE,
    "GPUs go to sleep between jobs",
    "The first process has to wake them, which takes seconds for each; settings made by hand "
    "and error counts are lost whenever no process uses a GPU.",
    Fix(
        Step(
            shell("systemctl enable --now nvidia-persistenced"),
            undo=shell("systemctl disable --now nvidia-persistenced"),
            persists=True,
        ),
        alternatives=[
            Fix(Step(shell("nvidia-smi -pm 1"), undo=shell("nvidia-smi -pm 0"), note="as root"))
        ],
    ),
    Severity.INFO,
)
