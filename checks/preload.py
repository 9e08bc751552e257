"""Does a preloaded library stand between this job and CUDA?

What it checks
--------------
With NCCL, on hosts with NVIDIA GPUs: which libraries LD_PRELOAD and /etc/ld.so.preload name, and
which libraries that are known to intercept calls of CUDA this process really has loaded: libvgpu
(HAMi, also Volcano's vGPU), libcuda-control (gpu-manager), libvgpu-control (vgpu-manager),
libnvshare (nvshare). Other preloaded libraries (allocators, profilers) are not reported.

Why it matters
--------------
Such a library shares a GPU between containers, and answers for the driver: memory that is free,
GPUs that reach each other. With HAMi, NCCL's first call of cuMemCreate hangs or crashes in programs
that load NCCL by themselves (vLLM: the last line is `vLLM is using nccl==...`), while the NCCL that
torch loads works in the same pod. And direct copies between GPUs may be hidden, so that NCCL uses
host memory.

How to fix
----------
A container that has whole GPUs needs no such library. HAMi: CUDA_DISABLE_CONTROL=true in the
manifest of the pod, then libvgpu is not mounted at all; exported within the pod, it makes libvgpu
pass calls on. Others: take the library out of LD_PRELOAD or /etc/ld.so.preload.

When it is wrong
----------------
Where collectives of all ranks worked, it is only information: they show that torch's NCCL works,
not that vLLM does. It is also only information for libraries other than HAMi's, of which no such
fault was reported. Many releases work with NCCL. A library with another name,
one in place of libcuda itself, and one that only the job's command preloads are not found. If ranks
of one host have different variables, only those of its first rank are checked.
Not validated on hardware: tested on made-up clusters and made-up hosts.

References
----------
Project-HAMi/HAMi issues 1055, 1764, 2641 and 2760; Project-HAMi/HAMi-core issues 169 and 261;
HAMi, configuration (CUDA_DISABLE_CONTROL); ld.so(8).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Kind,
    Layer,
    Severity,
    Skip,
    Where,
)
from nccl_doctor.toolkit.gpu.devices import host_gpus
from nccl_doctor.toolkit.hosts import collectives_worked
from nccl_doctor.toolkit.libraries import library_name, mapped_libraries

INTERCEPTS = Kind(
    "cuda-intercepted",
    Layer.ENV,
    "A preloaded library intercepts calls of CUDA",
    "It answers for the driver: NCCL may hang or crash in cuMemCreate, above all where a program "
    "loads NCCL by itself (vLLM), and may not see that GPUs reach each other.",
    "take the library out of LD_PRELOAD and /etc/ld.so.preload",
    Severity.WARN,
    effects=(Effect.JOB_ONLY,),
)

_HAMI = "libvgpu"
_KNOWN = {
    _HAMI: "HAMi",
    "libcuda-control": "gpu-manager",
    "libvgpu-control": "vgpu-manager",
    "libnvshare": "nvshare",
}
"""Library, without what follows its name → the project that has it."""
_FILE = "etc/ld.so.preload"
_OFF = "CUDA_DISABLE_CONTROL"
_YES = ("1", "t", "true")
_HAMI_FIX = (
    "if the pod has whole GPUs: CUDA_DISABLE_CONTROL=true in its manifest; then libvgpu is not "
    "mounted"
)


class Preload(Check):
    """Finds interposers of CUDA among the libraries that this process has mapped."""

    name = "preload"
    layer = Layer.ENV
    kinds = (INTERCEPTS,)
    reads = ("collectives",)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`found`: known interposers that are mapped, each `{"library", "by"}`; `by` is
        `LD_PRELOAD`, `/etc/ld.so.preload` or empty. `off`: whether HAMi's is told to pass calls on.
        """
        if ctx.backend != "nccl":
            raise Skip("the job does not use NCCL")
        gpus = host_gpus(ctx.root)
        if not (gpus["nodes"] or gpus["proc"]):
            raise Skip("no NVIDIA GPU here")
        named = {
            "LD_PRELOAD": _names(ctx.env.get("LD_PRELOAD", "")),
            f"/{_FILE}": _names(_text(ctx.root / _FILE)),
        }
        return {
            "found": [
                {
                    "library": path,
                    "by": next((by for by, names in named.items() if Path(path).name in names), ""),
                }
                for path in mapped_libraries(tuple(_KNOWN), ctx.root / "proc/self/maps")
            ],
            "off": ctx.env.get(_OFF, "").lower() in _YES,
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each host and library."""
        for rank, facts in cluster.facts(self.name):
            for each in facts["found"]:
                name = library_name(each["library"]) or ""
                is_hami = name == _HAMI
                off = is_hami and facts["off"]
                worked = collectives_worked(cluster, rank.host)
                by = f", by {each['by']}" if each["by"] else ""
                said = f"; {_OFF} is set, so it passes calls on" if off else ""
                if is_hami and worked and not off:
                    said += "; collectives with torch's NCCL worked here, vLLM may still hang"
                yield Finding(
                    INTERCEPTS,
                    f"{each['library']} ({_KNOWN.get(name, 'unknown')}){by}{said}",
                    Where(hosts=(rank.host.label,)),
                    dict(each),
                    fix=_HAMI_FIX if is_hami else "",
                    # Nobody reported that NCCL fails with the others.
                    severity=Severity.INFO if off or worked or not is_hami else None,
                    confidence=Confidence.POSSIBLE,
                )


def _names(text: str) -> set[str]:
    """Names of the files in a list as the dynamic loader reads it."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    words = (word for line in lines for word in re.split(r"[\s:]+", line))
    return {Path(word).name for word in words if word}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
