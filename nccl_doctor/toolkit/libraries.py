"""Shared libraries that this process really has mapped: file, version, and where each comes from.

For `observe`: these functions map libraries and may crash.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from nccl_doctor.model.commands import shell
from nccl_doctor.model.fixes import Fix, look

_FILE = re.compile(r"(lib[\w+-]+)\.so((?:\.\d+)*)")
_EDGE = 1 << 20

COLUMNS = ("library", "version", "path", "from", "wheel", "bytes", "fingerprint")
"""Columns of a table of libraries; `from` and `wheel` as `origin` returns them."""


def library_name(path: str) -> str | None:
    """`libcudart` of `/any/libcudart.so.12.8.90`; None if the path is no shared library."""
    found = _FILE.fullmatch(path.rpartition("/")[2])
    return found.group(1) if found else None


def mapped_libraries(
    names: Collection[str], maps: Path = Path("/proc/self/maps")
) -> tuple[str, ...]:
    """Paths of the libraries of these names that this process has mapped, each once.

    The kernel names the file itself, never a link to it.

    Args:
        names: without `.so` and what follows it: `libcudart`.
        maps: the process's table of mappings.
    """
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    # A library has a line for each of its parts.
    paths = dict.fromkeys(f"/{path}" for line in lines if (path := line.partition("/")[2]))
    return tuple(path for path in paths if library_name(path) in names)


def fingerprint(path: str) -> str:
    """A hash of the size and both ends of a file, which distinguishes builds.

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


def own_version(path: str) -> str | None:
    """Version of a CUDA library by its own function, else by its file name, or None.

    Only calls that need no GPU and start nothing: `cudaRuntimeGetVersion`, `cudnnGetVersion`,
    `cublasGetProperty` and `cublasLtGetProperty`.

    Raises:
        OSError: the library cannot be loaded.
    """
    name = library_name(path) or ""
    if name == "libcudart":
        return _cudart(ctypes.CDLL(path))
    if name == "libcudnn":
        return _cudnn(ctypes.CDLL(path))
    if name in ("libcublas", "libcublasLt"):
        return _cublas(ctypes.CDLL(path), f"{name.removeprefix('lib')}GetProperty")
    return file_version(path)


def file_version(path: str) -> str | None:
    """`580.95.05` of `/any/libcuda.so.580.95.05`, after links; None if the name has no version."""
    found = _FILE.fullmatch(Path(path).resolve().name)
    return found.group(2).lstrip(".") or None if found else None


def _cudart(library: ctypes.CDLL) -> str | None:
    number = ctypes.c_int(0)
    call = getattr(library, "cudaRuntimeGetVersion", None)
    if call is None or call(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _cudnn(library: ctypes.CDLL) -> str | None:
    call = getattr(library, "cudnnGetVersion", None)
    if call is None:
        return None
    call.restype = ctypes.c_size_t
    number = int(call())
    step = 10_000 if number >= 10_000 else 1_000  # 91002 is 9.10.2, 8902 is 8.9.2
    return f"{number // step}.{number % step // 100}.{number % 100}"


def _cublas(library: ctypes.CDLL, name: str) -> str | None:
    call = getattr(library, name, None)
    if call is None:
        return None
    parts = []
    for which in range(3):  # major, minor, patch
        number = ctypes.c_int(0)
        if call(which, ctypes.byref(number)) != 0:
            return None
        parts.append(str(number.value))
    return ".".join(parts)


@dataclass(frozen=True)
class Wheel:
    """An installed distribution, and the real paths of its shared libraries that exist."""

    name: str
    version: str
    libraries: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def wheels(names: re.Pattern[str]) -> list[Wheel]:
    """Installed distributions whose whole name matches, by name.

    If several have the same name, the first on the path counts, as for an import.
    """
    found: dict[str, Wheel] = {}
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"] or "")
        if name not in found and names.fullmatch(name):
            files = (file for file in distribution.files or () if _FILE.fullmatch(file.name))
            paths = (Path(str(distribution.locate_file(file))) for file in files)
            there = tuple(str(path.resolve()) for path in paths if path.exists())
            found[name] = Wheel(name, distribution.version, there)
    return [found[name] for name in sorted(found)]


def shared_files(installed: Iterable[Wheel]) -> list[dict[str, Any]]:
    """Files that several distributions own, one for each set of owners: `{"file", "wheels"}`, the
    latter as `[name, version]`.
    """
    owners: dict[str, list[Wheel]] = {}
    for wheel in installed:
        for path in wheel.libraries:
            owners.setdefault(path, []).append(wheel)
    first: dict[tuple[str, ...], dict[str, Any]] = {}
    for path in sorted(owners):
        names = tuple(wheel.name for wheel in owners[path])
        if len(names) > 1:
            pairs = [[wheel.name, wheel.version] for wheel in owners[path]]
            first.setdefault(names, {"file": path, "wheels": pairs})
    return list(first.values())


def what_loads(name: str) -> Fix:
    """The fix that shows what makes the loader take a library, where no variable does."""
    return Fix(
        look(shell("LD_DEBUG=libs python -c 'import torch' 2>&1 | grep {}", name), "what loads it")
    )


def in_front(env: Mapping[str, str], path: str) -> Iterator[str]:
    """Entries of LD_PRELOAD and LD_LIBRARY_PATH that put a library in front of others, each as
    `VARIABLE=entry`.
    """
    library = Path(path).resolve()
    for entry in re.split(r"[ :]+", env.get("LD_PRELOAD", "")):
        if entry and (Path(entry).resolve() == library or Path(entry).name == library.name):
            yield f"LD_PRELOAD={entry}"
    for entry in re.split(r"[:;]", env.get("LD_LIBRARY_PATH", "")):
        if entry and Path(entry).resolve() == library.parent:
            yield f"LD_LIBRARY_PATH={entry}"


def origin(path: str, installed: Iterable[Wheel], env: Mapping[str, str]) -> tuple[str, str | None]:
    """The origin of a library, and the distribution that holds it, or one of the same name.

    Returns: `wheel`, an entry of `in_front`, `environment` (below sys.prefix) or `system`; then the
    distribution as `name version`, or None. A library of another origin than `wheel`, with a
    distribution, replaces the one that pip installed.
    """
    real, name = str(Path(path).resolve()), library_name(path)
    all_wheels = list(installed)
    owner = next((wheel for wheel in all_wheels if real in wheel.libraries), None)
    if owner is not None:
        return "wheel", str(owner)
    twin = next((w for w in all_wheels if name in map(library_name, w.libraries)), None)
    by = next(in_front(env, path), None)
    inside = Path(sys.prefix).resolve() in Path(real).parents
    if by is None:
        by = "environment" if inside and sys.prefix not in ("/usr", "/") else "system"
    return by, None if twin is None else str(twin)


def library_row(
    path: str,
    version: Callable[[str], str | None],
    installed: Iterable[Wheel],
    env: Mapping[str, str],
) -> list[Any]:
    """One library as a row of `COLUMNS`; None for what is not known."""
    row: list[Any] = [library_name(path), None, path, *origin(path, installed, env), None, None]
    with suppress(OSError):  # replaced while we look, or not ours to read
        row[1] = version(path)
        row[5] = Path(path).stat().st_size
        row[6] = fingerprint(path)
    return row
