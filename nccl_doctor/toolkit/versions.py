"""Versions: which GPU code runs on which GPU, and where versions and other values differ.

Pure functions on text, numbers and ranks, so that rules about builds are tested without a build.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from nccl_doctor.model.cluster import Cluster, Rank
from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Confidence, Finding, Kind, Where
from nccl_doctor.model.fixes import Fix, Step
from nccl_doctor.toolkit.blame import odd_ones_out
from nccl_doctor.toolkit.hosts import sides_in_words, who_has_what

_ARCH = re.compile(r"(sm|compute)_(\d+)([af]?)")

OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""CUDA major version → oldest Linux driver that runs it, by minor-version compatibility (CUDA
toolkit release notes, table of driver versions)."""


def arch_runs_on(arch: str, capability: Sequence[int]) -> bool:
    """True if code built for `arch` runs on an NVIDIA GPU of compute capability (major, minor).

    Args:
        arch: as torch lists it: `sm_86` (binary), `compute_90` (PTX), with `a` for one exact
            architecture or `f` for one family.
        capability: of the GPU, e.g. (8, 6).

    Binaries run on the same major version and an equal or higher minor; PTX is compiled by the
    driver for anything equal or newer; `a` is exact for both.
    """
    parsed = _ARCH.fullmatch(arch)
    if parsed is None:
        return False
    kind, digits, suffix = parsed.groups()
    built = (int(digits[:-1] or 0), int(digits[-1]))
    device = (int(capability[0]), int(capability[1]))
    if suffix == "a":
        return built == device
    same_major = built[0] == device[0] and built[1] <= device[1]
    if kind == "compute" and not suffix:
        return built <= device
    return same_major


def major(version: str | None) -> int | None:
    """First number of a version, or None: `"12.8"` gives 12."""
    found = re.match(r"\d+", version or "")
    return int(found.group()) if found else None


def minor_of(version: str) -> str:
    """First two numbers of a version: `"2.13.0"` gives `"2.13"`."""
    return ".".join(version.split(".")[:2])


@lru_cache(maxsize=1024)
def release(version: str | None) -> tuple[int, ...]:
    """First three numbers of a version, to compare: `"2.26.2.post1"` gives (2, 26, 2)."""
    found = re.match(r"\d+(?:\.\d+){0,2}", version or "")
    return tuple(map(int, found.group().split("."))) if found else ()


def public(version: str) -> str:
    """A version without its local part: `"2.13.0+cu130"` gives `"2.13.0"`."""
    return version.split("+", maxsplit=1)[0]


@dataclass(frozen=True)
class DifferingComponents:
    """The components that differ at one set of places.

    Attributes:
        places: the odd ones out, or all places on a tie.
        values: component → value at `places`; empty on a tie.
        usual: component → value of the majority; empty on a tie.
        sides: component → value → places, for those that differ here.
        tie: whether no side is the majority.
    """

    places: tuple[int, ...]
    values: Mapping[str, str]
    usual: Mapping[str, str]
    sides: Mapping[str, Mapping[str, tuple[int, ...]]]
    tie: bool


def differences(stacks: Mapping[int, Mapping[str, str]]) -> tuple[DifferingComponents, ...]:
    """Compare component by component; components that differ at the same places come together.

    A host with another image differs in many versions at once, for one reason.

    Args:
        stacks: place → component → version. A component that a place lacks is not compared there.
    """
    every = list(stacks.values())
    if every[1:] == every[:-1]:
        return ()  # each is as the next one
    components = list(dict.fromkeys(name for stack in stacks.values() for name in stack))
    merged: dict[tuple[tuple[int, ...], bool], list[tuple[str, str | None, str | None]]] = {}
    for name in components:
        values = {place: stack[name] for place, stack in stacks.items() if name in stack}
        odd = odd_ones_out(values)
        if odd is None:
            continue
        if odd.tie:
            merged.setdefault((tuple(sorted(odd.places)), True), []).append((name, None, None))
            continue
        for value in dict.fromkeys(values[place] for place in odd.places):
            places = tuple(sorted(place for place in odd.places if values[place] == value))
            merged.setdefault((places, False), []).append((name, value, odd.usual))
    return tuple(
        DifferingComponents(
            places,
            {name: value for name, value, _ in found if value is not None},
            {name: usual for name, _, usual in found if usual is not None},
            {name: _sides(stacks, name) for name, _, _ in found},
            tie,
        )
        for (places, tie), found in merged.items()
    )


def sides_on_hosts(odd: DifferingComponents, labels: Mapping[int, str]) -> dict[str, str]:
    """Component → in words, the hosts that have each version; `labels`: place → name of its host.

    A host whose ranks differ has more than one.
    """
    return {
        name: who_has_what((labels[p], version) for version, ps in sides.items() for p in ps)
        for name, sides in odd.sides.items()
    }


def _sides(stacks: Mapping[int, Mapping[str, str]], name: str) -> dict[str, tuple[int, ...]]:
    sides: dict[str, list[int]] = {}
    for place, stack in stacks.items():
        if name in stack:
            sides.setdefault(stack[name], []).append(place)
    return {version: tuple(places) for version, places in sides.items()}


def place_of(ranks: Iterable[Rank]) -> Where:
    """Hosts and ranks of several participants."""
    here = list(ranks)
    return Where(
        hosts=tuple(sorted({rank.host.name for rank in here if rank.host.name is not None})),
        ranks=tuple(sorted({rank.rank for rank in here if rank.rank is not None})),
    )


class Disagreement(NamedTuple):
    """A value that must be the same everywhere and is not; `usual` is None on a tie."""

    finding: Finding
    usual: Any


def disagreement(
    kind: Kind, name: str, claims: Iterable[tuple[Rank, Any]], *, of_host: bool
) -> Disagreement | None:
    """The finding on hosts whose value differs, or on ranks if those of one host differ.

    Args:
        kind: of the finding.
        name: of the value, as people type it.
        claims: the value of each rank; None is ignored.
        of_host: whether the value belongs to the host: then the place is the host alone.

    Returns: None if all agree.
    """
    known = [(rank, value) for rank, value in claims if value is not None]
    if len({value for _, value in known}) < 2:
        return None
    hosts: dict[int, set[Any]] = defaultdict(set)
    for rank, value in known:
        hosts[rank.host.id].add(value)
    # A host votes once: a big one must not outvote two small ones.
    whole = all(len(values) == 1 for values in hosts.values())
    odd = odd_ones_out({rank.host.id if whole else rank.seat: value for rank, value in known})
    if odd is None:
        return None
    places = set(odd.places)
    blamed = [item for item in known if (item[0].host.id if whole else item[0].seat) in places]
    said = ", ".join(f"{name}={v}" for v in sorted({value for _, value in blamed}, key=str))
    sides: dict[str, list[str]] = {}
    for rank, value in known:
        place = rank.host.label if whole else f"rank {rank.rank}"
        if place not in sides.setdefault(f"{name}={value}", []):
            sides[f"{name}={value}"].append(place)
    where = place_of(rank for rank, _ in blamed)
    finding = Finding(
        kind,
        f"{sides_in_words(sides)}: equally divided, so it is not known which is right"
        if odd.tie
        else f"{said}, elsewhere {name}={odd.usual}",
        Where(hosts=where.hosts) if of_host and whole else where,
        {"values": {rank.host.label: sorted(hosts[rank.host.id], key=str) for rank, _ in known}},
        f"decide which {name.lstrip('-')} is right, and set it on all of them"
        if odd.tie
        else _as_elsewhere(name, str(odd.usual)),
        confidence=Confidence.POSSIBLE if odd.tie else Confidence.CERTAIN,
    )
    return Disagreement(finding, odd.usual)


USE_NCCL2 = "TORCH_DIST_USE_NCCL2"


def process_group(torch: str, use: str | None) -> str:
    """`nccl2` or `nccl-legacy`, by torch's version and the value of TORCH_DIST_USE_NCCL2.

    Source: `_register_builtin_nccl_backend` in torch/distributed/distributed_c10d.py.
    """
    version = release(torch)
    new = use != "0" if version >= (2, 15) else version >= (2, 14) and use == "1"
    return "nccl2" if new else "nccl-legacy"


NCCL_LIBRARY = "nccl_library"
"""The check whose facts `loaded_nccl` reads."""


def loaded_nccl(cluster: Cluster) -> dict[int, str]:
    """Seat → version of NCCL, as check `nccl_library` found it.

    If NCCL is linked into torch, the version that torch was built with. Ranks whose version is not
    known are left out.
    """
    found = {}
    for rank, facts in cluster.facts(NCCL_LIBRARY):
        version = (facts.get("loaded") or {}).get("version") or facts.get("built")
        if version:
            found[rank.seat] = version
    return found


def _as_elsewhere(name: str, value: str) -> str:
    """The fix that gives an option or a variable the value that most have."""
    if name.startswith("--"):
        note = "in the line that starts the job, as elsewhere"
        return Fix(Step(shell("# {:option} {}", name, value), note=note))
    return f"set {name}={value} there, as elsewhere"
