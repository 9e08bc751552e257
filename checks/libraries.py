"""Which CUDA libraries does every rank really load, and are they those that pip lists?

What it checks
--------------
After torch is imported: the file of libnccl, libcudart, libcublas, libcudnn, libnvshmem and
libamdhip64 that this process has mapped, its version (from the library itself, or else from its
file name), its size, its fingerprint (a hash of the size and the first and last MiB), and where it
comes from: a wheel, LD_PRELOAD, LD_LIBRARY_PATH, the environment or the system; `-v` shows the
table. They are compared with the wheels and with the other ranks; another build of the same version
is only a note. No GPU is touched.

Why it matters
--------------
pip lists what was installed, not what is loaded. Wheels for CUDA 12 and 13 write some files to the
same path: the last one wins, and uninstalling the other removes the file of both. If one process
loads two copies of one library, each copy has its own state; a libcudnn or libcublas from elsewhere
may lack functions that torch was built against, or give other results than on the other ranks.

How to fix
----------
cuda-wheels-collide: uninstall all wheels that own the file, and install the one for torch's CUDA
again. cuda-library-replaced, library-loaded-twice: unset LD_PRELOAD, take the folder out of
LD_LIBRARY_PATH. library-differs: one image on every host.

When it is wrong
----------------
Images put newer libraries in front on purpose: if all ranks do so it is only a note. What the job's
own code loads later is not seen. For NCCL, check `nccl_library` reports whether it was replaced,
and check `software` whether ranks differ; ranks with another torch are judged by `software` too.
Not validated on hardware: tested on made-up clusters and made-up libraries.

References
----------
ld.so(8); proc(5) (maps); NVIDIA CUDA runtime, cuBLAS and cuDNN references (the calls for a
version); PyTorch documentation, installation; NVIDIA/nccl issue 2289 on GitHub (one path in two
wheels).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Effect,
    Evidence,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Scope,
    Severity,
    Skip,
    Step,
    Untested,
    number_range,
    odd_ones_out,
    place_of,
    shell,
)
from nccl_doctor.toolkit.gpu.devices import torch_build
from nccl_doctor.toolkit.hosts import WHO, who_has_what
from nccl_doctor.toolkit.libraries import COLUMNS as LIBRARY_COLUMNS
from nccl_doctor.toolkit.libraries import (
    library_row,
    mapped_libraries,
    own_version,
    shared_files,
    what_loads,
    wheels,
)
from nccl_doctor.toolkit.nccl.library import NCCL_LIBRARIES, mapped_nccl, nccl_version
from nccl_doctor.toolkit.versions import differences, release, sides_on_hosts

COLLIDE = Kind(
    "cuda-wheels-collide",
    Layer.ENV,
    "Wheels for different CUDA versions own one file",
    "The wheel that was installed last wins, and uninstalling the other one removes the file of "
    "both.",
    Fix(
        Step(
            shell("# pip uninstall -y NAME"), note="every wheel that owns the file", persists=True
        ),
        Step(shell("# pip install NAME"), note="the one for torch's CUDA", persists=True),
    ),
    Severity.WARN,
)
OVERWRITTEN = COLLIDE.variant(
    title="A file of a CUDA wheel is of another version than pip lists",
    why="Something wrote over it after the wheel was installed: torch loads a library that it was "
    "not tested with, and other ranks may have another one.",
)
REPLACED = Kind(
    "cuda-library-replaced",
    Layer.ENV,
    "A CUDA library other than the one that came with torch is loaded",
    "It may lack functions that torch was built against, or give other results than on other "
    "ranks.",
    Fix(
        Step(shell("unset LD_PRELOAD")),
        alternatives=["take the folder of the other library out of LD_LIBRARY_PATH"],
    ),
    Severity.WARN,
)
TWICE = Kind(
    "library-loaded-twice",
    Layer.ENV,
    "Two copies of one library are loaded in one process",
    "Each copy has its own state, and which of them serves a call is chance.",
    Fix(
        Step(shell("unset LD_PRELOAD")),
        alternatives=["take the folder of one out of LD_LIBRARY_PATH, or uninstall it"],
    ),
    Severity.WARN,
)
DIFFERS = Kind(
    "library-differs",
    Layer.ENV,
    "Ranks with the same torch load different CUDA libraries",
    "Ranks then use different kernels, with different rounding and speed.",
    "Run the same image, or the same locked environment, on every host.",
    Severity.WARN,
    effects=(Effect.DIFFERENCE,),
)

_NAMES = (
    *NCCL_LIBRARIES, "libcudart", "libcublas", "libcublasLt", "libcudnn", "libnvshmem_host",
    "libamdhip64",
)  # fmt: skip
_WHEELS = re.compile(r"nvidia[-_.].+|torch", re.IGNORECASE)

Library = Mapping[str, Any]


class Libraries(Check):
    """Lists the loaded library files of every rank: each may have its own environment."""

    name = "libraries"
    layer = Layer.ENV
    scope = Scope.RANK
    cost = "seconds"  # it loads libraries that may crash the process
    instant_without_gpu = True
    kinds = (COLLIDE, REPLACED, TWICE, DIFFERS)
    deadline_s = 60.0  # a cold import from a network file system

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`torch`: version and CUDA; `loaded`: a table, one row for each mapped file; `shared`:
        files that several wheels own.
        """
        ctx.breadcrumb("import torch")
        try:
            build = torch_build()
        except (ImportError, OSError) as error:
            raise Untested("torch cannot be imported") from error
        paths = mapped_libraries(_NAMES)
        if not paths:
            raise Skip("no library of CUDA, ROCm or NCCL is loaded here")
        installed = wheels(_WHEELS)
        rows = []
        for path in paths:
            ctx.breadcrumb(f"version of {path}")
            rows.append(library_row(path, _version, installed, ctx.env))
        return {
            "torch": f"{build['torch']} {build['cuda'] or build['rocm'] or ''}".strip(),
            "loaded": {"columns": list(LIBRARY_COLUMNS), "rows": rows},
            "shared": shared_files(installed),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each rank, then on differences between ranks with the same torch."""
        groups: dict[str, list[_Seen]] = defaultdict(list)
        for rank, facts in cluster.facts(self.name):
            table = facts["loaded"]
            rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
            groups[facts["torch"]].append(_Seen(rank, rows))
            place = Evidence.rank_place(rank)
            for finding in (*_shared(facts["shared"]), *_overwritten(rows), *_twice(rows)):
                yield finding.replaced(where=place)
        # Another torch brings other libraries: check software reports that.
        for group in groups.values():
            yield from _replaced(group)
            yield from _differ(group)
            yield from _builds(group)


class _Seen(NamedTuple):
    """A rank, and the files that it has mapped, by the columns of the table."""

    rank: Rank
    libraries: Sequence[Library]


def _version(path: str) -> str | None:
    return nccl_version(path) if path in mapped_nccl() else own_version(path)


def _is_nccl(library: Library) -> bool:
    """True if it is a library of NCCL, which other checks judge."""
    return library["library"] in NCCL_LIBRARIES


def _is_replaced(library: Library) -> bool:
    return bool(library["wheel"]) and library["from"] != "wheel" and not _is_nccl(library)


def _shared(files: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    for shared in files:
        names = [name for name, _ in shared["wheels"]]
        if any("nccl" in name.lower() for name in names):
            continue  # check nccl_library reports that
        said = " and ".join(f"{name} {version}" for name, version in shared["wheels"])
        yield Finding(
            COLLIDE,
            f"{said} own one file, {shared['file']}",
            evidence=dict(shared),
            fix=Fix(
                Step(shell("pip uninstall -y {:name}", names), persists=True),
                Step(shell("# pip install NAME"), note="the one for torch's CUDA", persists=True),
            ),
        )


def _overwritten(libraries: Iterable[Library]) -> Iterator[Finding]:
    for library in libraries:
        wheel, _, version = (library["wheel"] or "").rpartition(" ")
        is_own = library["from"] == "wheel" and wheel.lower().startswith("nvidia")
        if is_own and not _is_nccl(library) and not _same(version, library["version"]):
            yield Finding(
                OVERWRITTEN,
                f"pip lists {library['wheel']}, but {library['path']} is {library['version']}",
                evidence=dict(library),
                fix=Fix(
                    Step(
                        shell("pip install --force-reinstall {:name}=={:name}", wheel, version),
                        persists=True,
                    )
                ),
            )


def _same(one: str, other: str | None) -> bool:
    """True if two versions agree in the parts that both have."""
    mine, theirs = release(one), release(other)
    shorter = min(len(mine), len(theirs))
    return mine[:shorter] == theirs[:shorter]


def _twice(libraries: Iterable[Library]) -> Iterator[Finding]:
    copies: dict[str, list[Library]] = defaultdict(list)
    for library in libraries:
        copies[library["library"]].append(library)
    for name, found in copies.items():
        if len(found) > 1:
            said = " and ".join(f"{each['path']} ({_words(each)})" for each in found)
            yield Finding(TWICE, f"{name}: {said}")


def _words(library: Mapping[str, Any]) -> str:
    source = library["wheel"] if library["from"] == "wheel" else library["from"]
    return f"{library['version'] or 'no version'}, {source}"


def _stack(libraries: Iterable[Library]) -> dict[str, str]:
    """Library → version; a library whose version is not known is not compared."""
    return {
        library["library"]: library["version"]
        for library in libraries
        if library["version"] and not _is_nccl(library)
    }


def _replaced(group: Sequence[_Seen]) -> Iterator[Finding]:
    """Replaced libraries; the severity depends on the ranks with the same torch."""
    compared = differences({one.rank.seat: _stack(one.libraries) for one in group})
    odd = {(seat, name) for each in compared for seat in each.places for name in each.sides}
    for one in group:
        for library in filter(_is_replaced, one.libraries):
            name, version, by = library["library"], library["version"], library["from"]
            listed = library["wheel"].rpartition(" ")[2]
            fine = _same(listed, version) or release(version) > release(listed)
            fix: str = Fix(Step(shell("unset LD_PRELOAD")))
            if by.startswith("LD_LIBRARY_PATH="):
                fix = f"take {library['path'].rpartition('/')[0]} out of LD_LIBRARY_PATH"
            elif not by.startswith("LD_PRELOAD="):
                fix = what_loads(name)
            yield Finding(
                REPLACED,
                f"{name} {version or ''} is {library['path']}, by {by}; pip lists "
                f"{library['wheel']}",
                Evidence.rank_place(one.rank),
                dict(library),
                fix,
                Severity.INFO if fine and (one.rank.seat, name) not in odd else None,
            )


def _differ(group: Sequence[_Seen]) -> Iterator[Finding]:
    """Differences between ranks; replaced libraries are reported already and not compared."""
    ranks = {one.rank.seat: one.rank for one in group}
    stacks = {
        one.rank.seat: _stack(each for each in one.libraries if not _is_replaced(each))
        for one in group
    }
    labels = {seat: rank.host.label for seat, rank in ranks.items()}
    for odd in differences(stacks):
        sides = {
            name: {version: _numbers(ranks[s] for s in seats) for version, seats in side.items()}
            for name, side in odd.sides.items()
        }
        tie = "; ".join(
            f"{name} {', '.join(f'{version} on {where}' for version, where in side.items())}"
            for name, side in sides.items()
        )
        yield Finding(
            DIFFERS,
            f"a tie, by rank: {tie}"
            if odd.tie
            else f"{_listed(odd.values)}; the others have {_listed(odd.usual)}",
            place_of(ranks[seat] for seat in odd.places),
            {"ranks": sides, WHO: sides_on_hosts(odd, labels)},
        )


def _builds(group: Sequence[_Seen]) -> Iterator[Finding]:
    """Files of one version that differ; those that replace a wheel's are reported already."""
    prints: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    ranks = {one.rank.seat: one.rank for one in group}
    for one in group:
        for each in one.libraries:
            own = not each["wheel"] or each["from"] == "wheel"
            if own and each["version"] and each["fingerprint"]:
                prints[each["library"], each["version"]][one.rank.seat] = each["fingerprint"]
    for (name, version), seats in prints.items():
        odd = odd_ones_out(seats)
        if odd is not None:
            sides: dict[str, list[Rank]] = defaultdict(list)
            for seat, print_ in seats.items():
                sides[print_].append(ranks[seat])
            yield Finding(
                DIFFERS,
                f"{name} {version}: {len(sides)} different builds, by fingerprint",
                place_of(ranks[seat] for seat in odd.places),
                {
                    "builds": {print_: _numbers(those) for print_, those in sides.items()},
                    WHO: who_has_what((ranks[s].host.label, print_) for s, print_ in seats.items()),
                },
                severity=Severity.INFO,
            )


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _numbers(ranks: Iterable[Rank]) -> str:
    return number_range([rank.seat if rank.rank is None else rank.rank for rank in ranks])
