"""Do ranks that NCCL takes to be on one host share its memory and its processes?

What it checks
--------------
On every rank: its IPC and PID namespace and the file system of its /dev/shm, compared between the
ranks that NCCL takes to be on one host: the same host name and kernel boot, or the same
NCCL_HOSTID.

Why it matters
--------------
NCCL connects ranks of one host through /dev/shm and through handles of GPU memory that only
processes of one IPC namespace can open. Ranks in several containers that share a host name look
like ranks of one host, but cannot share memory: start-up ends with a CUDA error, or hangs.

How to fix
----------
Start the containers of one host with --ipc=host --pid=host (in Kubernetes: one pod per host, or
hostIPC and hostPID). Or make NCCL treat them as separate hosts: export NCCL_HOSTID=<a name per
container>.

When it is wrong
----------------
Containers with different host names are different hosts for NCCL, which is slower but works: they
are not reported. gloo passes nothing through shared memory.

References
----------
namespaces(7); NCCL user guide (NCCL_HOSTID; troubleshooting, shared memory in containers);
NVIDIA/nccl issue 1925.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Scope,
    Severity,
    Step,
    Untested,
    odd_ones_out,
    place_of,
    shell,
)
from nccl_doctor.toolkit.host import host_name
from nccl_doctor.toolkit.nccl.conf import nccl_settings

IPC_NAMESPACE_SPLIT = Kind(
    code="ipc-namespace-split",
    layer=Layer.HOST,
    title="Ranks of one host cannot share memory",
    why="NCCL connects ranks of one host through shared memory and handles that other containers "
    "cannot open.",
    fix=Fix(
        Step(shell("# docker run --ipc=host --pid=host")),
        alternatives=[
            Fix(Step(shell("# export NCCL_HOSTID=NAME"), note="another one in each container"))
        ],
    ),
)

_PARTS = ("ipc", "pid", "shm")
_WORDS = {"ipc": "IPC namespaces", "pid": "PID namespaces", "shm": "file systems on /dev/shm"}


class IpcNamespaces(Check):
    """Compares the namespaces of the ranks that NCCL takes to be on one host."""

    name = "ipc_namespaces"
    layer = Layer.HOST
    scope = Scope.RANK
    kinds = (IPC_NAMESPACE_SPLIT,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`host`: a digest of what NCCL identifies the host by; inodes of the namespaces and the
        device of /dev/shm, None for what cannot be read.
        """
        seen = {
            "ipc": _inode(ctx.root / "proc/self/ns/ipc"),
            "pid": _inode(ctx.root / "proc/self/ns/pid"),
            "shm": _device(ctx.root / "dev/shm"),
        }
        if all(value is None for value in seen.values()):
            raise Untested("/proc/self/ns and /dev/shm cannot be read")
        return {"host": self._host(ctx), **seen}

    def _host(self, ctx: Context) -> str:
        """Digest of the host's identity, which need not be readable."""
        hostid = nccl_settings(ctx.env, root=ctx.root).get("NCCL_HOSTID")
        name = hostid.value if hostid is not None else ""
        if not name:
            name = host_name()
            with suppress(OSError):
                name += (ctx.root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return hashlib.sha256(name.encode()).hexdigest()[:12]

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """One finding for each host whose ranks differ, on the smaller group of ranks."""
        hosts: dict[str, dict[int, tuple[Rank, Mapping[str, Any]]]] = defaultdict(dict)
        for rank, facts in cluster.facts(self.name):
            hosts[facts["host"]][rank.seat] = rank, facts
        for seen in hosts.values():
            known = {
                seat: tuple(facts[part] for part in _PARTS) for seat, (_, facts) in seen.items()
            }
            apart = [
                part
                for i, part in enumerate(_PARTS)
                if len({values[i] for values in known.values()} - {None}) > 1
            ]
            odd = odd_ones_out(known) if apart else None
            if odd is None:
                continue
            yield Finding(
                IPC_NAMESPACE_SPLIT,
                f"{len(seen)} ranks in different {', '.join(_WORDS[part] for part in apart)}",
                place_of(seen[seat][0] for seat in odd.places),
                {"ranks": {str(seen[s][0].rank): list(values) for s, values in known.items()}},
                severity=Severity.FAIL if cluster.backend == "nccl" else Severity.INFO,
            )


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _device(path: Path) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None
