"""Kinds of finding about the state of a GPU. Pure."""

from __future__ import annotations

from nccl_doctor.api import Kind, Layer, Severity

# Drains: GPU_IS_LOST, or a reader held in state D or ended by a fault signal. What else makes that:
# the kernel that kills for memory, a scheduler or a person that stops or kills the reader, a paused
# container, a library on a file server that is gone (nothing is known then: `ends`); a busy host,
# and GPUs that wake one after the other (likely); a library that crashes at every GPU; a reset, a
# diagnosis or a new driver under way (`in_service`); a rank that works with the GPU all the same.
GPU_LOST = Kind(
    "gpu-lost",
    Layer.DEVICE,
    "A GPU does not answer any more",
    "It fell off the PCIe bus, or the driver waits for it forever; a rank that uses it fails "
    "or hangs, and CUDA may not start on this host at all.",
    "Drain the host and power-cycle it; if the GPU is lost again, have it reseated or replaced.",
    drains=True,
)
GPU_BUSY = Kind(
    "gpu-busy",
    Layer.DEVICE,
    "Something else uses the GPU",
    "The job has less GPU memory, and a shared GPU is slower; all ranks wait for the slowest.",
    "nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv, and "
    "end the processes that should not be there.",
    Severity.WARN,
)
GPU_THROTTLED = Kind(
    "gpu-throttled",
    Layer.DEVICE,
    "The GPU holds its clocks down",
    "All ranks wait for the slowest GPU.",
    "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; look at fans, airflow and power supplies.",
    Severity.WARN,
)
PCIE_DEGRADED = Kind(
    "pcie-degraded",
    Layer.DEVICE,
    "The PCIe link of a GPU is slower than it can be",
    "Copies to host memory and to network cards go at a fraction of the speed.",
    "Reseat the GPU or its riser; nvidia-smi --query-gpu=pci.bus_id,pcie.link.gen.current,"
    "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max --format=csv",
    Severity.WARN,
)
NVLINK_DOWN = Kind(
    "nvlink-down",
    Layer.DEVICE,
    "NVLinks of a GPU are down",
    "NCCL uses the links that are left, or PCIe, and all ranks wait for it.",
    "nvidia-smi nvlink --status; look for Xid 74 and SXid in `dmesg`, reset the GPUs of the host "
    "or reboot it.",
    Severity.WARN,
)
NVLINK_ERRORS = Kind(
    "nvlink-errors",
    Layer.DEVICE,
    "NVLinks of a GPU had to recover from errors",
    "Each recovery stops the link for a moment; a link that does it often is about to fail.",
    "nvidia-smi nvlink --errorcounters, again after a job; if they grow, have the GPU checked.",
    Severity.WARN,
)
C2C_DOWN = Kind(
    "c2c-down",
    Layer.DEVICE,
    "Links between a GPU and its CPU (NVLink-C2C) are down",
    "Copies to and from host memory go at a fraction of the speed, and all ranks wait for them.",
    "nvidia-smi c2c -s; reboot the host, and have the board checked if it comes back.",
    Severity.WARN,
)
CLOCKS_LIMITED = Kind(
    "gpu-clocks-limited",
    Layer.DEVICE,
    "The clocks of a GPU are limited by hand",
    "All ranks wait for the slowest GPU. A limit that was set for a test, or to save power, "
    "stays until the driver is loaded again.",
    "as root: nvidia-smi --reset-gpu-clocks; nvidia-smi --reset-applications-clocks",
    Severity.WARN,
)
P2P_UNAVAILABLE = Kind(
    "gpu-p2p-unavailable",
    Layer.DEVICE,
    "Two GPUs of a host cannot reach each other's memory, where others can",
    "NCCL sends the data between them through host memory: all ranks wait for it.",
    "nvidia-smi topo -p2p r; look at IOMMU and ACS, at the options of the driver's module, and at "
    "the slots of these GPUs.",
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
    "drain the host and reset all its GPUs together (nvidia-smi --gpu-reset), or reboot it; if "
    "it comes back, have the NVSwitch board checked.",
    Severity.WARN,
    drains=True,
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
    "export NCCL_P2P_DISABLE=1, or install a current NVIDIA driver",
    Severity.WARN,
)
PERSISTENCE_OFF = Kind(
    "gpu-persistence-off",
    Layer.DEVICE,
    "GPUs go to sleep between jobs",
    "The first process has to wake them, which takes seconds for each; settings made by hand "
    "and error counts are lost whenever no process uses a GPU.",
    "systemctl enable --now nvidia-persistenced, or as root: nvidia-smi -pm 1",
    Severity.INFO,
)
STATE_UNREAD = Kind(
    "gpu-state-unread",
    Layer.DEVICE,
    "Part of the state of the GPUs could not be read",
    "A fault that is visible only there was not seen.",
    "Run the examination again, on the host itself and as root.",
    Severity.INFO,
)
