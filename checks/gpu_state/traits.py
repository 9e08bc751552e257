"""Traits of a GPU, in words, that all GPUs of its model should have. Pure.

The GPUs of a cluster have the same few values: words for them are made once, and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from nccl_doctor.api import Severity
from nccl_doctor.toolkit.gpu.drift import known

from .trouble import Gpu

Traits = Mapping[str, str]
"""Trait → value. GPUs of the same values share one: it is only read."""
_MANY = 1024
_ON: Mapping[int | None, str] = {0: "off", 1: "on"}
_MODES: Mapping[int | None, str] = {0: "Default", 3: "Exclusive Process"}
"""Compute modes; Prohibited is a finding of the GPU itself."""


class _Speed(NamedTuple):
    """Values that make a GPU slower or smaller than its peers."""

    memory: int | None
    ecc: int | None
    mig: int | None
    limit_mw: int | None
    sm_mhz: int | None
    memory_mhz: int | None
    set_mhz: int | None
    default_mhz: int | None
    generation: int | None
    width: int | None


def _speed_of(gpu: Gpu) -> Traits:
    seen = _Speed(
        gpu["memory"]["total"] if gpu["memory"] else None,
        _now(gpu["ecc"]),
        _now(gpu["mig"]),
        gpu["power_limit_mw"],
        gpu["max_sm_clock_mhz"],
        gpu["max_memory_clock_mhz"],
        gpu.get("set_sm_clock_mhz"),
        gpu.get("default_sm_clock_mhz"),
        gpu["max_pcie_generation"],
        gpu["max_pcie_width"],
    )
    return _speed(seen)


@lru_cache(_MANY)
def _speed(seen: _Speed) -> Traits:
    # A clock that is set below the default is a finding of the GPU itself.
    is_set = seen.set_mhz and seen.default_mhz and seen.set_mhz >= seen.default_mhz
    return known(
        {
            "memory": seen.memory is not None and f"{seen.memory / (1 << 30):.1f} GiB",
            "ECC": _ON.get(seen.ecc),
            "MIG": _ON.get(seen.mig),
            "power limit": seen.limit_mw and f"{seen.limit_mw / 1000:.0f} W",
            "highest SM clock": seen.sm_mhz and f"{seen.sm_mhz} MHz",
            "highest memory clock": seen.memory_mhz and f"{seen.memory_mhz} MHz",
            "SM clock set": is_set and f"{seen.set_mhz} MHz",
            "PCIe": seen.generation
            and seen.width
            and f"generation {seen.generation} x{seen.width}",
        }
    )


def _make_of(gpu: Gpu) -> Traits:
    return _make(gpu["vbios"], gpu["persistence"], _now(gpu.get("gsp")), gpu["compute_mode"])


@lru_cache(_MANY)
def _make(vbios: str | None, persistence: int | None, gsp: int | None, mode: int | None) -> Traits:
    return known(
        {
            "VBIOS": vbios,
            "persistence mode": _ON.get(persistence),
            "GSP firmware": _ON.get(gsp),
            "compute mode": _MODES.get(mode),
        }
    )


def _now(setting: list[Any] | None) -> Any:
    """The value that counts now: the first of a pair; the other is a later one, or the default."""
    return setting[0] if setting else None


TRAITS_OF = {Severity.WARN: _speed_of, Severity.INFO: _make_of}
"""Traits that make a GPU slower or smaller than its peers, and traits that only differ."""
