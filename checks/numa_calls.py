"""Can NCCL allocate host memory by NUMA node here, and has each GPU's node memory?

What it checks
--------------
Whether the kernel allows `get_mempolicy`, which Docker's default seccomp profile forbids, and
whether the NUMA nodes that GPUs are attached to have memory, by /sys. Both only if the job uses
NCCL 2.24 or newer with a driver for CUDA 12.6 or newer (560), and NCCL_CUMEM_HOST_ENABLE and
NCCL_CUMEM_ENABLE are not 0; with NCCL_CUMEM_HOST_ENABLE=1 from CUDA 12.2 (535) on.

Why it matters
--------------
Since 2.24 NCCL allocates the memory that ranks of a host share through CUDA, by NUMA node, instead
of /dev/shm. If NUMA calls are forbidden, ranks that communicate through that memory fail at
start-up with 2.24 to 2.26.2 (`Cuda failure 'operation not supported'`); later releases fall back to
/dev/shm. For a node without memory, drivers before 595 end the process with a segmentation fault
inside ncclCommInitRank.

How to fix
----------
docker run --cap-add SYS_NICE (in Kubernetes: securityContext.capabilities), or export
NCCL_CUMEM_HOST_ENABLE=0 on every rank, with enough room in /dev/shm.

When it is wrong
----------------
GPUs that access each other's memory directly need no host memory between them: it is a failure only
if the driver reports that two of them cannot, or if collectives ended with that error, otherwise a
warning. libcuda in a `compat` folder counts as the driver. If the version of NCCL or of the driver
is not known, the finding is reported as possible. A container runtime may allow the query and
forbid the binding.
Not validated on hardware: tested on made-up clusters and /sys trees.

References
----------
NCCL user guide, NCCL_CUMEM_HOST_ENABLE; NCCL src/misc/cudawrap.cc and src/transport/shm.cc;
get_mempolicy(2); Docker documentation, seccomp profiles; NVIDIA/nccl issues 1838, 2106 and 2190.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    OutcomeStatus,
    Severity,
    Skip,
    Step,
    Where,
    export,
    shell,
)
from nccl_doctor.toolkit.gpu.devices import host_gpus
from nccl_doctor.toolkit.gpu.driver import driver_branch
from nccl_doctor.toolkit.host import text_of
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.releases import EMPTY_NODE, known_faults
from nccl_doctor.toolkit.versions import release

BLOCKED = Kind(
    "numa-calls-blocked",
    Layer.HOST,
    "The container forbids NUMA calls",
    "NCCL allocates the memory that ranks of a host share by NUMA node: releases 2.24 to 2.26.2 "
    "fail at start-up if GPUs cannot access each other directly, later ones fall back to /dev/shm.",
    Fix(
        export(NCCL_CUMEM_HOST_ENABLE="0"),
        alternatives=[Fix(Step(shell("# docker run --cap-add SYS_NICE")))],
    ),
    Severity.WARN,
)
EMPTY = Kind(
    "numa-node-empty",
    Layer.HOST,
    "A GPU is attached to a NUMA node without memory",
    "NCCL requests host memory of that node from CUDA, and drivers before 595 then crash.",
    Fix(
        export(NCCL_CUMEM_HOST_ENABLE="0"),
        alternatives=["upgrade the NVIDIA driver to 595 or newer"],
    ),
    Severity.WARN,
)

ASKED = "NCCL_CUMEM_HOST_ENABLE"
_SINCE, _FALLS_BACK = (2, 24, 0), (2, 26, 3)
_BY_DEFAULT, _ON_REQUEST = 560, 535
"""The driver of CUDA 12.6, since which NCCL does so by default, and of 12.2, the oldest that can
(ncclCuMemHostEnable in src/misc/cudawrap.cc)."""
_ERROR = "operation not supported"
_NUMBERS = {"x86_64": 239, "aarch64": 236}
"""Number of the system call get_mempolicy, by machine type."""
_NVIDIA, _DISPLAY = "0x10de", "0x03"


class NumaCalls(Check):
    """Tries a NUMA call, and reads which node each GPU is attached to."""

    name = "numa_calls"
    layer = Layer.HOST
    kinds = (BLOCKED, EMPTY)
    reads = ("collectives", "driver_libraries", "gpu_state", "nccl_library")

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`refused`: name of the error of get_mempolicy, None if it works or is not known on this
        machine type; `empty`: `[PCI address, node]` of GPUs on a node without memory; `driver`:
        version of the kernel module; `asked`: whether NCCL_CUMEM_HOST_ENABLE=1 is set.
        """
        if ctx.backend != "nccl":
            raise Skip("the job does not use NCCL")
        settings = nccl_settings(ctx.env, root=ctx.root)
        for name in (ASKED, "NCCL_CUMEM_ENABLE"):
            if name in settings and settings[name].value == "0":
                raise Skip(f"{name}=0: NCCL makes no NUMA calls")
        return {
            "refused": _refused(),
            "empty": _empty_nodes(ctx.root / "sys"),
            "driver": host_gpus(ctx.root)["driver"],
            "asked": ASKED in settings and settings[ASKED].value == "1",
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings for hosts whose ranks load an NCCL that makes NUMA calls."""
        versions = {
            rank.host.id: (facts["loaded"] or {}).get("version") or facts["built"]
            for rank, facts in cluster.facts("nccl_library")
        }
        for rank, facts in cluster.facts(self.name):
            version = versions.get(rank.host.id)
            driver = driver_branch(cluster, rank.host, facts["driver"])
            if version and release(version) < _SINCE:
                continue
            if driver and driver < (_ON_REQUEST if facts.get("asked") else _BY_DEFAULT):
                continue
            where, nccl = Where(hosts=(rank.host.label,)), f"NCCL {version or 'of unknown version'}"
            if facts["refused"] == "EPERM":
                known = bool(version and driver)
                yield Finding(
                    BLOCKED,
                    f"get_mempolicy: EPERM, {nccl}",
                    where,
                    severity=_severity(cluster, rank.host, version, sure=known),
                    confidence=Confidence.LIKELY if known else Confidence.POSSIBLE,
                )
            if facts["empty"] and _crashes(driver):
                gpus = ", ".join(f"{gpu} on node {node}" for gpu, node in facts["empty"])
                said = facts["driver"] or "of unknown version"
                yield Finding(
                    EMPTY,
                    f"{gpus}; {nccl}, driver {said}",
                    where,
                    {"gpus": facts["empty"]},
                    confidence=Confidence.POSSIBLE,
                )


def _crashes(driver: int | None) -> bool:
    """True if a branch of the driver ends the process that requests memory of an empty node."""
    return any(
        known.condition == EMPTY_NODE and known.has(str(driver or 0))
        for known in known_faults("driver")
    )


def _severity(cluster: Cluster, host: Host, version: str | None, *, sure: bool) -> Severity:
    """Severity of forbidden NUMA calls: only GPUs without direct access share host memory.

    `sure`: whether the versions of NCCL and of the driver are known.
    """
    if version and release(version) >= _FALLS_BACK:
        return Severity.INFO
    seen = [item.outcome for item in cluster.evidence_on("collectives", host, "world")]
    if any(_ERROR in f"{outcome.log_tail}{outcome.reason}".lower() for outcome in seen):
        return Severity.FAIL
    worked = bool(seen) and all(outcome.status is OutcomeStatus.OK for outcome in seen)
    share = len(cluster.ranks_on(host)) > 1 and any(
        pairs
        for _, facts in cluster.facts_on("gpu_state", host)
        for why, pairs in (facts.get("p2p") or {}).items()
        if why != "OK"
    )
    return Severity.FAIL if sure and share and not worked else Severity.WARN


def _refused() -> str | None:
    number = _NUMBERS.get(os.uname().machine)
    if number is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    none = ctypes.c_void_p(None)
    if libc.syscall(ctypes.c_long(number), none, none, ctypes.c_ulong(0), none, ctypes.c_ulong(0)):
        return errno.errorcode.get(ctypes.get_errno(), "error")
    return None


def _empty_nodes(sys: Path) -> list[list[Any]]:
    """NVIDIA GPUs whose NUMA node is known, and has no memory."""
    found = []
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        vendor, kind = text_of(device / "vendor"), text_of(device / "class")
        if vendor != _NVIDIA or not kind.startswith(_DISPLAY):
            continue
        node = text_of(device / "numa_node")
        lines = text_of(sys / f"devices/system/node/node{node}/meminfo").splitlines()
        total = next((line.split() for line in lines if "MemTotal:" in line), [])
        if total[-2:-1] == ["0"]:
            found.append([device.name, int(node)])
    return found
