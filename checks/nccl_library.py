"""Which NCCL library does every rank load, and is it the one that its torch came with?

What it checks
--------------
The libnccl that `import torch` maps into the process: its path, the result of ncclGetVersion, and a
fingerprint of the file. It is compared with the installed nvidia-nccl wheels (two of them may own
the same file), and with LD_PRELOAD and LD_LIBRARY_PATH. Check `software` compares these versions
between ranks. No communicator is made and no GPU is touched.

Why it matters
--------------
pip lists what was installed, not what is loaded. The wheels for CUDA 12 and 13 write to the same
path, so the last one wins, and uninstalling the other removes the file of both. If LD_LIBRARY_PATH
puts a system libnccl in front on some hosts only, versions differ between hosts: NCCL refuses
(`Mismatched NCCL version detected`), and older versions hang.

How to fix
----------
nccl-wheels-collide: uninstall every nvidia-nccl wheel, and install the one for torch's CUDA again.
nccl-library-replaced: unset LD_PRELOAD, take the folder out of LD_LIBRARY_PATH, or do the same on
every host.

When it is wrong
----------------
Cloud images put a newer NCCL in front on purpose; if all ranks do that it is only a note. An NCCL
that is statically linked into torch has no file: then the version is the one that torch was built
with. What the job's own code loads later is not seen.
Not validated on hardware: tested on made-up clusters and on a made-up library.

References
----------
NCCL user guide, ncclGetVersion; ld.so(8); PyTorch documentation, installation; NVIDIA/nccl issue
2289 on GitHub (one path in two wheels).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Evidence,
    Figure,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Scope,
    Setup,
    Severity,
    Skip,
    Step,
    Untested,
    odd_ones_out,
    shell,
)
from nccl_doctor.toolkit.gpu.devices import torch_build
from nccl_doctor.toolkit.libraries import fingerprint, in_front, what_loads
from nccl_doctor.toolkit.nccl.library import mapped_nccl, nccl_version, nccl_wheels
from nccl_doctor.toolkit.versions import release

COLLIDE = Kind(
    "nccl-wheels-collide",
    Layer.ENV,
    "The NCCL file is not that of the wheel that pip lists",
    "Wheels of NCCL for different CUDA versions own one file: the last one wins, and uninstalling "
    "the other one removes the file of both.",
    Fix(
        Step(shell("# pip uninstall -y NAME"), note="every wheel of NCCL", persists=True),
        Step(shell("# pip install NAME"), note="the one for torch's CUDA", persists=True),
    ),
    Severity.WARN,
)
REPLACED = Kind(
    "nccl-library-replaced",
    Layer.ENV,
    "An NCCL other than the one that came with torch is loaded",
    "Different NCCL versions on different ranks refuse each other or hang; an older one may lack "
    "functions that torch was built against.",
    Fix(
        Step(shell("unset LD_PRELOAD")),
        alternatives=["take the folder of the other libnccl out of LD_LIBRARY_PATH"],
    ),
    Severity.WARN,
)


class NcclLibraryFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    built: str | None
    cuda: str | None
    wheels: list[dict[str, Any]]
    loaded: dict[str, str] | None
    in_front: list[str]


class NcclLibrary(Check):
    """Finds the NCCL library that every rank loads: each may have its own environment."""

    name = "nccl_library"
    layer = Layer.ENV
    scope = Scope.RANK
    cost = "seconds"  # it loads a library that may crash the process
    instant_without_gpu = True
    kinds = (COLLIDE, REPLACED)
    deadline_s = 60.0  # a cold import from a network file system

    def observe(self, ctx: Context) -> NcclLibraryFacts:
        """`built`: the version that torch was built with; `loaded`: `{"path", "version",
        "fingerprint"}` of the mapped library, None if it is linked in; `wheels`; `in_front`: the
        variables that put it in front.
        """
        ctx.breadcrumb("import torch")
        try:
            build = torch_build()
        except (ImportError, OSError) as error:
            raise Untested("torch cannot be imported") from error
        if not build["nccl_built"]:
            raise Skip("this torch is built without NCCL")
        paths = mapped_nccl()
        facts: NcclLibraryFacts = {
            "built": build["nccl"],
            "cuda": build["cuda"],
            "wheels": nccl_wheels(),
            "loaded": None,
            "in_front": [],
        }
        if not paths:
            return facts
        ctx.breadcrumb(f"ncclGetVersion of {paths[0]}")
        version = nccl_version(paths[0])
        if version is None:
            raise Untested(f"{paths[0]} does not report its version")
        loaded = {"path": paths[0], "version": version, "fingerprint": fingerprint(paths[0])}
        return {**facts, "loaded": loaded, "in_front": list(in_front(ctx.env, paths[0]))}

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """The version and the file of the loaded library."""
        for rank, facts in cluster.facts(self.name):
            loaded = facts["loaded"]
            if loaded:
                said = f"{loaded['version']} from {loaded['path']}"
                yield Figure("loaded NCCL", said, Evidence.rank_place(rank))

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each rank; how severe a replaced library is depends on the other ranks."""
        seen = list(cluster.facts(self.name))
        odd = odd_ones_out({rank.seat: _version(facts) for rank, facts in seen})
        # If the builds of torch differ, that is the fault, and check software reports it.
        same_build = len({facts["built"] for _, facts in seen}) == 1
        alone = frozenset(odd.places if odd and same_build else ())
        for rank, facts in seen:
            yield from _collides(rank, facts)
            if facts["loaded"]:
                yield from _replaced(cluster, rank, facts, differs=rank.seat in alone)

    def sections(self, cluster: Cluster) -> Iterator[Setup]:
        """The version of the loaded library."""
        for rank, facts in cluster.facts(self.name):
            if facts.get("loaded"):
                yield Setup("nccl loaded", facts["loaded"]["version"], rank.host.id)


def _version(facts: Mapping[str, Any]) -> str | None:
    version: str | None = facts["loaded"]["version"] if facts["loaded"] else facts["built"]
    return version


def _collides(rank: Rank, facts: Mapping[str, Any]) -> Iterator[Finding]:
    wheels = [wheel for wheel in facts["wheels"] if wheel["library"]]
    owners = [wheel for wheel in wheels if wheel["library"] == wheels[0]["library"]]
    loaded = facts["loaded"] or {"path": None, "version": None}
    said = " and ".join(f"{wheel['name']} {wheel['version']}" for wheel in owners)
    if len(owners) > 1:
        text = f"{said} own one file, {owners[0]['library']}"
        text += f", which is NCCL {loaded['version']}" if loaded["version"] else ""
    elif owners and owners[0]["library"] == loaded["path"]:
        if release(owners[0]["version"]) == release(loaded["version"]):
            return
        text = f"pip lists {said}, but {loaded['path']} is NCCL {loaded['version']}"
    else:
        return
    names = [wheel["name"] for wheel in owners]
    fits = f"cu{(facts['cuda'] or '').partition('.')[0]}"
    right = next((w for w in owners if w["name"].endswith(fits)), owners[0])
    line = "pip uninstall -y {:name} && pip install {:name}=={:name}"
    again = shell(line, names, right["name"], right["version"])
    fix = Fix(Step(again, persists=True))
    yield Finding(COLLIDE, text, Evidence.rank_place(rank), {"wheels": wheels, **loaded}, fix)


def _replaced(
    cluster: Cluster, rank: Rank, facts: Mapping[str, Any], *, differs: bool
) -> Iterator[Finding]:
    """Finding on a library that is not torch's; `differs`: most ranks have another version."""
    loaded, built = facts["loaded"], facts["built"]
    homes = {wheel["library"] for wheel in facts["wheels"] if wheel["library"]}
    preloaded = any(entry.startswith("LD_PRELOAD=") for entry in facts["in_front"])
    if loaded["path"] in homes or not (homes or preloaded):
        return  # without a wheel the library of the system is the right one
    severity = Severity.INFO
    if differs and cluster.backend == "nccl":
        severity = Severity.FAIL
    elif differs or release(loaded["version"]) < release(built or "0"):
        severity = Severity.WARN
    by = f", by {', '.join(facts['in_front'])}" if facts["in_front"] else ""
    unset = [entry.partition("=")[0] for entry in facts["in_front"]]
    folder = loaded["path"].rpartition("/")[0]
    fix: str = what_loads("libnccl")
    if "LD_PRELOAD" in unset:
        fix = Fix(Step(shell("unset LD_PRELOAD")))
    if "LD_LIBRARY_PATH" in unset:
        fix = f"take {folder} out of LD_LIBRARY_PATH"
    yield Finding(
        REPLACED,
        f"NCCL {loaded['version']} from {loaded['path']}{by}; torch was built with {built}",
        Evidence.rank_place(rank),
        {"wheels": facts["wheels"], "in_front": facts["in_front"]},
        fix,
        severity,
    )
