"""Kinds of finding that only AMD GPUs have. Pure."""

from __future__ import annotations

from nccl_doctor.api import Fix, Kind, Layer, Severity, look, shell

XGMI_DOWN = Kind(
    "xgmi-down",
    Layer.DEVICE,
    "xGMI links of an AMD GPU are down",
    "RCCL uses the links that are left, or PCIe, and all ranks wait for it.",
    Fix(
        look(shell("amd-smi xgmi -l")),
        alternatives=["reboot the host, and have the GPU and its board checked if it comes back"],
    ),
    Severity.WARN,
)
XGMI_ERRORS = Kind(
    "xgmi-errors",
    Layer.DEVICE,
    "xGMI links of an AMD GPU had errors that could not be corrected",
    "Data between GPUs was lost, and the driver resets the GPUs that share it: every job on them "
    "ends.",
    Fix(
        look(
            shell("amd-smi metric --ecc-blocks"),
            "again after a job; if they grow, have the GPU checked",
        ),
        look(shell("dmesg | grep -i -e amdgpu -e ras")),
    ),
    Severity.WARN,
)
