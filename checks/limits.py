"""Can the processes of this host open, lock and start as much as the job needs?

What it checks
--------------
The limits that the launcher gave to this process: open files (RLIMIT_NOFILE) compared with the
world size, locked memory (RLIMIT_MEMLOCK) if there is an RDMA device that NCCL will use, processes
and threads (RLIMIT_NPROC, and pids.max of the control group) compared with what is already running,
the address space (RLIMIT_AS) with NCCL, or where torch does not fit into it, and before NCCL 2.28
the stack (RLIMIT_STACK), which is also the size for new threads. A capability lifts a limit only
where the kernel accepts it: not within a user namespace (rootless Podman and Docker, enroot), where
root is an ordinary user of the host.

Why it matters
--------------
gloo opens a socket to every other rank, and so does the store of rank 0: beyond the limit the job
ends with `Too many open files`. NCCL raises its own limit only in the process that runs the
bootstrap root. RDMA locks every buffer: with a small limit `ibv_create_cq` or `ibv_reg_mr` fails
with `Cannot allocate memory`. A thread that cannot be started ends the process with EAGAIN. CUDA
reserves addresses for all memory of the host and its GPUs: under a limit it fails with `out of
memory` although both are empty. Below 1 GiB threads cannot be
started, or not even torch be loaded: `failed to map
segment from shared object`. With an unlimited stack, the C library gives new threads 2 MiB in
place of the usual 8: NCCL's search of the topology may overflow it, and the rank dies of SIGSEGV.
This was seen from 44 GPUs in one NVLink domain (GB200 NVL72) on. NCCL 2.28 makes its stacks larger.

How to fix
----------
ulimit -n 65536, ulimit -l unlimited, ulimit -u unlimited, ulimit -v unlimited, ulimit -s 8192
before the launch; in Docker --ulimit nofile=65536 --ulimit memlock=-1 --pids-limit=-1; in a systemd
unit LimitNOFILE=, LimitMEMLOCK=, TasksMax=, LimitSTACK=8M; for logins /etc/security/limits.conf.
Slurm passes on the limits of the daemon or of the shell (PropagateResourceLimits). Locked memory:
in a container, root with the capability IPC_LOCK has no limit; another user (runAsUser) loses the
capability, and has the limit of containerd.service or docker.service. A container without root gets
no more than its user has on the host: raise it there, and log in again.

When it is wrong
----------------
A program that raises its own soft limit, up to the hard limit, gets a warning all the same. Limits
in containers other than this program's are not seen. How many threads a job starts depends on the
job. A stack of 2 MiB is enough for NCCL on hosts of eight GPUs: there it is only information.
Not validated on hardware: the limit on addresses, and that on the stack.

References
----------
NCCL user guide, troubleshooting (system limits); getrlimit(2); cgroups(7); user_namespaces(7);
Linux, drivers/infiniband/core/umem.c and kernel/fork.c (`capable`); NVIDIA/nccl issues 380, 550,
1191 and 2186 (stack); `setCpuStackSize` in src/init.cc of NCCL 2.28.3; pthread_create(3).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Figure,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Severity,
    Step,
    Untested,
    Where,
    master_host,
    shell,
)
from nccl_doctor.system.limits import (
    LOCK_MORE,
    LOCK_MORE_ROOTLESS,
    MORE_ADDRESSES,
    MORE_PROCESSES,
    MORE_PROCESSES_OR_TASKS,
    MORE_TASKS,
    lock_more_in_container,
    more_files,
)
from nccl_doctor.system.shortage import in_user_namespace, is_of_memory, privileges
from nccl_doctor.toolkit.cgroup import cgroup_limits
from nccl_doctor.toolkit.containers import container_of
from nccl_doctor.toolkit.fabric.ports import rdma_ports
from nccl_doctor.toolkit.fabric.road import admitted, choose_road
from nccl_doctor.toolkit.host import user_tasks
from nccl_doctor.toolkit.nccl.conf import nccl_settings
from nccl_doctor.toolkit.versions import release

OPEN_FILES = Kind(
    code="open-files-limit-low",
    layer=Layer.HOST,
    title="The limit on open files is too low for this many ranks",
    why="Every rank that connects takes one open file: beyond the limit, `Too many open files`.",
    fix=more_files(65536),
    severity=Severity.WARN,
)
MEMLOCK = Kind(
    code="memlock-limit-low",
    layer=Layer.HOST,
    title="The limit on locked memory is too low for RDMA",
    why="RDMA locks its buffers in memory: `ibv_reg_mr` or `ibv_create_cq` fails with `Cannot "
    "allocate memory`.",
    fix=LOCK_MORE,
    severity=Severity.WARN,
)
PROCESSES = Kind(
    code="process-limit-low",
    layer=Layer.HOST,
    title="The limit on processes and threads is too low",
    why="A thread or a DataLoader worker that cannot be started ends its rank with `Resource "
    "temporarily unavailable`.",
    fix=MORE_PROCESSES_OR_TASKS,
    severity=Severity.WARN,
)
ADDRESSES = Kind(
    code="address-space-limit-low",
    layer=Layer.HOST,
    title="The limit on the address space is too low",
    why="Libraries are mapped as a whole, and CUDA reserves addresses for all memory of the host "
    "and its GPUs: they fail with `out of memory` although there is enough.",
    fix=MORE_ADDRESSES,
    severity=Severity.WARN,
)

STACK = Kind(
    code="stack-limit-unsafe",
    layer=Layer.HOST,
    title="New threads have a smaller stack than NCCL may need",
    why="The search of the topology may overflow the stack of its thread: the rank dies of SIGSEGV "
    "when a communicator is made. NCCL 2.28 and newer make their stacks large enough.",
    fix=Fix(
        Step(
            shell("ulimit -s 8192"),
            note="before the launch; unlimited makes the stacks of threads smaller: 2 MiB",
        ),
        alternatives=["install NCCL 2.28.3 or newer"],
    ),
    severity=Severity.INFO,
    effects=(Effect.JOB_ONLY,),
)

_FILES_OF_A_RANK = 8
"""Files that a gloo rank has open besides its sockets to the others: measured with torch 2.13 (7
and the listener)."""
_FILES_OF_THE_STORE = 9
"""More files of the rank that serves the store, besides one for each rank: measured with torch 2.13
as the smallest limit under which 2, 4 and 8 ranks of gloo form a group."""
_FILES_OF_A_JOB = 256
"""Data files, logs, DataLoader workers (some 4 each), CUDA devices."""
_NPROC = "RLIMIT_NPROC"
_MIB = 1 << 20
_LOCKED_FAIL = 64 * _MIB
"""Less than NCCL's buffers for a few peers need (4 MiB for each channel): 64 KiB and 8 MiB are the
usual defaults of the kernel."""
_LOCKED_WARN = 1024 * _MIB
_THREADS_LEAST = 8
"""Per rank: measured 4 with gloo; NCCL adds 4 or more per communicator."""
_THREADS = {"gloo": 32, "nccl": 256}
"""Per rank: CUDA, NCCL and autograd threads, one per core for CPU work, DataLoader workers."""
_ADDRESSES = 1 << 40
"""A higher limit may be enough for the GPUs and memory of a host; batch systems set far less."""
_ADDRESSES_OF_TORCH = 1 << 30
"""Measured with torch 2.13 for CPUs, and two of them: under 800 MB gloo can start no thread, under
600 MB torch cannot be imported."""
_STACK = 8 * _MIB
"""The default of Linux, which is enough (SAFE_STACK_SIZE in NCCL's src/os/linux.cc)."""
_OWN_STACKS = (2, 28)
"""First release of NCCL that sets the size itself."""
_LARGE_DOMAINS = ("GB200", "GB300")
"""GPUs of which one NVLink domain joins those of many hosts."""


class LimitsFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    files: int | None
    files_hard: int | None
    locked: int | None
    rdma: list[str]
    processes: int | None
    tasks: int | None
    pids: Any
    addresses: int | None
    stack: int | None
    user_namespace: bool
    container: str
    root: bool
    local_ranks: int


class Limits(Check):
    """Compares the limits of this process with the size of the job."""

    name = "limits"
    layer = Layer.HOST
    kinds = (OPEN_FILES, MEMLOCK, PROCESSES, ADDRESSES, STACK)
    reads = ("gpu_state", "nccl_library", "torch_import")
    unaided = True

    def observe(self, ctx: Context) -> LimitsFacts:
        """Soft (and hard) limits, None for unlimited. `rdma`: devices that NCCL would use, EFA too.
        `tasks`: number of this user's tasks, None if they do not count. `pids`: of the control
        group. `addresses`, `stack`: bytes. `user_namespace`: whether this process is in a user
        namespace other than the first, where capabilities lift no limit. `container`: from
        `container_of`; `root`: whether this process is root there.
        """
        soft, hard = _limit(resource.RLIMIT_NOFILE)
        capable = privileges(ctx.root)
        processes = _limit(resource.RLIMIT_NPROC)[0]
        # The kernel does not count processes of root or of users with these capabilities.
        counts = processes is not None and not capable & {"root", "sys_admin", "sys_resource"}
        return {
            "files": soft,
            "files_hard": hard,
            "locked": None if "ipc_lock" in capable else _limit(resource.RLIMIT_MEMLOCK)[0],
            "rdma": _rdma(ctx),
            "processes": processes,
            "tasks": (user_tasks(ctx.root) or None) if counts else None,
            "pids": cgroup_limits(ctx.root)["pids"],
            "addresses": _limit(resource.RLIMIT_AS)[0],
            "stack": _limit(resource.RLIMIT_STACK)[0],
            "user_namespace": in_user_namespace(ctx.root),
            "container": container_of(ctx.root, ctx.env),
            "root": os.geteuid() == 0,
            "local_ranks": ctx.launch.local_world_size or 1,
        }

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """The limits themselves."""
        for rank, facts in cluster.facts(self.name):
            where = Where(hosts=(rank.host.label,))
            for name, limit, unit in (
                ("limit of open files", facts["files"], 1),
                ("limit of locked memory, MiB", facts["locked"], _MIB),
                ("limit of processes", facts["processes"], 1),
            ):
                said = "unlimited" if limit is None else f"{limit / unit:.16g}"
                yield Figure(name, said, where)

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings for each host; the store needs more files on rank 0's host."""
        master = master_host(cluster)
        for rank, facts in cluster.facts(self.name):
            serves = master is not None and rank.host.id == master.id
            yield from _open_files(cluster, rank, facts, serves=serves)
            yield from _locked(rank, facts)
            yield from _processes(cluster, rank, facts)
            yield from _addresses(cluster, rank, facts.get("addresses"))
            yield from _stack(cluster, rank, facts.get("stack", _STACK))


# Observing ----------------------------------------------------------------------------------------


def _limit(kind: int) -> tuple[int | None, int | None]:
    try:
        soft, hard = resource.getrlimit(kind)
    except (OSError, ValueError) as error:  # ValueError: EPERM
        raise Untested("a security rule refuses getrlimit(2) to this process") from error
    return (
        None if soft == resource.RLIM_INFINITY else soft,
        None if hard == resource.RLIM_INFINITY else hard,
    )


def _rdma(ctx: Context) -> list[str]:
    if ctx.backend != "nccl" or not any((ctx.root / "dev/infiniband").glob("uverbs*")):
        return []
    settings = nccl_settings(ctx.env, root=ctx.root)
    ports = admitted(settings, rdma_ports(ctx.root / "sys/class/infiniband"))
    return sorted({name.partition(":")[0] for name in choose_road(settings, ports).ports})


# Judging ------------------------------------------------------------------------------------------


def _open_files(
    cluster: Cluster, rank: Rank, facts: Mapping[str, Any], *, serves: bool
) -> Iterator[Finding]:
    world, soft, hard = cluster.world_size, facts["files"], facts["files_hard"]
    meshes = cluster.backend == "gloo" or serves
    least = (world if cluster.backend == "gloo" else 0) + _FILES_OF_A_RANK
    if serves and rank.launch is not None and rank.launch.agent_store:  # in another process
        least = max(least, world + _FILES_OF_A_RANK)
    elif serves:
        least += world + _FILES_OF_THE_STORE
    wanted = _FILES_OF_A_JOB + (2 if meshes else 1) * world
    if soft is None or soft >= wanted:
        return
    most = "unlimited" if hard is None else hard
    enough = hard is None or hard >= wanted
    yield Finding(
        OPEN_FILES,
        f"limit of open files {soft} (hard limit {most}); {world} ranks need {least}, "
        f"{wanted} is safe",
        Where(hosts=(rank.host.label,)),
        {"soft": soft, "hard": hard, "needed": least, "safe": wanted},
        fix=more_files(
            hard if enough and hard is not None else max(65536, wanted), soft, allowed=enough
        ),
        severity=Severity.FAIL if soft < least else None,
    )


def _locked(rank: Rank, facts: Mapping[str, Any]) -> Iterator[Finding]:
    locked = facts["locked"]
    if not facts["rdma"] or locked is None or locked >= _LOCKED_WARN:
        return
    apart = facts.get("user_namespace", False)
    runtime, is_root = facts.get("container", ""), facts.get("root", True)
    where, fix = "", Fix()
    if apart:
        where, fix = " in a user namespace, where CAP_IPC_LOCK does not lift it", LOCK_MORE_ROOTLESS
    elif runtime:
        user = "" if is_root else " for a user other than root, whom CAP_IPC_LOCK does not reach,"
        where, fix = f"{user} in a container", lock_more_in_container(runtime, is_root=is_root)
    yield Finding(
        MEMLOCK,
        f"locked memory limited to {locked // 1024} KiB{where}, RDMA on {', '.join(facts['rdma'])}",
        Where(hosts=(rank.host.label,)),
        {"bytes": locked, "devices": facts["rdma"]},
        fix=fix,
        severity=Severity.FAIL if locked < _LOCKED_FAIL else None,
        confidence=Confidence.LIKELY,
    )


def _processes(cluster: Cluster, rank: Rank, facts: Mapping[str, Any]) -> Iterator[Finding]:
    ranks = facts["local_ranks"]
    rooms = []
    if facts["tasks"] is not None and facts["processes"] is not None:
        rooms.append((facts["processes"], facts["tasks"], _NPROC))
    if facts["pids"] is not None:
        rooms.append((facts["pids"]["limit"], facts["pids"]["used"], "pids.max of the cgroup"))
    if not rooms:
        return
    limit, used, name = min(rooms, key=lambda room: room[0] - room[1])
    left = max(0, limit - used)
    if left >= ranks * _THREADS["nccl" if cluster.backend == "nccl" else "gloo"]:
        return
    yield Finding(
        PROCESSES,
        f"{name} is {limit}, {used} in use: {left} left for {ranks} ranks",
        Where(hosts=(rank.host.label,)),
        {"limit": limit, "used": used},
        MORE_PROCESSES if name == _NPROC else MORE_TASKS,
        severity=Severity.FAIL if left < ranks * _THREADS_LEAST else None,
        confidence=Confidence.LIKELY,
    )


def _addresses(cluster: Cluster, rank: Rank, limit: int | None) -> Iterator[Finding]:
    """Finding on the address space; `limit` is None in reports of earlier versions too."""
    if limit is None or limit >= _ADDRESSES:
        return
    errors = [facts["error"] or "" for _, facts in cluster.facts_on("torch_import", rank.host)]
    refused = any(map(is_of_memory, errors))
    fails = refused or limit < _ADDRESSES_OF_TORCH
    if fails or cluster.backend == "nccl":
        yield Finding(
            ADDRESSES,
            f"RLIMIT_AS is {limit // _MIB} MiB{', too little to import torch' if refused else ''}",
            Where(hosts=(rank.host.label,)),
            {"bytes": limit},
            severity=Severity.FAIL if fails else None,
            confidence=Confidence.LIKELY,
        )


def _stack(cluster: Cluster, rank: Rank, limit: int | None) -> Iterator[Finding]:
    """Finding on the stack of threads; None for `limit` is unlimited."""
    if cluster.backend != "nccl" or (limit is not None and limit >= _STACK):
        return
    # RCCL has a history of its own.
    loaded = [
        (library.get("loaded") or {}).get("version") or library.get("built")
        for _, library in cluster.facts_on("nccl_library", rank.host)
        if library["cuda"]
    ]
    old = sorted({each for each in loaded if each and release(each) < _OWN_STACKS})
    if not old:
        return
    yield Finding(
        STACK,
        f"stack limit {'unlimited' if limit is None else f'{limit // 1024} KiB'}, which is "
        f"{'2 MiB' if limit is None else 'the size'} for new threads; NCCL {', '.join(old)}",
        Where(hosts=(rank.host.label,)),
        {"bytes": limit, "nccl": old},
        severity=Severity.WARN if cluster.is_multi_host() and _is_large(cluster, rank) else None,
        confidence=Confidence.POSSIBLE,
    )


def _is_large(cluster: Cluster, rank: Rank) -> bool:
    """True if NVLink joins the GPUs of this host to those of others."""
    return any(
        name in (gpu.get("name") or "")
        for _, facts in cluster.facts_on("gpu_state", rank.host)
        for gpu in facts.get("gpus") or ()
        for name in _LARGE_DOMAINS
    )
