"""Kinds of finding that more than one built-in check uses.

A code belongs to one check, unless several checks list the same kind: these.
"""

from __future__ import annotations

from dataclasses import replace

from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Effect, Kind, Layer, Severity
from nccl_doctor.model.fixes import Fix, On, Step, export, look

ADDR_UNRESOLVABLE = Kind(
    code="addr-unresolvable",
    layer=Layer.NAME,
    title="A host name that the job needs does not resolve",
    why="Ranks meet at MASTER_ADDR, and gloo publishes the address of a host's own name; without "
    "an answer a rank silently retries until its time-out.",
    fix='add "ADDRESS NAME" to /etc/hosts or the name server, or use the address itself',
)
ADDR_LOOPBACK = Kind(
    code="addr-loopback",
    layer=Layer.NAME,
    title="A host name resolves to a loopback address",
    why="A loopback address means a different machine on each host: peers that receive it connect "
    "to themselves.",
    fix=Fix(
        Step(
            shell("# export MASTER_ADDR=ADDRESS"),
            On.EVERY,
            note="of rank 0's host, on the network that the hosts share",
        )
    ),
)
ADDR_DIGITS_ONLY = Kind(
    code="addr-digits-only",
    layer=Layer.NAME,
    title="A host name of digits only is read as an IPv4 address",
    why="The resolver reads a plain number as a 32-bit address and never looks up the name.",
    fix="use the fully qualified name or the address",
)
PORT_BLOCKED = Kind(
    code="port-blocked",
    layer=Layer.PORT,
    title="Connections to MASTER_PORT are blocked",
    why="A firewall, a security group or a network policy blocks them; without an answer, torch "
    "reports nothing until its time-out.",
    fix="open MASTER_PORT on rank 0's host for the hosts of the job",
)
HOST_ANSWERS_LATE = Kind(
    code="host-answers-late",
    layer=Layer.HOST,
    title="A host takes seconds to read what the others say",
    why="The connection stands and the data has arrived, but the process that is to read it does "
    "not run: the CPUs are busy, or limited. A job there is as late, and in each collective all "
    "ranks wait for the slowest one.",
    fix=Fix(look(shell("top -b -n 1 -o %CPU | head -n 20"), "shows what uses the CPUs")),
    severity=Severity.INFO,
    effects=(Effect.DELAYS,),
)
TIMEOUT_TOO_SHORT = Kind(
    "timeout-too-short",
    Layer.ENV,
    "A time-out is too short for a healthy job",
    "Hosts start seconds apart, rank 0 may have to load data alone, and the first step loads "
    "kernels and data: a shorter limit ends a healthy job.",
    "give the named layer more time, or drop the variable that shortens it",
    Severity.WARN,
    effects=(Effect.JOB_ONLY,),
)
DRIVER_MISMATCH = Kind(
    "driver-mismatch",
    Layer.DEVICE,
    "The GPU driver does not match torch, or its own libraries",
    "CUDA cannot be initialised, so no rank on this host has a GPU.",
    "Upgrade the NVIDIA driver, or install a torch build for an older CUDA.",
)
# Drains: what the driver itself says of one GPU (a reset or a reboot is required, no spare rows),
# errors of CUDA that only hardware makes, a wrong product where another GPU of the model was right,
# a driver that holds a process in state D. What else makes an error: a container that may not open
# a device file, a limit or a setting of the user (compute mode), another program (MPS, an exclusive
# GPU), another host (IMEX), a driver that is not loaded yet or is being replaced, counts of months
# ago: then it is likely at most, a warning, or `drains` is off; UNKNOWN needs an Xid beside it.
GPU_UNHEALTHY = Kind(
    "gpu-unhealthy",
    Layer.DEVICE,
    "A GPU or its driver does not work",
    "Work on this GPU fails, hangs or gives wrong results, and all other ranks wait for it.",
    Fix(
        look(shell("dmesg | grep -e Xid -e NVRM")),
        look(shell("nvidia-smi")),
        alternatives=["drain and reboot the host"],
    ),
    effects=(Effect.DRAINS,),
)
_NOT_BROKEN = "The GPU works now. What failed once often fails again, and then ends a job."
HAD_ERRORS = GPU_UNHEALTHY.variant(
    title="A GPU, or its memory, had errors",
    why=_NOT_BROKEN,
)
LITTLE_SPARE = GPU_UNHEALTHY.variant(
    title="The memory of a GPU has little left to repair itself with",
    why="The GPU works now. Bad rows of its memory are replaced by spare ones until none is left.",
)
GPU_FORBIDDEN = GPU_UNHEALTHY.variant(
    title="A setting forbids every process to use a GPU",
    why="CUDA finds no usable device there, and the rank that should have it fails.",
)
STATE_UNKNOWN = GPU_UNHEALTHY.variant(
    title="The state of a GPU is not known",
    why="What this program asked ended with an error of its own; a fault of the GPU is possible.",
)
"""Variants: the GPU itself works, or may."""
GPU_SLOW = Kind(
    "gpu-slow",
    Layer.SPEED,
    "A GPU is slower than it should be",
    "Every step of the job takes as long as its slowest GPU.",
    Fix(
        look(shell("nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE")),
        look(
            shell("nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name --format=csv"),
            "other processes on the GPU",
        ),
    ),
    Severity.WARN,
)
BANDWIDTH_LOW = Kind(
    "bandwidth-low",
    Layer.SPEED,
    "Collectives are much slower here than in other groups of the same kind",
    "a collective over all ranks runs at the speed of its slowest part",
    Fix(
        look(shell("nvidia-smi topo -m"), "inside a host: PCIe, NVLink and NUMA binding"),
        alternatives=["between hosts: look at the NIC, its negotiated speed, and the switch port"],
    ),
    Severity.WARN,
    effects=(Effect.TIMED_OUT,),  # a slow or lossy link explains it
)
BELOW_FLOOR = Kind(
    "bandwidth-below-floor",
    Layer.SPEED,
    "Collectives are slower than this hardware gives at the least",
    "If all hosts are equally slow, none of them stands out; every collective takes longer than on "
    "healthy hosts with the same GPUs and NICs.",
    Fix(
        replace(
            export(NCCL_DEBUG="INFO"),
            note="shows the path of each channel: P2P, SHM or NET, and which NIC",
            shows=True,
        )
    ),
    Severity.WARN,
    effects=(Effect.TIMED_OUT,),  # a link that is down, or a slow one, explains it
)
GPU_DIFFERS = Kind(
    "gpu-differs",
    Layer.DEVICE,
    "GPUs that should be alike differ",
    "The slowest GPU sets the speed of the job, the smallest memory the batch size.",
    "Use hosts with the same GPUs and the same settings, or accept the speed of the slowest.",
    Severity.WARN,
)
# Drains only where the host has NVSwitches of its own, was not just started, and its fabric manager
# is seen not to run, or failed to register a GPU. Elsewhere (a virtual machine, a container, a
# fabric that other hosts set up, registration under way, a new driver) it is likely at most.
FABRIC_MANAGER_DOWN = Kind(
    "fabric-manager-down",
    Layer.DEVICE,
    "The NVLink fabric of this host is not set up",
    "Until the fabric manager has set NVSwitch up, CUDA does not start (`system not yet "
    "initialized`).",
    Fix(
        Step(
            shell("systemctl start nvidia-fabricmanager"),
            note="its version must equal the driver's",
            undo=shell("systemctl stop nvidia-fabricmanager"),
        ),
        look(shell("nvidia-smi -q | grep -A2 Fabric"), "until it says Completed"),
    ),
    effects=(Effect.DRAINS,),
)
PCIE_ERRORS = Kind(
    "pcie-errors",
    Layer.DEVICE,
    "A PCIe link of a GPU or a network card has errors",
    "Each corrected error sends a packet again; an uncorrected error loses it, and the GPU or the "
    "card may fall off the bus.",
    Fix(
        look(
            shell("lspci -vvs ADDRESS"), "reseat the card, its riser or cable, or use another slot"
        ),
        look(shell("dmesg | grep -e AER -e 'PCIe Bus Error'")),
    ),
    Severity.WARN,
)
MEMORY_ERRORS = Kind(
    "memory-errors",
    Layer.HOST,
    "Memory of the host had errors",
    "A module that had errors will probably have more, and an error that cannot be corrected ends "
    "the process that needs the data, or the machine.",
    Fix(
        look(shell("dmesg | grep -e EDAC -e 'Hardware Error'")),
        look(shell("ras-mc-ctl --errors")),
        alternatives=["have the module replaced at the next maintenance"],
    ),
    Severity.WARN,
    effects=(Effect.JOB_ONLY,),
)
# Drains: the count of a module rose while the examination ran, so it is no error of months ago. An
# error that the controller assigns to no module, as of a bus, is likely only. Counters that were
# reset, or whose driver was loaded meanwhile, are not compared.
MEMORY_FAILING = Kind(
    "memory-failing",
    Layer.HOST,
    "Memory of the host now has errors that cannot be corrected",
    "The kernel removes the page: a process that needs it is killed (SIGBUS), and if the kernel "
    "itself needs it, the machine stops.",
    Fix(
        look(shell("dmesg | grep -e EDAC -e 'Hardware Error'")),
        alternatives=["drain the host and have the module replaced"],
    ),
    effects=(Effect.DRAINS,),
)
