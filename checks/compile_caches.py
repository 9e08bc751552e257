"""Do several hosts compile into one folder of a network file system?

What it checks
--------------
The folders in which compilers of kernels keep what they have built, as each library finds its own:
Triton (TRITON_CACHE_DIR, TRITON_HOME, ~/.triton/cache), torch.compile (TORCHINDUCTOR_CACHE_DIR, or
in the folder for temporary files), torch's C++ extensions (TORCH_EXTENSIONS_DIR), tvm-ffi
(TVM_FFI_CACHE_DIR), vLLM (VLLM_CACHE_ROOT), FlashInfer (FLASHINFER_WORKSPACE_BASE); those of a
library that is installed, or whose folder is there. For one on a network file system: which, and
whether locks work there, by the options of the mount and by a shared lock on a file that is there.
Nothing is written.

Why it matters
--------------
Ranks of all hosts compile at the same moment, after a change or at the first run. One host replaces
a file that another has open (`Stale file handle`, `file too short`), or the lock of a rank that was
killed stays: one rank dies or waits, and all others hang in their next collective. A file server
also makes the start of a large job slow.

How to fix
----------
Type what the finding says: a folder on a disk of each host. Or build once, before the job.

When it is wrong
----------------
A folder that was filled before the job, or that only one host writes to, does no harm: hence it is
information, and a warning only where locks do not work. A file system that hosts share otherwise
than by its type (9p, virtiofs) is not seen. Caches that a program sets itself are not seen.

References
----------
torch/_inductor/runtime/cache_dir_utils.py and torch/utils/cpp_extension.py (2.13); triton/knobs.py;
pytorch/pytorch issue 173679; opendatahub-io/distributed-workloads pull request 844; nfs(5)
(local_lock, nolock); mount.lustre(8) (flock, localflock).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Severity,
    Skip,
    Step,
    Untested,
    Where,
    shell,
)
from nccl_doctor.system.shortage import shortage_of
from nccl_doctor.toolkit.host import Mount, mounts
from nccl_doctor.toolkit.storage.file_systems import is_network, mount_of
from nccl_doctor.toolkit.storage.worker import Desk, StorageWorker, ask, close_all

SHARED = Kind(
    "compile-cache-shared",
    Layer.HOST,
    "Hosts compile kernels into one folder of a network file system",
    "One host replaces files that another has open: a rank dies with `Stale file handle`, or waits "
    "for a lock, and the others hang.",
    "Take a folder on a disk of each host.",
    Severity.INFO,
    effects=(Effect.JOB_ONLY,),
)
NO_LOCKS = SHARED.variant(
    title="Hosts compile kernels into one folder in which locks do not work",
    why="Several hosts build and replace the same files at the same time, as none feels the locks "
    "of the others: a rank loads half a file, or dies with `Stale file handle`.",
)


class Cache(NamedTuple):
    """Folder in which a library keeps what it has compiled.

    `home`: a variable for the folder of `default`, in which ~ is HOME, TMP the folder for temporary
    files, and CACHE the user's caches. `empty`: whether an empty value counts as set.
    """

    name: str
    module: str
    variable: str
    default: str
    home: str = ""
    empty: bool = False


CACHES = (
    Cache("Triton", "triton", "TRITON_CACHE_DIR", "~/.triton/cache", "TRITON_HOME"),
    Cache("torch.compile", "torch", "TORCHINDUCTOR_CACHE_DIR", "TMP/torchinductor_USER", "", True),
    Cache("torch extensions", "torch", "TORCH_EXTENSIONS_DIR", "CACHE/torch_extensions", "", True),
    Cache("tvm-ffi", "tvm_ffi", "TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi"),
    Cache("vLLM", "vllm", "VLLM_CACHE_ROOT", "CACHE/vllm"),
    Cache("FlashInfer", "flashinfer", "FLASHINFER_WORKSPACE_BASE", "~/.cache/flashinfer"),
)
_STEP_S = 4.0
_MOST_ENTRIES = 200
_WITHOUT = re.compile(r"(?:nolock|local_lock=(?:all|flock)|localflock|noflock)")
"""Options of NFS and Lustre with which a lock is felt on its own host only."""
_NONE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class _CacheDesk(Desk):
    """Steps on one folder."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.steps = {"look": self._look, "lock": self._lock}

    def _look(self) -> Mapping[str, Any]:
        return {"real": os.path.realpath(self._path), "there": os.path.isdir(self._path)}

    def _lock(self) -> Mapping[str, Any]:
        """`lock`: the error of a shared lock on a file that is there, empty if it was got or is
        held by another, None where there is no file.
        """
        for path in self._files():
            try:
                handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return {"lock": (error.strerror or "") if error.errno in _NONE else ""}
            finally:
                os.close(handle)
            return {"lock": ""}
        return {"lock": None}

    def _files(self) -> Iterator[str]:
        """Files in the folder and in the first ones within it."""
        folders, seen = [self._path], 0
        while folders and seen < _MOST_ENTRIES:
            with contextlib.suppress(OSError), os.scandir(folders.pop(0)) as entries:
                for entry in entries:
                    seen += 1
                    if seen > _MOST_ENTRIES:
                        break
                    if entry.is_file(follow_symlinks=False):
                        yield entry.path
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)


class CompileCaches(Check):
    """Looks where compilers of kernels keep their files, on each host."""

    name = "compile_caches"
    layer = Layer.HOST
    kinds = (SHARED,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`caches` on network file systems: `name`, `variable`, `path`, `type`, `source` and
        `options` of the file system, `real` (the path without links), `lock` (see the desk).

        Raises:
            Skip: nothing on this host compiles, or all folders are on disks of its own.
            Untested: the mounts cannot be read, or no process could be started.
        """
        used = [(cache, path_of(cache, ctx.env)) for cache in CACHES]
        workers: dict[int, StorageWorker] = {}
        on: dict[int, Mount] = {}
        try:
            for number, (_, path) in enumerate(used):
                workers[number] = StorageWorker("caches", _CacheDesk(path), 3 * _STEP_S)
            ctx.breadcrumb("looking at folders of compilers")
            looked = ask(workers, "look", {number: {} for number in workers}, _STEP_S)
            known = mounts(ctx.root)
            for number, (cache, path) in enumerate(used):
                said = looked[number]
                mount = mount_of(said.get("real", path), known)
                needed = said.get("there") or cache.variable in ctx.env or find_spec(cache.module)
                if needed and mount is not None and is_network(mount.kind):
                    on[number] = mount
            asked: dict[int, dict[str, Any]] = {n: {} for n in on if looked[n].get("there")}
            locks = ask(workers, "lock", asked, _STEP_S)
        except OSError as error:
            scarce = shortage_of(error)
            raise Untested(scarce.words if scarce else str(error)) from error
        finally:
            close_all(list(workers.values()))
        found = []
        for number, mount in on.items():
            cache, path = used[number]
            found.append({
                "name": cache.name, "variable": cache.variable, "path": path, "type": mount.kind,
                "source": mount.source, "options": mount.options,
                "real": looked[number].get("real", path),
                "lock": locks.get(number, {}).get("lock"),
            })  # fmt: skip
        if not found:
            raise Skip("no compiler on this host keeps files on a network file system")
        return {"caches": found}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each file system that caches of several hosts are on."""
        places: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
        for rank, facts in cluster.facts(self.name):
            for cache in facts["caches"]:
                key = (cache["name"], f"{cache['type']} {cache['source']}".strip(), cache["real"])
                places[key][rank.host.label] = cache
        alike: dict[tuple[str, tuple[str, ...], str], list[dict[str, Any]]] = defaultdict(list)
        for (_, source, _), hosts in places.items():
            if len(hosts) > 1:
                trouble = next(filter(None, map(_trouble, hosts.values())), "")
                alike[source, tuple(sorted(hosts)), trouble].append(next(iter(hosts.values())))
        for (source, labels, trouble), caches in alike.items():
            folders = ", ".join(f"{each['name']} in {each['path']}" for each in caches)
            locks = f"; locks are not felt by other hosts: {trouble}" if trouble else ""
            yield Finding(
                NO_LOCKS if trouble else SHARED,
                f"{folders}: on {source}{locks}",
                Where(hosts=labels),
                {"caches": caches},
                fix=Fix(*map(_elsewhere, caches)),
                severity=Severity.WARN if trouble else None,
            )


def path_of(cache: Cache, env: Mapping[str, str]) -> str:
    """The folder of a cache in this environment."""
    named = env.get(cache.variable)
    if named or (named is not None and cache.empty):
        path = named
        if cache.name == "FlashInfer":
            path = os.path.join(named, ".cache/flashinfer")
        return os.path.abspath(path)
    home = env.get("HOME") or os.path.expanduser("~")
    user = env.get("LOGNAME") or env.get("USER") or ""
    base, _, rest = cache.default.partition("/")
    folder = {
        "~": env.get(cache.home) or home,
        "TMP": env.get("TMPDIR") or "/tmp",
        "CACHE": env.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"),
    }[base]
    return os.path.join(folder, rest.replace("USER", user))


def _trouble(cache: Mapping[str, Any]) -> str:
    """The reason why locks do not work between hosts, or empty."""
    options = [each for each in cache["options"].split(",") if _WITHOUT.fullmatch(each)]
    return cache["lock"] or ", ".join(options)


def _elsewhere(cache: Mapping[str, Any]) -> Step:
    """The step that takes a folder on the host itself."""
    name = cache["variable"]
    line = shell('export {:variable}="/tmp/{:name}-$(id -u)"', name, name.lower())
    return Step(line, On.EVERY, undo=shell("unset {:variable}", name), note="a disk of the host")
