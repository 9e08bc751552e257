"""Kinds of finding that more than one built-in check may make.

A code belongs to one check, unless the checks list the very same kind: these.
"""

from __future__ import annotations

from nccl_doctor.model.findings import Kind, Layer, Severity

ADDR_UNRESOLVABLE = Kind(
    code="addr-unresolvable",
    layer=Layer.NAME,
    title="A host name that the job needs does not resolve",
    why="Ranks meet at MASTER_ADDR, and gloo publishes the address of a host's own name; without "
    "an answer a rank retries in silence until its time-out.",
    fix='add "ADDRESS NAME" to /etc/hosts or the name server, or use the address itself',
)
ADDR_LOOPBACK = Kind(
    code="addr-loopback",
    layer=Layer.NAME,
    title="A host name leads back to the host itself",
    why="A loopback address means another machine on every host: peers that are given it connect "
    "to themselves.",
    fix="export MASTER_ADDR=ADDRESS of rank 0's host on the network that the hosts share",
)
ADDR_DIGITS_ONLY = Kind(
    code="addr-digits-only",
    layer=Layer.NAME,
    title="A host name of digits only is taken for an IPv4 address",
    why="The resolver reads a plain number as a 32-bit address and never asks for the name.",
    fix="use the fully qualified name or the address",
)
PORT_BLOCKED = Kind(
    code="port-blocked",
    layer=Layer.PORT,
    title="Connections to MASTER_PORT do not get through",
    why="A firewall, a security group or a network policy stops them; without an answer, torch "
    "says nothing until its time-out.",
    fix="open MASTER_PORT on rank 0's host for the hosts of the job",
)
TIMEOUT_TOO_SHORT = Kind(
    "timeout-too-short",
    Layer.ENV,
    "A time-out is too short for a healthy job",
    "Hosts start seconds apart, rank 0 may have to load alone, and a first step loads kernels and "
    "data: a limit below that ends a job that nothing ails.",
    "Give the layer that is named more time, or unset the variable that left it so little.",
    Severity.WARN,
    later=True,
)
DRIVER_MISMATCH = Kind(
    "driver-mismatch",
    Layer.DEVICE,
    "The GPU driver does not fit torch, or its own libraries",
    "CUDA cannot be initialised, so no rank on this host has a GPU.",
    "Upgrade the NVIDIA driver, or install a torch build for an older CUDA.",
)
GPU_UNHEALTHY = Kind(
    "gpu-unhealthy",
    Layer.DEVICE,
    "A GPU or its driver does not work",
    "What touches this GPU fails, hangs or computes wrongly, and all other ranks wait for it.",
    "Look for Xid and NVRM in `dmesg`, run `nvidia-smi`; drain and reboot the host.",
    drains=True,
)
GPU_SLOW = Kind(
    "gpu-slow",
    Layer.SPEED,
    "A GPU is slower than it should be",
    "Every step of the job takes as long as its slowest GPU.",
    "Look at clocks, temperature and power (`nvidia-smi -q -d PERFORMANCE,CLOCK,POWER`), and for "
    "other processes on the GPU.",
    Severity.WARN,
)
GPU_DIFFERS = Kind(
    "gpu-differs",
    Layer.DEVICE,
    "GPUs are not alike",
    "The slowest GPU sets the pace, the smallest memory the batch size.",
    "Take hosts with the same GPUs, set up alike, or accept the pace of the slowest.",
    Severity.WARN,
)
FABRIC_MANAGER_DOWN = Kind(
    "fabric-manager-down",
    Layer.DEVICE,
    "The NVLink fabric of this host is not set up",
    "Until the fabric manager has set NVSwitch up, CUDA does not start (`system not yet "
    "initialized`).",
    "systemctl start nvidia-fabricmanager (its version must equal the driver's), then "
    "`nvidia-smi -q | grep -A2 Fabric` until it says Completed",
    drains=True,
)
PCIE_ERRORS = Kind(
    "pcie-errors",
    Layer.DEVICE,
    "A PCIe link of a GPU or a network card makes errors",
    "Each corrected error sends a packet again; one that cannot be corrected loses it, and the GPU "
    "or the card may fall off the bus.",
    "reseat the card, its riser or cable, or use another slot; lspci -vvs <address>, and "
    "`dmesg | grep -e AER -e 'PCIe Bus Error'`",
    Severity.WARN,
)
MEMORY_ERRORS = Kind(
    "memory-errors",
    Layer.HOST,
    "Memory of the host had errors",
    "A module that had errors has more of them sooner or later, and one that cannot be corrected "
    "kills the process that needs the data, or the machine.",
    "have the module replaced at the next occasion; `dmesg | grep -e EDAC -e 'Hardware Error'`, "
    "ras-mc-ctl --errors",
    Severity.WARN,
    later=True,
)
MEMORY_FAILING = Kind(
    "memory-failing",
    Layer.HOST,
    "Memory of the host has errors now that cannot be corrected",
    "The kernel takes the page away: a process that needs it is killed (SIGBUS), and where the "
    "kernel itself does, the machine stops.",
    "drain the host and have the module replaced; `dmesg | grep -e EDAC -e 'Hardware Error'`",
    drains=True,
)
