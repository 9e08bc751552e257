"""Which GPU code runs on which GPU, and where versions differ.

Pure functions on text and numbers, so that rules about builds are tested without any build.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nccl_doctor.blame import odd_ones_out

_ARCH = re.compile(r"(sm|compute)_(\d+)([af]?)")

OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""CUDA major version → oldest Linux driver that runs it, by minor-version compatibility (CUDA
toolkit release notes, table of driver versions)."""


def arch_runs_on(arch: str, capability: Sequence[int]) -> bool:
    """Whether code built for `arch` runs on an NVIDIA GPU of compute capability (major, minor).

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


def public(version: str) -> str:
    """A version without its local part: `"2.13.0+cu130"` gives `"2.13.0"`."""
    return version.split("+", maxsplit=1)[0]


@dataclass(frozen=True)
class Difference:
    """What one set of odd places has in common.

    Attributes:
        places: the odd ones out, or everybody on a tie.
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


def differences(stacks: Mapping[int, Mapping[str, str]]) -> tuple[Difference, ...]:
    """Compare component by component; components that differ at the same places come together.

    A host with another image differs in many versions at once, for one reason.

    Args:
        stacks: place → component → version. A component that a place lacks is not compared there.
    """
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
        Difference(
            places,
            {name: value for name, value, _ in found if value is not None},
            {name: usual for name, _, usual in found if usual is not None},
            {name: _sides(stacks, name) for name, _, _ in found},
            tie,
        )
        for (places, tie), found in merged.items()
    )


def _sides(stacks: Mapping[int, Mapping[str, str]], name: str) -> dict[str, tuple[int, ...]]:
    sides: dict[str, tuple[int, ...]] = {}
    for place, stack in stacks.items():
        if name in stack:
            sides[stack[name]] = (*sides.get(stack[name], ()), place)
    return sides
