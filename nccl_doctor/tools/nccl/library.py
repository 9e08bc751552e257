"""Shared libraries of NCCL: the one that this process has, and where each may come from.

For `observe`: what is called here maps libraries and may crash.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_NAME = re.compile(r"lib[nr]ccl\.so[.\d]*")
_WHEEL = re.compile(r"nvidia[-_.]nccl[-_.]cu\d+", re.IGNORECASE)
_EDGE = 1 << 20


def mapped_nccl(maps: Path = Path("/proc/self/maps")) -> tuple[str, ...]:
    """Paths of the NCCL (or RCCL) libraries that this process has mapped.

    None where torch was linked with NCCL statically, or is not imported yet.
    """
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    paths = (line.partition("/")[2] for line in lines)
    return tuple(dict.fromkeys(f"/{p}" for p in paths if _NAME.fullmatch(p.rpartition("/")[2])))


def nccl_version(path: str) -> str | None:
    """What `ncclGetVersion` of one library says; None where it does not answer.

    Raises:
        OSError: the library cannot be loaded.
    """
    number = ctypes.c_int(0)
    call = getattr(ctypes.CDLL(path), "ncclGetVersion", None)
    if call is None or call(ctypes.byref(number)) != 0:
        return None
    return version_text(number.value)


def version_text(number: int) -> str:
    """An NCCL_VERSION_CODE in words: 2708 and 22809 are 2.7.8 and 2.28.9 (nccl.h)."""
    step = 1000 if number < 10_000 else 10_000
    return f"{number // step}.{number % step // 100}.{number % 100}"


def fingerprint(path: str) -> str:
    """What tells builds apart: a hash over the size and both ends of the file.

    Headers and section tables are there; reading all of some hundred megabytes would take seconds.

    Raises:
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        first = file.read(_EDGE)
        file.seek(max(0, size - _EDGE))
        return hashlib.sha256(b"%d" % size + first + file.read()).hexdigest()[:16]


def nccl_wheels() -> list[dict[str, Any]]:
    """Installed distributions that bring a libnccl: `{"name", "version", "library"}`, the last one
    the real path of its file or None.
    """
    found: dict[str, dict[str, Any]] = {}
    for wheel in metadata.distributions():
        name = str(wheel.metadata["Name"] or "")
        if _WHEEL.fullmatch(name):
            files = (file for file in wheel.files or () if _NAME.fullmatch(file.name))
            paths = (Path(str(wheel.locate_file(file))) for file in files)
            library = next((str(path.resolve()) for path in paths if path.exists()), None)
            # The first one on the path is the one that counts, as for an import.
            found.setdefault(name, {"name": name, "version": wheel.version, "library": library})
    return [found[name] for name in sorted(found)]


def in_front(env: Mapping[str, str], path: str) -> Iterator[str]:
    """What puts this library in front of others: entries of LD_PRELOAD and LD_LIBRARY_PATH, each
    as `VARIABLE=entry`.
    """
    library = Path(path).resolve()
    for entry in re.split(r"[ :]+", env.get("LD_PRELOAD", "")):
        if entry and (Path(entry).resolve() == library or Path(entry).name == library.name):
            yield f"LD_PRELOAD={entry}"
    for entry in re.split(r"[:;]", env.get("LD_LIBRARY_PATH", "")):
        if entry and Path(entry).resolve() == library.parent:
            yield f"LD_LIBRARY_PATH={entry}"
