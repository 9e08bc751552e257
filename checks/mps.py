"""Do the processes of this host share their GPUs through MPS, and can the job?

What it checks
--------------
Whether NVIDIA's Multi-Process Service runs here (nvidia-cuda-mps-control, nvidia-cuda-mps-server in
/proc), whether the processes of this job would find it (the file `control` in
CUDA_MPS_PIPE_DIRECTORY, by default /tmp/nvidia-mps), and to which user its server belongs. Nothing
is sent to it.

Why it matters
--------------
Processes that use CUDA connect to MPS by themselves. If one of them is killed while a GPU works for
it (SIGKILL, Ctrl-C, a segmentation fault), the server and all its other clients may hang, fail or
compute wrongly: NVIDIA says so of every release, up to the guide of driver 615. This examination
ends its own processes in order, GPU work first; only one that hangs is killed, at its deadline. A
server serves one user: with a server of another user, CUDA waits at its first call until that
user's processes have ended. In compute mode Exclusive Process the server has the GPU: a process
that does not find the server cannot use it. NCCL refuses several ranks on one GPU with MPS as
without it (`Duplicate GPU detected`), unless NCCL_MULTI_RANK_GPU_ENABLE=1 (since 2.30.3): check
`backend_device` reports that.

How to fix
----------
MPS that is not wanted: echo quit | nvidia-cuda-mps-control, by the user who started it. Wanted: the
same CUDA_MPS_PIPE_DIRECTORY for daemon and job (in a container: mount it, and share the IPC
namespace), and end ranks with SIGTERM before SIGKILL.

When it is wrong
----------------
In a container the processes of MPS may be invisible: then only the file `control` counts. A file
that a dead daemon left there looks the same there. A server that root started with
-multiuser-server serves all users, and is not reported. An MPS that shares a GPU of other jobs only
is reported too.
Not validated on hardware: tested on made-up clusters and on a made-up /proc.

References
----------
NVIDIA Multi-Process Service guide (Limitations; GPU compute modes; Server; environment variables);
nvidia-cuda-mps-control(1); NCCL src/init.cc (`ncclParamMultiRankGpuEnable`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Skip,
    Step,
    Where,
    shell,
)
from nccl_doctor.toolkit.gpu.devices import EXCLUSIVE_PROCESS, host_gpus
from nccl_doctor.toolkit.gpu.mps import serves_here
from nccl_doctor.toolkit.host import is_first_namespace, text_of

_QUIT = Fix(Step(shell("echo quit | nvidia-cuda-mps-control"), note="ends MPS", persists=True))
ACTIVE = Kind(
    "mps-active",
    Layer.DEVICE,
    "Processes of this host share GPUs through MPS",
    "If one client is killed while a GPU works for it, the MPS server and its other clients may "
    "hang, fail or compute wrongly.",
    Fix(
        text="nothing, if it is meant: end ranks with SIGTERM before SIGKILL",
        alternatives=[_QUIT],
    ),
    Severity.INFO,
)
OTHER_USER = Kind(
    "mps-other-user",
    Layer.DEVICE,
    "The MPS server is of another user",
    "It serves one user at a time: CUDA waits at its first call until the processes of the other "
    "user have ended.",
    Fix(
        text="end the other user's processes, or give this job GPUs of its own",
        alternatives=[_QUIT],
    ),
    Severity.WARN,
)
NOT_REACHED = Kind(
    "mps-not-reached",
    Layer.DEVICE,
    "MPS has the GPUs, and this job does not find it",
    "In compute mode Exclusive Process only the MPS server may use a GPU: CUDA fails with `all "
    "CUDA-capable devices are busy or unavailable`.",
    Fix(
        Step(shell("# export CUDA_MPS_PIPE_DIRECTORY=FOLDER"), note="as the MPS daemon has it"),
        alternatives=[
            "in a container: mount that folder",
            Fix(*_QUIT.steps, Step(shell("nvidia-smi -c DEFAULT"), note="as root", persists=True)),
        ],
    ),
    Severity.WARN,
)
_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_PIPE = "/tmp/nvidia-mps"
_NAME = "nvidia-cuda-mps"
"""What the kernel keeps of the names of both programs."""


class MpsFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    pipe: str
    control: bool
    daemons: list[tuple[int, int]]
    servers: list[tuple[int, int]]
    all_seen: bool
    uid: int


class Mps(Check):
    """Looks for the processes of MPS and for its pipe."""

    name = "mps"
    layer = Layer.DEVICE
    kinds = (ACTIVE, OTHER_USER, NOT_REACHED)
    reads = ("gpu_state",)

    def observe(self, ctx: Context) -> MpsFacts:
        """`pipe`: the folder in which CUDA looks; `control`: whether the daemon's file is there;
        `daemons`, `servers`: [process id, user id]; `all_seen`: whether no process is hidden; `uid`
        of this process.
        """
        gpus = host_gpus(ctx.root)
        if not (gpus["nodes"] or gpus["proc"]):
            raise Skip("no NVIDIA GPU here")
        pipe = ctx.env.get(_PIPE) or _DEFAULT_PIPE
        proc = ctx.root / "proc"
        ctx.breadcrumb("read the names of all processes")
        found = [(name, each) for name, each in _processes(proc) if name.startswith(_NAME)]
        ctx.breadcrumb(f"look for {pipe}/control")
        return {
            "pipe": pipe,
            "control": os.path.exists(ctx.root / pipe.lstrip("/") / "control"),
            "daemons": [each for name, each in found if not name.endswith("-server")],
            "servers": [each for name, each in found if name.endswith("-server")],
            "all_seen": is_first_namespace(proc),
            "uid": os.getuid(),
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each host where MPS runs."""
        exclusive = {
            rank.host.id
            for rank, facts in cluster.facts("gpu_state")
            if any(gpu.get("compute_mode") == EXCLUSIVE_PROCESS for gpu in facts["gpus"])
        }
        for rank, facts in cluster.facts(self.name):
            for finding in _on_host(facts, exclusive=rank.host.id in exclusive):
                yield finding.replaced(where=Where(hosts=(rank.host.label,)), evidence=dict(facts))


def _on_host(facts: Mapping[str, Any], *, exclusive: bool) -> Iterator[Finding]:
    daemons, servers = facts["daemons"], facts["servers"]
    seen = [*daemons, *servers]
    who = ", ".join(f"pid {pid} of uid {uid}" for pid, uid in seen)
    mode = "; compute mode Exclusive Process" if exclusive else ""
    if not facts["control"]:
        if seen and exclusive:
            yield Finding(
                NOT_REACHED,
                f"MPS runs ({who}), but {facts['pipe']}/control is not there{mode}",
                confidence=Confidence.LIKELY,
            )
        return
    if not serves_here(facts):
        return  # what a daemon left behind that has ended
    others = [(pid, uid) for pid, uid in servers if uid not in (0, facts["uid"])]
    if others and len(others) == len(servers) and facts["all_seen"]:
        pid, uid = others[0]
        yield Finding(
            OTHER_USER,
            f"the MPS server (pid {pid}) is of uid {uid}, this job of uid {facts['uid']}",
            confidence=Confidence.LIKELY,
        )
        return
    yield Finding(
        ACTIVE,
        f"{facts['pipe']}/control{f'; {who}' if who else ''}{mode}",
        confidence=Confidence.CERTAIN if seen else Confidence.LIKELY,
    )


def _processes(proc: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name of each process that may be one of MPS, its process id and its user id."""
    for folder in proc.glob("[0-9]*"):
        if text_of(folder / "comm").startswith(_NAME):
            program = text_of(folder / "cmdline").split("\0", maxsplit=1)[0]
            try:
                uid = folder.stat().st_uid
            except OSError:  # it has ended
                continue
            yield os.path.basename(program) or _NAME, (int(folder.name), uid)
