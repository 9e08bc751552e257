"""Is every AMD GPU in order: present, error-free, at full speed, alone, and like its peers?

What it checks
--------------
Where torch is built for ROCm: each AMD GPU of each host, through AMD's management library (amdsmi,
libamd_smi.so, ROCm 6.2 to 7): whether it answers; ECC errors (corrected, uncorrected, deferred);
bad pages of its memory and what became of them; what holds its clocks down (heat of the GPU, its
memory or its voltage regulators, PROCHOT), its temperatures, whether its clocks or its power are
limited by hand; PCIe lanes and speed; xGMI links and their errors; which processes use it. Then
whether GPUs of one host, and hosts, have the same model, memory, partition modes (SPX, NPS1), power
limit, clocks, PCIe link and driver; the minority is named. Each GPU is read in its own process.
Check `gpu_state` does the same for NVIDIA GPUs; both have the same codes for the same faults.

Why it matters
--------------
One faulty GPU stops or slows a job of thousands: all ranks wait for it in every collective.

How to fix
----------
As each finding says: end foreign processes, reset the GPU, reboot the host, or have it repaired.
`amd-smi metric`, `amd-smi xgmi`, `amd-smi bad-pages` and `amd-smi process` show the same values.
Where GPUs are, but libamd_smi.so is not, the check is unknown: install the package amd-smi-lib of
the ROCm release of the driver.

When it is wrong
----------------
No finding about a GPU here takes a host out of service, and a GPU whose driver does not answer is
only likely lost. If somebody stopped or killed the process that asked (the kernel for lack of
memory, a scheduler), or it was slow, the state of the GPU is not known. A GPU that no rank uses
belongs to another job: a fault of it is information. A container sees in /sys all GPUs of the
machine: those whose render node (/dev/dri/renderD*) it was not given are not read; in a container
the numbers of processes may be those of the host, and such a process is not blamed. Links, clocks
and lanes that all GPUs of a model share count as intended. Deferred errors are information: the
driver takes the page out of use before anybody needs it. Structures of the library change between
releases: a release whose layout is not known is not read, and the check is unknown. So it is before
ROCm 6.2, whose library leaves files in /dev/shm behind.
Not validated on hardware: tested with a stand-in for the library and on made-up clusters; no run on
an AMD GPU is on record yet.

References
----------
AMD SMI library documentation and header amdsmi.h, ROCm 6.2 to 7 (releases and commits:
nccl_doctor/toolkit/gpu/amdsmi.py); Linux kernel documentation, AMDGPU RAS (bad pages: R, P, F);
ROCm documentation, GPU isolation techniques (HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from nccl_doctor.api import Check, Cluster, Context, Figure, Finding, Layer, Skip, Untested, Where
from nccl_doctor.toolkit.gpu.devices import torch_build
from nccl_doctor.toolkit.gpu.kinds import (
    CLOCKS_LIMITED,
    GPU_BUSY,
    GPU_LOST,
    GPU_THROTTLED,
    PCIE_DEGRADED,
    STATE_UNREAD,
)
from nccl_doctor.toolkit.gpu.unread import why_unread
from nccl_doctor.toolkit.shared_kinds import GPU_DIFFERS, GPU_UNHEALTHY

from .gather import AmdGpuStates, gather_amd
from .kinds import XGMI_DOWN, XGMI_ERRORS
from .rules import judge_amd, why_refused


class AmdGpus(Check):
    """The state of every AMD GPU, once per host."""

    name = "amd_gpus"
    layer = Layer.DEVICE
    cost = "seconds"
    instant_without_gpu = True
    kinds = (
        GPU_LOST,
        GPU_UNHEALTHY,
        GPU_BUSY,
        GPU_THROTTLED,
        CLOCKS_LIMITED,
        PCIE_DEGRADED,
        XGMI_DOWN,
        XGMI_ERRORS,
        STATE_UNREAD,
        GPU_DIFFERS,
    )
    reads = ("backend_device",)
    deadline_s = 45.0  # as check gpu_state

    def observe(self, ctx: Context) -> AmdGpuStates:
        """The state of the GPUs; see `look`.

        Raises:
            Skip: torch is not built for ROCm, or there is no AMD GPU.
        """
        ctx.breadcrumb("importing torch")
        build = torch_build()
        if not build["rocm"]:
            raise Skip(f"torch {build['torch']} is not built for ROCm")
        return self.look(ctx)

    def look(self, ctx: Context) -> AmdGpuStates:
        """The facts of `gather_amd`. Every call to the driver leaves a breadcrumb.

        Raises:
            Skip: there is no AMD GPU.
            Untested: with these facts, the process that read a GPU was stopped or killed, or was
                refused; or there is nothing to read GPUs by.
        """
        rocm = ctx.env.get("ROCM_PATH") or "/opt/rocm"
        folders = [os.path.join(rocm, name) for name in ("lib", "lib64")]
        found = gather_amd(ctx.breadcrumb, ctx.root, ctx.left, folders)
        if reasons := [*why_unread(found), *why_refused(found)]:
            raise Untested("; ".join(reasons), found)
        return found

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """The GPU in each slot, and its settings."""
        for rank, facts in cluster.facts(self.name):
            for gpu in facts["gpus"]:
                if gpu.get("bus_id"):
                    where = Where(hosts=(rank.host.label,))
                    yield Figure(f"GPU {gpu['bus_id']}", _in_words(gpu), where)

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings by the rules of `nccl_doctor.checks.amd_gpus.rules`."""
        yield from judge_amd(cluster)


def _in_words(gpu: dict[str, Any]) -> str:
    """The GPU and its settings as one text, which changes only if one of these does."""
    limit = gpu.get("power_limit_mw")
    said = [
        gpu.get("name"),
        gpu.get("uuid"),
        gpu.get("compute_partition"),
        gpu.get("memory_partition"),
        f"power limit {limit / 1000:g} W" if limit else None,
    ]
    return ", ".join(str(each) for each in said if each)
