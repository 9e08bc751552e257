"""NCCL's own library: the one that this process has, its version, and the wheels that hold it.

For `observe`: these functions map libraries and may crash.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

from nccl_doctor.toolkit.libraries import library_name, mapped_libraries, wheels

NCCL_LIBRARIES = ("libnccl", "librccl")
_WHEEL = re.compile(r"nvidia[-_.]nccl[-_.]cu\d+", re.IGNORECASE)


def mapped_nccl(maps: Path = Path("/proc/self/maps")) -> tuple[str, ...]:
    """Paths of the NCCL (or RCCL) libraries that this process has mapped.

    Empty if NCCL is statically linked into torch, or torch is not imported yet.
    """
    return mapped_libraries(NCCL_LIBRARIES, maps)


def nccl_version(path: str) -> str | None:
    """The version by `ncclGetVersion` of one library; None if the call fails.

    Raises:
        OSError: the library cannot be loaded.
    """
    number = ctypes.c_int(0)
    call = getattr(ctypes.CDLL(path), "ncclGetVersion", None)
    if call is None or call(ctypes.byref(number)) != 0:
        return None
    return version_text(number.value)


def version_text(number: int) -> str:
    """An NCCL_VERSION_CODE as text: 2708 and 22809 are 2.7.8 and 2.28.9 (nccl.h)."""
    step = 1000 if number < 10_000 else 10_000
    return f"{number // step}.{number % step // 100}.{number % 100}"


def nccl_wheels() -> list[dict[str, Any]]:
    """Installed distributions that hold a libnccl: `{"name", "version", "library"}`, the last one
    the real path of its file or None.
    """
    return [
        {
            "name": wheel.name,
            "version": wheel.version,
            "library": next(
                (p for p in wheel.libraries if library_name(p) in NCCL_LIBRARIES), None
            ),
        }
        for wheel in wheels(_WHEEL)
    ]
