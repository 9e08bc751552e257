"""Do the libraries of the NVIDIA driver match the kernel module that is loaded?

What it checks
--------------
Which libcuda and libnvidia-ml the dynamic loader finds: file, version by its name, size,
fingerprint and origin (`-v` shows the table), compared with the version of the kernel module in
/proc/driver/nvidia/version. The libraries are loaded, but none of their functions is called.

Why it matters
--------------
A driver that was upgraded while a container or the host kept running leaves a kernel module of the
old release: `Failed to initialize NVML: Driver/library version mismatch`, and CUDA error 803. NCCL
needs both libraries. A `stubs` folder in LD_LIBRARY_PATH hides the real ones. With the libcuda of a
`compat` folder, which images contain for older drivers, CUDA reports another driver version, and
NCCL chooses by it how to move data (memory of the host through cuMem from CUDA 12.6 on, and more):
all ranks must have it, or none. What this program says of faults of drivers (checks
`known_releases`, `numa_calls`) goes by libcuda, as NCCL does.

How to fix
----------
Restart the container, so that it gets the host's libraries; on the host, reload the nvidia modules
or reboot. Remove stubs from LD_LIBRARY_PATH. libcuda-differs: the same image and the same
LD_LIBRARY_PATH on every rank.

When it is wrong
----------------
The libcuda of a `compat` folder is newer than the kernel module on purpose: it is compared with the
other ranks, and named where NCCL would decide otherwise by the version of the kernel module.
Releases of one driver branch count as equal. A file without a release in its name, as on Jetson and
WSL, is not judged. Where check `backend_device` has seen that the driver does not start, only that
is reported.
Not validated on hardware: tested on made-up clusters, libraries and /proc trees.

References
----------
NVIDIA CUDA compatibility guide; NCCL src/misc/cudawrap.cc (cudaDriverGetVersion); NVIDIA CUDA
driver API (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH); NVML reference (NVML_ERROR_LIB_RM_VERSION_MISMATCH);
ld.so(8).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Evidence,
    Finding,
    Kind,
    Layer,
    Scope,
    Severity,
    Skip,
    Untested,
)
from nccl_doctor.toolkit.gpu.devices import host_gpus
from nccl_doctor.toolkit.gpu.driver import is_compat, is_stub, libraries_in
from nccl_doctor.toolkit.libraries import COLUMNS as LIBRARY_COLUMNS
from nccl_doctor.toolkit.libraries import file_version, library_row, mapped_libraries
from nccl_doctor.toolkit.shared_kinds import DRIVER_MISMATCH
from nccl_doctor.toolkit.versions import disagreement, major

NOT_THE_MODULES = DRIVER_MISMATCH.variant(
    title="A library of the GPU driver does not belong to the kernel module",
    why="Calls of CUDA or NVML fail where the two do not agree; NCCL makes them at its start.",
)
DIFFERS = Kind(
    "libcuda-differs",
    Layer.DEVICE,
    "Ranks load different libcuda libraries",
    "CUDA then reports different driver versions, by which NCCL chooses how to share memory "
    "and move data: ranks that choose differently fail or wait for each other.",
    "Have the folder compat in LD_LIBRARY_PATH on every rank, or on none; use one image.",
    Severity.WARN,
    effects=(Effect.DIFFERENCE,),
)

COMPAT = Kind(
    "libcuda-compat",
    Layer.DEVICE,
    "libcuda is newer than the driver (forward compatibility)",
    "CUDA reports the version of libcuda as that of the driver, and NCCL turns on by it what an "
    "older kernel module may lack.",
    "nothing, if that is meant; else install the newer driver, or take the folder compat out of "
    "LD_LIBRARY_PATH on every rank",
    Severity.INFO,
)

_NAMES = ("libcuda", "libnvidia-ml")
_BRANCHES = (525, 530, 535, 545, 555, 560, 570, 580)
"""Drivers of the CUDA versions by which NCCL decides: 12.0 to 12.3, 12.5, 12.6, 12.8 and 13.0.
Source: src/misc/cudawrap.cc, src/enqueue.cc and src/ce_coll.cc of NCCL 2.30.7.
"""
_RELEASE = re.compile(r"\d{3,}\.\d+[\d.]*")
"""A release of the NVIDIA driver; `1.1`, as on Jetson and WSL, is none."""


class DriverLibrariesFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    kernel: str
    loaded: dict[str, Any]


class DriverLibraries(Check):
    """Driver libraries and kernel module, by every rank: each rank may have its own container."""

    name = "driver_libraries"
    layer = Layer.DEVICE
    scope = Scope.RANK
    cost = "seconds"  # the libraries that it loads may crash the process
    instant_without_gpu = True
    kinds = (DRIVER_MISMATCH, DIFFERS, COMPAT)
    reads = ("backend_device",)

    def observe(self, ctx: Context) -> DriverLibrariesFacts:
        """Load the libraries. Returns: `kernel` (module version), `loaded` (table of libraries)."""
        kernel = host_gpus(ctx.root)["driver"]
        if kernel is None:
            raise Skip("no NVIDIA kernel module is loaded")
        for name in _NAMES:
            ctx.breadcrumb(f"load {name}.so.1")
            with suppress(OSError):  # not there: check backend_device explains it
                ctypes.CDLL(f"{name}.so.1")
        paths = mapped_libraries(_NAMES)
        if not paths:
            raise Untested("neither libcuda.so.1 nor libnvidia-ml.so.1 can be loaded")
        rows = [library_row(path, file_version, (), ctx.env) for path in paths]
        return {"kernel": kernel, "loaded": {"columns": list(LIBRARY_COLUMNS), "rows": rows}}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each rank whose driver starts; then on differences between ranks."""
        broken = {
            r.seat for r, facts in cluster.facts("backend_device") if facts.get("driver_error")
        }
        for rank, facts in cluster.facts(self.name):
            libraries = libraries_in(facts["loaded"])
            for library in libraries if rank.seat not in broken else ():
                found = _judge(library, facts["kernel"])
                if found is not None:
                    used = found.kind is COMPAT or cluster.backend == "nccl"
                    yield found.replaced(
                        where=Evidence.rank_place(rank),
                        severity=None if used else Severity.WARN,
                    )

        claims = ((rank, _compat(facts["loaded"])) for rank, facts in cluster.facts(self.name))
        story = disagreement(DIFFERS, "libcuda", claims, of_host=False)
        if story is not None:
            yield story.finding.replaced(
                fix="",
                severity=None if cluster.backend == "nccl" else Severity.INFO,
                confidence=Confidence.LIKELY,
            )


def _compat(table: Mapping[str, Any]) -> str | None:
    """The libcuda of a rank: the driver's own, or `compat` and its branch."""
    for library in libraries_in(table):
        if library["library"] == "libcuda" and not is_stub(library["path"]):
            version = library["version"] or ""
            compat = is_compat(library["path"])
            return f"compat {version.split('.')[0]}" if compat else "the driver's own"
    return None


def _judge(library: Mapping[str, Any], kernel: str) -> Finding | None:
    version = library["version"] or ""
    if is_stub(library["path"]):
        text = f"{library['path']} is a stub for linking, not the driver's library"
        fix = "take the folder cuda/lib64/stubs out of LD_LIBRARY_PATH"
    elif is_compat(library["path"]):
        branch, own = major(version) or 0, major(kernel) or 0
        decides = any(own < each <= branch for each in _BRANCHES)
        return _newer(library, kernel) if decides and library["library"] == "libcuda" else None
    elif _RELEASE.fullmatch(version) and version != kernel:
        text = f"{library['path']} has version {version}, the kernel module {kernel}"
        fix = "restart the container; on the host, reload the nvidia modules or reboot"
    else:
        return None
    return Finding(
        NOT_THE_MODULES, text, evidence=dict(library), fix=fix, confidence=Confidence.LIKELY
    )


def _newer(library: Mapping[str, Any], kernel: str) -> Finding:
    return Finding(
        COMPAT,
        f"{library['path']} has version {library['version']}, the kernel module {kernel}: CUDA and "
        f"NCCL take the driver for one of branch {major(library['version'])}",
        evidence=dict(library),
    )
