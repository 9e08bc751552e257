"""Is there room in /dev/shm for the files of NCCL and DataLoader workers?

What it checks
--------------
That /dev/shm exists, is writable, and has room: the minimum that the ranks of this host need, with
the current settings of NCCL's buffer sizes and number of channels, is really allocated, in a file
without a name that is freed at once. It is not allocated if the control group has no memory for it,
as the kernel would kill a process. And whether files of dead processes fill it: those that no
process has open or mapped, with a name of NCCL, torch, SGLang (`sgl_shm_mm_*`) or Python's
multiprocessing (`psm_*`, vLLM); where there is little room, whatever their name.

Why it matters
--------------
If GPUs cannot access each other directly, NCCL passes data between the ranks of a host through
files of 9.6 MB in /dev/shm, one per rank and channel. For the network it keeps 33 MB there for each
rank and communicator: for the default group, and for each dimension of the mesh that joins hosts.
If one does not fit, the job ends with `failed to extend /dev/shm/nccl-…`. DataLoader workers
pass batches through it, and die with a bus error when it is full. Docker and Kubernetes give 64 MB.

How to fix
----------
docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory, mounted on
/dev/shm; on the host itself: mount -o remount,size=50% /dev/shm. Full of files of dead processes:
remove these; a larger /dev/shm fills up as well, as a program that crashes at each start leaves
more each time.

When it is wrong
----------------
How much NCCL needs depends on the GPUs: if NVLink connects all GPUs of a host, as NVSwitches and
check `gpu_state` show, ranks access each other directly and need less. Of the ranks of a host, at
least two use the network, and usually as many as there are network cards. Since 2.24 NCCL allocates
host memory through CUDA instead, if that works (check `numa_calls`). If collectives worked with too
little room, it is only a warning. gloo needs nothing there, nor does a DataLoader without workers.
In a container that shares /dev/shm with others, files of their live processes look stale: then the
finding is reported as possible; so it is where files have another name, in which somebody may keep
data.

References
----------
NCCL user guide, troubleshooting (shared memory); NVIDIA/nccl issues 290, 525 and 1518;
sgl-project/sglang issue 40723; PyTorch README (Docker image, --shm-size).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Figure,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Severity,
    Step,
    Where,
    look,
    shell,
)
from nccl_doctor.system.limits import MORE_MEMORY
from nccl_doctor.system.shortage import SYS_ADMIN, has_capability
from nccl_doctor.toolkit.cgroup import cgroup_limits
from nccl_doctor.toolkit.containers import container_of
from nccl_doctor.toolkit.hosts import collectives_worked
from nccl_doctor.toolkit.nccl.conf import nccl_settings

from .left import File, Group, files_left, grouped, in_words
from .to_type import MORE_ROOM, MOUNT, more_room, without

SHM_TOO_SMALL = Kind(
    code="shm-too-small",
    layer=Layer.HOST,
    title="There is too little room in /dev/shm",
    why="NCCL passes data between the ranks of a host through it, and DataLoader workers pass "
    "batches: the first file that does not fit ends the job.",
    fix=MORE_ROOM,
)
NO_SHM = SHM_TOO_SMALL.variant(
    title="There is no /dev/shm",
    fix=MOUNT,
)
NOT_WRITABLE = SHM_TOO_SMALL.variant(
    title="This process cannot write to /dev/shm",
    why="NCCL passes data between the ranks of a host through files there, and DataLoader workers "
    "pass batches: the first one that cannot be made ends the job.",
)
NO_MEMORY_LEFT = SHM_TOO_SMALL.variant(
    title="The memory limit leaves too little for files in /dev/shm",
    why="What is in /dev/shm counts as memory of the container or job: the kernel kills a process "
    "that goes over the limit.",
    fix=MORE_MEMORY,
)
SHM_STALE = Kind(
    code="shm-stale",
    layer=Layer.HOST,
    title="Files of dead processes are left in /dev/shm",
    why="A process that was killed leaves its files there; they take memory until the next boot.",
    fix=Fix(
        look(
            shell("fuser -v /dev/shm/*"),
            "remove the files that are not listed: no process has them open",
        )
    ),
    severity=Severity.INFO,
)
SHM_FILLED = Kind(
    code="shm-filled",
    layer=Layer.HOST,
    title="Files that no process has open fill /dev/shm",
    why="Somebody keeps data there, or a program that is gone left them: they take the room that "
    "the job needs, and a larger /dev/shm may fill up as well.",
    fix=Fix(
        look(shell("ls -l /dev/shm"), "move what somebody needs to a disk, and remove the rest")
    ),
    severity=Severity.WARN,
)

_MIB = 1 << 20
_BUFFERS = {
    "NCCL_BUFFSIZE": 4 * _MIB,
    "NCCL_LL128_BUFFSIZE": 4_915_200,
    "NCCL_LL_BUFFSIZE": 524_288,
}
"""Bytes that one channel between two ranks holds for each protocol: NCCL's defaults."""
_AROUND = 4100
"""Bytes in addition to them: NCCL's messages show 9637892."""
_CHANNELS = 2
"""The fewest that NCCL uses between the GPUs of a host by itself."""
_MARGIN = 64 * _MIB
"""Memory that the control group must have left, so that the kernel kills no rank of this run."""
_SMALLEST = 4_194_660
"""Bytes of the file that NCCL's user guide shows: its size if GPUs are connected directly."""
_POOL = 33_030_144
"""Bytes of the file that the proxy of a rank makes for each communicator that joins hosts, whatever
NCCL_SHM_DISABLE and NCCL_CUMEM_ENABLE are: 65,536 operations (ncclProxyOpsPool in
src/include/proxy.h and proxyProgressInit in src/proxy.cc of NCCL 2.22). Newer ones need more."""
_FEWEST_ON_NETWORK = 2
"""Ranks of a host that reach other hosts over one network card: at both ends of its ring."""
_LINKS_OF_V100 = 6
_GIB = 1 << 30
_COMFORT = _GIB
"""Below it, more channels, groups or DataLoader workers are likely to find no room."""
_WORKERS = 16 * _MIB
"""A few batches of DataLoader workers."""
_NO_GROUP_MEMORY = "the control group has"
_LISTED = 20
"""Files, and groups of them, that are listed."""
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the first PID namespace on every machine (PROC_PID_INIT_INO in the kernel's
include/linux/proc_ns.h)."""


class SharedMemory(Check):
    """Reads the size of /dev/shm, and tries a real allocation."""

    name = "shared_memory"
    layer = Layer.HOST
    kinds = (SHM_TOO_SMALL, SHM_STALE, SHM_FILLED)
    reads = ("collectives", "gpu_state")

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Sizes in bytes: `size` and `free` of the file system, `needed`: the minimum for the
        backend; `container`: its runtime, if this is one; `may_mount`: whether
        this process may mount; `error`: of an allocation of that size,
        or empty. `least` and `least_error`: the
        same if NVLink connects the GPUs. `stale`: names and bytes of files that no visible process
        has open, the largest; `left`: all of them, from `grouped`; `sees_all`: whether all
        processes of the machine are visible.
        """
        ranks = ctx.launch.local_world_size or 1
        inside, pools = _needed(ctx, ctx.root / "dev"), _pools(ctx)
        needed = inside + ranks * pools * _POOL
        least = min(inside, ranks * _SMALLEST) + min(ranks, _FEWEST_ON_NETWORK) * pools * _POOL
        facts: dict[str, Any] = {"size": None, "free": None, "needed": needed, "least": least}
        facts["container"] = container_of(ctx.root, ctx.env)
        facts["may_mount"] = has_capability(SYS_ADMIN, ctx.root)
        try:
            room = os.statvfs(ctx.root / "dev/shm")
        except OSError as error:
            went_wrong = _words(error)
            facts |= {"error": went_wrong, "least_error": went_wrong}
            return {**facts, "stale": [], "sees_all": True}
        facts |= {"size": room.f_blocks * room.f_frsize, "free": room.f_bavail * room.f_frsize}
        facts["error"] = facts["least_error"] = self._try(ctx, needed)
        if facts["error"] and least < needed:
            facts["least_error"] = self._try(ctx, least)
        little = facts["free"] < max(needed, _COMFORT)
        sees_all = _sees_all(ctx.root / "proc")
        left = files_left(
            ctx.root / "dev/shm", ctx.root / "proc", whatever=little, sees_all=sees_all
        )
        largest = sorted(sorted(left, key=lambda file: -file.bytes)[:_LISTED])
        return {
            **facts,
            "stale": [(file.name, file.bytes) for file in largest],
            "left": grouped(left),
            "sees_all": sees_all,
        }

    def _try(self, ctx: Context, size: int) -> str:
        """The error of an allocation, or empty."""
        went_wrong = _no_memory(cgroup_limits(ctx.root)["memory"], size)
        if not went_wrong:
            ctx.breadcrumb("allocating shared memory", bytes=max(size, 1))
            went_wrong = _allocate(ctx.root / "dev/shm", max(size, 1))
        return went_wrong

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """The size of the file system."""
        for rank, facts in cluster.facts(self.name):
            size = facts["size"]
            # Two digits: half of the memory, the default size, differs a little after each boot.
            if size is not None:
                said = f"{float(f'{size / _GIB:.2g}'):g} GiB" if size >= _GIB else _mib(size)
                yield Figure("size of /dev/shm", said, Where(hosts=(rank.host.label,)))

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on too little room for the backend, or little reserve; and on stale files."""
        joined = _joined(cluster)
        for rank, facts in cluster.facts(self.name):
            where = Where(hosts=(rank.host.label,))
            if rank.host.id in joined:
                least = facts.get("least", facts["needed"])
                error = facts.get("least_error", facts["error"])
                facts = {**facts, "needed": least, "error": error}
            size, free = facts["size"], facts["free"]
            seen = "no /dev/shm" if size is None else f"{_mib(free)} free of {_mib(size)}"
            severity = _severity(cluster, rank, facts)
            left, fill = _left(facts, cluster.backend)
            named = all(group["named"] for group in left)
            owned = SHM_STALE if named else SHM_FILLED
            if severity is not None:
                need = f", {_mib(facts['needed'])} needed" if facts["needed"] else ""
                said = f" ({facts['error']})" if facts["error"] else ""
                kind, fix = _told(facts)
                yield Finding(
                    kind,
                    seen + need + said,
                    where,
                    {"size": size, "free": free, "needed": facts["needed"]},
                    fix,
                    severity,
                    explained_by=owned.code if fill else None,
                    # How much is needed depends on GPUs that are not examined yet.
                    confidence=Confidence.CERTAIN if size is None else Confidence.LIKELY,
                )
            if left:
                blind = "" if facts.get("sees_all", True) else ", unless other containers use them"
                count = sum(group["files"] for group in left)
                yield Finding(
                    owned,
                    f"{_mib(sum(group['bytes'] for group in left))} in {count} "
                    f"file{'s' if count > 1 else ''} that no process has open: "
                    f"{in_words(left)}{blind}",
                    where,
                    {"files": facts["stale"][:_LISTED], "groups": left[:_LISTED]},
                    fix=without(left) if named else "",
                    # They are the cause where there would be room without them.
                    severity=severity if fill else None,
                    confidence=Confidence.LIKELY if named and not blind else Confidence.POSSIBLE,
                )


def _told(facts: Mapping[str, Any]) -> tuple[Kind, str]:
    """The kind in the words that fit, and a fix if the kind's own does not fit."""
    error = facts["error"]
    if facts["size"] is None:
        return NO_SHM, ""
    if error.startswith(_NO_GROUP_MEMORY):
        return NO_MEMORY_LEFT, ""
    if os.strerror(errno.EROFS) in error:
        other = "in a container: take the read-only mount of /dev/shm out of its settings"
        step = Step(
            shell("mount -o remount,rw /dev/shm"), undo=shell("mount -o remount,ro /dev/shm")
        )
        return NOT_WRITABLE, Fix(step, alternatives=[Fix(text=other)])
    if os.strerror(errno.EACCES) in error or os.strerror(errno.EPERM) in error:
        other = Fix(text="if it has those rights: look at SELinux or AppArmor")
        return NOT_WRITABLE, Fix(Step(shell("chmod 1777 /dev/shm")), alternatives=[other])
    return SHM_TOO_SMALL, more_room(facts)


def _needed(ctx: Context, dev: Path) -> int:
    """The minimum of bytes that the ranks of this host need to reach each other."""
    ranks = ctx.launch.local_world_size or 1
    settings = nccl_settings(ctx.env, root=ctx.root)
    disabled = "NCCL_SHM_DISABLE" in settings and settings["NCCL_SHM_DISABLE"].value == "1"
    if ctx.backend != "nccl" or disabled:
        return 0
    if ranks == 1 or any(dev.glob("nvidia-nvswitch*")):
        return ranks * _SMALLEST

    def number(name: str, default: int) -> int:
        text = settings[name].value if name in settings else ""
        return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else default

    most = min(number("NCCL_MAX_NCHANNELS", _CHANNELS), number("NCCL_MAX_CTAS", _CHANNELS))
    fewest = max(number("NCCL_MIN_NCHANNELS", 1), number("NCCL_MIN_CTAS", 1))
    segment = _AROUND + sum(number(name, size) for name, size in _BUFFERS.items())
    return ranks * max(fewest, min(_CHANNELS, most)) * segment


def _pools(ctx: Context) -> int:
    """Number of communicators of each rank that join hosts, of those that are known.

    The default group, and those of the mesh that the user describes. The groups of a dimension join
    hosts if ranks on more than one host are in them: ranks are in row-major order.
    """
    world, local = ctx.launch.world_size or 1, ctx.launch.local_world_size or 1
    if ctx.backend != "nccl" or world <= local:
        return 0
    reach, joining = 1, 0
    for _, size in reversed(ctx.job.mesh):
        reach *= size
        joining += size > 1 and reach > local
    # A mesh of one dimension is the default group.
    return 1 + (joining if len(ctx.job.mesh) > 1 else 0)


def _joined(cluster: Cluster) -> set[int]:
    """Ids of hosts on which NVLink connects every GPU to every other, by check gpu_state.

    Switches of HGX B200 have no device files, and a container seldom has those of others.
    """
    return {
        rank.host.id
        for rank, facts in cluster.facts("gpu_state")
        if facts.get("gpus") and all(_is_joined(gpu) for gpu in facts["gpus"])
    }


def _is_joined(gpu: Mapping[str, Any]) -> bool:
    """True if NVLink connects a GPU to all others: by a fabric, or on an SXM board since A100."""
    if (gpu.get("fabric") or {}).get("state") == "COMPLETED":
        return True
    return "SXM" in (gpu.get("name") or "") and sum(gpu.get("nvlinks") or ()) > _LINKS_OF_V100


def _no_memory(group: Mapping[str, int] | None, needed: int) -> str:
    """Reason not to try an allocation, or empty: /dev/shm counts as memory of the group."""
    left = None if group is None else max(0, group["limit"] - group["used"])
    if left is None or left >= needed + _MARGIN or not needed:
        return ""
    return f"{_NO_GROUP_MEMORY} {_mib(left)} of memory left"


def _allocate(folder: Path, size: int) -> str:
    """Allocate and free; the error text, or empty.

    The file never has a name, so that nothing is left however this process ends.
    """
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):  # an old kernel, or an odd file system
            return ""
        return _words(error)
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        return _words(error)
    finally:
        os.close(handle)
    return ""


def _sees_all(proc: Path) -> bool:
    """True if this is the first PID namespace of the machine, which holds all processes."""
    try:
        return os.stat(proc / "self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _severity(cluster: Cluster, rank: Rank, facts: Mapping[str, Any]) -> Severity | None:
    if facts["needed"] and facts["error"]:
        return Severity.WARN if collectives_worked(cluster, rank.host) else Severity.FAIL
    low = facts["error"] or facts["free"] is None or facts["free"] < _floor(cluster.backend)
    return Severity.WARN if low else None


def _floor(backend: str) -> int:
    """Bytes below which there is little room."""
    return _COMFORT if backend == "nccl" else _WORKERS


def _left(facts: Mapping[str, Any], backend: str) -> tuple[list[Group], bool]:
    """Groups of files without a process, and whether there would be room without them.

    Files whose name tells nothing count only where the others do not explain what is missing.
    """
    told = facts.get("left")  # earlier versions gave names and sizes alone
    groups = grouped(File(*each) for each in facts["stale"]) if told is None else told
    named = [group for group in groups if group["named"]]
    needed = facts["needed"] if facts["needed"] and facts["error"] else _floor(backend)
    free = facts["free"]
    if free is not None and free < needed:
        for some in (named, groups):
            if free + sum(group["bytes"] for group in some) >= needed:
                return some, True
    return named, False


def _mib(size: int) -> str:
    return f"{size / _MIB:.0f} MiB" if size >= 10 * _MIB else f"{size / _MIB:.1f} MiB"


def _words(error: OSError) -> str:
    return error.strerror or str(error)
