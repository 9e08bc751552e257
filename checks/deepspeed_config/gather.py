"""Resources of a host for a configuration that offloads: read only, never built or written."""

from __future__ import annotations

import ast
import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nccl_doctor.system.shortage import privileges, soft_limit

from .offload import nvme_paths, offloads
from .table import Settings

_NOT_TOLD = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""A file system without unnamed files: named files may still work."""
_LIBAIO = ("libaio.so", "libaio.so.1", "libaio.so.1t64")


def gather_deepspeed(
    config: Mapping[str, Any],
    env: Mapping[str, str],
    before: Callable[[str], None],
    root: Path = Path("/"),
) -> dict[str, Any]:
    """Facts of this host: `deepspeed` (version or None), `offload` (None where nothing offloads).

    Args:
        config: of DeepSpeed.
        env: the environment of the job.
        before: called with the name of each step that may hang, before the step.
        root: the folder below which /proc is read.
    """
    settings = Settings(config)
    offload = None
    if offloads(settings):
        offload = _look_at_offload(env, nvme_paths(settings), before, root)
    return {"deepspeed": _version(), "offload": offload}


def _look_at_offload(
    env: Mapping[str, str], paths: Iterable[str], before: Callable[[str], None], root: Path
) -> dict[str, Any]:
    """Look for tools, limits and folders that offloading needs.

    Returns: `ops`: operators of DeepSpeed's installation, name → whether it is already built; None
    where that cannot be read. `ninja`, `compiler`, `libaio` (library and header): whether they are
    there. `locked`: bytes that this process may lock, None if unlimited. `paths`: path → result of
    `_folder`.
    """
    folders = {}
    for path in sorted(set(paths)):
        before(f"looking at {path}")
        folders[path] = _folder(Path(path))
    before("looking for what builds DeepSpeed's operators")
    compiler = env.get("CXX", "c++").split()[:1]
    search = env.get("PATH")
    free = "ipc_lock" in privileges(root)
    return {
        "ops": _built(),
        "ninja": bool(find_spec("ninja") or shutil.which("ninja", path=search)),
        "compiler": bool(compiler and shutil.which(compiler[0], path=search)),
        "libaio": _has_libaio(env),
        "locked": None if free else soft_limit(resource.RLIMIT_MEMLOCK),
        "paths": folders,
    }


def _version() -> str | None:
    """The version from the metadata of the package: nothing is imported."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


def _folder(path: Path) -> dict[str, Any]:
    """Facts about a folder to swap to. `nearest`: the path, or the nearest existing one above it.
    `error`: why nothing can be written there, or empty. `free`: bytes, or None. `direct`: whether
    files can be opened for direct I/O; None where it was not tried.
    """
    nearest = path.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    facts: dict[str, Any] = {"nearest": str(nearest), "error": "", "free": None, "direct": None}
    if not nearest.is_dir():
        return {**facts, "error": f"{nearest} is not a folder"}
    try:
        room = os.statvfs(nearest)
    except OSError as error:
        return {**facts, "error": error.strerror or str(error)}
    facts["free"] = room.f_bavail * room.f_frsize
    if room.f_flag & os.ST_RDONLY:
        return {**facts, "error": f"{nearest} is on a read-only file system"}
    if not os.access(nearest, os.W_OK | os.X_OK):
        return {**facts, "error": f"{nearest} cannot be written to"}
    # An unnamed file, so that nothing is left behind.
    flags = os.O_TMPFILE | os.O_RDWR
    try:
        os.close(os.open(nearest, flags, 0o600))
    except OSError as error:
        if error.errno in _NOT_TOLD:
            return facts
        return {**facts, "error": f"{nearest} cannot be written to: {error.strerror}"}
    facts["direct"] = True
    try:
        os.close(os.open(nearest, flags | os.O_DIRECT, 0o600))
    except OSError:
        facts["direct"] = False
    return facts


def _built() -> dict[str, bool] | None:
    """Operator → whether it is built, from DeepSpeed's own record of its build."""
    spec = None
    with suppress(ImportError, ValueError):
        spec = find_spec("deepspeed")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        record = Path(folder) / "git_version_info_installed.py"
        with suppress(OSError, ValueError, SyntaxError):
            for line in record.read_text(encoding="utf-8").splitlines():
                name, _, value = line.partition("=")
                if name.strip() == "installed_ops":
                    return {str(op): bool(there) for op, there in ast.literal_eval(value).items()}
    return None


def _has_libaio(env: Mapping[str, str]) -> bool:
    folders = [Path(each) for each in env.get("LD_LIBRARY_PATH", "").split(":") if each]
    roots = [Path(root) for root in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")]
    folders += [*roots, *(each for root in roots for each in root.glob("*-linux-gnu*"))]
    # Flags of the user may name any folder.
    if "aio" in env.get("LDFLAGS", "") + env.get("CFLAGS", "") or "CONDA_PREFIX" in env:
        return True
    header = any(Path(root, "libaio.h").exists() for root in ("/usr/include", "/usr/local/include"))
    return header and any((folder / name).exists() for folder in folders for name in _LIBAIO)
