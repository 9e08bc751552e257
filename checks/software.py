"""Do all ranks run the same software: torch, CUDA, NCCL, DeepSpeed, Python, GPU driver?

What it checks
--------------
The versions of torch (and, if these are equal, the commit that it was built from), of the CUDA or
ROCm of that build, of NCCL (and, if these are equal, whether it is the same file), of DeepSpeed,
Accelerate, Transformers, Python and the NVIDIA kernel driver, on every rank, compared with all
others. Only torch is imported, and no GPU is touched.

Why it matters
--------------
Different NCCL versions refuse each other or hang. Different torch or DeepSpeed versions may split
tensors differently, and then wait for each other or sum tensors that do not belong together.

How to fix
----------
Run one image, or one locked environment, on every host.

When it is wrong
----------------
Some differences are intended and harmless: the Python of one host, a driver while a fleet is
upgraded. Releases of one driver branch, and of one minor version of Python, are taken as equal. The
NCCL version is that of the loaded library, by check `nccl_library`, which also reports where it
comes from; if that is not known, it is the one that torch was built with. Versions of packages are
those that pip lists: a package that the job imports from another folder is not seen.

References
----------
PyTorch documentation of torch.version and torch.cuda.nccl; NVIDIA NCCL user guide; NVIDIA driver
release branches.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Effect,
    Figure,
    Finding,
    Kind,
    Layer,
    Rank,
    Scope,
    Setup,
    Severity,
    number_range,
    place_of,
)
from nccl_doctor.system.programs import installed
from nccl_doctor.toolkit.gpu.devices import host_gpus, torch_build
from nccl_doctor.toolkit.hosts import WHO
from nccl_doctor.toolkit.versions import (
    DifferingComponents,
    differences,
    minor_of,
    public,
    sides_on_hosts,
)

PACKAGES = ("DeepSpeed", "Accelerate", "Transformers")
"""Libraries that determine in which order ranks communicate, and how much."""

VERSION = Kind(
    "version-differs",
    Layer.DEVICE,
    "Software versions differ between ranks",
    "Different versions of NCCL refuse each other or hang; different versions of torch are not "
    "guaranteed to work together, though over gloo most do.",
    "Run the same image, or the same locked environment, on every host.",
    Severity.WARN,
    effects=(Effect.DIFFERENCE,),
)


class Software(Check):
    """Compares the versions on every rank: each may run in its own environment."""

    name = "software"
    layer = Layer.DEVICE
    scope = Scope.RANK
    kinds = (VERSION,)
    reads = ("nccl_library",)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Versions as text, None for what is missing; `driver`: of the NVIDIA kernel module;
        `python_path`: the interpreter.
        """
        import torch

        build = torch_build()
        return {
            **{name: build[name] for name in ("torch", "cuda", "rocm", "nccl")},
            "torch_git": torch.version.git_version,
            **{name.lower(): installed(name.lower()) for name in PACKAGES},
            "python": platform.python_version(),
            "python_path": sys.executable,
            "driver": host_gpus(ctx.root)["driver"],
        }

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """All versions of each rank."""
        for rank, facts in cluster.facts(self.name):
            for name in ("torch", "CUDA", "ROCm", "NCCL", *PACKAGES, "Python", "driver"):
                yield Figure(name, facts.get(name.lower()), place_of([rank]))
            if facts.get("python_path"):
                yield Figure("Python path", facts["python_path"], place_of([rank]))

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for all differences of the same ranks: they probably have another image."""
        seen = {rank.seat: (rank, facts) for rank, facts in cluster.facts(self.name)}
        loaded = {
            rank.seat: facts["loaded"]
            for rank, facts in cluster.facts("nccl_library")
            if facts["loaded"]
        }
        builds = [(facts, loaded.get(seat)) for seat, (_, facts) in seen.items()]
        if all(build == builds[0] for build in builds):
            return
        same_torch = len({public(facts["torch"]) for facts, _ in builds}) == 1
        same_nccl = len({library["version"] for library in loaded.values()}) == 1
        same_nccl &= len(loaded) == len(seen)
        stacks = {
            seat: _stack(facts, loaded.get(seat), same_torch=same_torch, same_nccl=same_nccl)
            for seat, (_, facts) in seen.items()
        }
        labels = {seat: rank.host.label for seat, (rank, _) in seen.items()}
        for odd in differences(stacks):
            sides = {
                name: {value: _numbers(seen[s][0] for s in seats) for value, seats in side.items()}
                for name, side in odd.sides.items()
            }
            yield Finding(
                VERSION,
                _tie(sides)
                if odd.tie
                else f"{_words(odd.values)}; the others have {_words(odd.usual)}",
                place_of(seen[seat][0] for seat in odd.places),
                {"ranks": sides, WHO: sides_on_hosts(odd, labels)},
                severity=_severity(cluster, odd),
            )

    def sections(self, cluster: Cluster) -> Iterator[Setup]:
        """Every version."""
        for rank, facts in cluster.facts(self.name):
            for name in ("torch", "cuda", "rocm", "nccl", "python", "driver", "deepspeed"):
                if facts.get(name):
                    yield Setup(name, facts[name], rank.host.id)


def _stack(
    facts: Mapping[str, Any], nccl: Mapping[str, str] | None, *, same_torch: bool, same_nccl: bool
) -> dict[str, str]:
    """Component → version, without what a rank does not have. `nccl`: the loaded library."""
    packages = {name: facts.get(name.lower(), "") for name in PACKAGES}
    stack = {
        "torch": public(facts["torch"]),
        "torch built from": (facts["torch_git"] or "")[:12] if same_torch else "",
        "CUDA": facts["cuda"] or (f"ROCm {facts['rocm']}" if facts["rocm"] else None),
        "NCCL": nccl["version"] if nccl else facts["nccl"],
        "NCCL file": nccl["fingerprint"] if nccl and same_nccl else "",
        **{name: "not installed" if found is None else found for name, found in packages.items()},
        "Python": minor_of(facts["python"]),
        # Releases of one branch may be mixed while a fleet is upgraded.
        "NVIDIA driver branch": (facts["driver"] or "").split(".")[0],
    }
    return {name: value for name, value in stack.items() if value}


def _words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _numbers(ranks: Iterable[Rank]) -> str:
    return number_range([rank.seat if rank.rank is None else rank.rank for rank in ranks])


def _tie(components: Mapping[str, Mapping[str, str]]) -> str:
    parts = []
    for name, sides in components.items():
        texts = [f"{version} on {ranks}" for version, ranks in sides.items()]
        parts.append(f"{name} {', '.join(texts)}")
    return f"a tie, by rank: {'; '.join(parts)}"


def _severity(cluster: Cluster, odd: DifferingComponents) -> Severity:
    """Severity: a failure for NCCL or for a minor version of torch over NCCL, else a warning.

    Over gloo, ranks of torch 2.5.1 to 2.15.0 work together, each pair both ways, with all-reduce,
    all-gather, all-to-all, broadcast, barrier, send, recv and new_group; so do those of 2.4.1,
    unless it serves the store: clients from 2.5.1 on do not come in there. Measured on 2.4.1,
    2.5.1, 2.6.0, 2.7.1, 2.13.0 and 2.15.0.
    """
    torch_minors = {minor_of(version) for version in odd.sides.get("torch", {})}
    differs = "NCCL" in odd.sides or len(torch_minors) > 1
    return Severity.FAIL if differs and cluster.backend == "nccl" else Severity.WARN
