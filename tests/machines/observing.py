"""Every `observe` that can be real on a made-up host, in real probe children of a small process."""

from __future__ import annotations

import ctypes
import functools
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from nccl_doctor import registry
from nccl_doctor.api import Context, Launch, Scope, Untested
from nccl_doctor.model.cluster import Outcome
from nccl_doctor.observe import probe
from nccl_doctor.toolkit.variables.table import table

DEADLINE_S = 120.0
"""Nothing hangs here, and a busy machine must not look like a lost GPU."""
AT_THE_END = ("hardware_errors", "memory_kills", "rdma_errors")
"""Checks that read the machine once more, after the others."""
_LOADS = frozenset({"amd_gpus", "gpu_state", "nccl_plugins", "net_plugin"})
"""Checks with a child of their own, as what they load may crash. The others may hang on a host, and
never do here: they share one."""


@dataclass(frozen=True)
class Task:
    """A host to observe.

    Attributes:
        ranks: the launch and the environment of each of its ranks.
        own: UUID and PCI address of the GPU of each.
        cpus: number of its CPUs; no rank is bound.
        skip: checks that are not observed.
        again: whether the machine is read once more at the end.
    """

    root: Path
    ranks: Sequence[tuple[Launch, Mapping[str, str]]]
    own: Sequence[tuple[str, str] | None]
    cpus: int
    nvml: Path | None
    amdsmi: Path | None
    libraries: Sequence[str]
    shm_mib: int
    in_shm: Mapping[str, int]
    later: Mapping[str, str]
    skip: frozenset[str]
    again: bool = True


def observe(task: Task) -> list[dict[str, dict[str, Any]]]:
    """For each rank: check → outcome as JSON; those of the host with its first rank."""
    return _small_process().submit(_observe, task).result()


@functools.cache
def _small_process() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, initializer=_start)


def _start() -> None:
    import pynvml

    assert pynvml
    # What torch would say is given; and a fork of a process that has it costs ten times as much.
    sys.meta_path.insert(0, _NoTorch())
    _checks()
    table()  # else every child that needs it reads it
    gc.collect()
    gc.freeze()  # else every child goes through all that is imported, and so copies it
    gc.disable()


class _NoTorch(MetaPathFinder):
    """A Python without torch."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name)


@functools.cache
def _checks() -> tuple[Any, ...]:
    return registry.load().checks


def _observe(task: Task) -> list[dict[str, dict[str, Any]]]:
    if not task.shm_mib:
        return _read(task)
    shm = os.fsencode(task.root / "dev/shm")
    libc = ctypes.CDLL(None, use_errno=True)
    _called(libc.unshare(_NEW_MOUNTS))
    _called(libc.mount(b"none", b"/", None, _PRIVATE, None))
    _called(libc.mount(b"tmpfs", shm, b"tmpfs", 0, b"size=%dm" % task.shm_mib))
    for name, size in task.in_shm.items():
        (task.root / "dev/shm" / name).write_bytes(bytes(size))
    try:
        return _read(task)
    finally:
        libc.umount2(shm, _DETACH)


_NEW_MOUNTS, _PRIVATE, _DETACH = 0x20000, 0x44000, 2  # CLONE_NEWNS, MS_REC | MS_PRIVATE, MNT_DETACH


def _called(result: int) -> None:
    if result:
        raise PermissionError(ctypes.get_errno(), "mounting a small /dev/shm needs root")


def _read(task: Task) -> list[dict[str, dict[str, Any]]]:
    os.environ["NVML_STAND_IN"] = str(task.nvml or "")
    os.environ["AMDSMI_STAND_IN"] = str(task.amdsmi or "")
    found: list[dict[str, dict[str, Any]]] = [{} for _ in task.ranks]
    first: list[tuple[int, Any]] = []
    for local in range(len(task.ranks)):
        for check in _checks():
            mine = local == 0 or check.scope is Scope.RANK
            if mine and not check.together and check.name not in task.skip:
                first.append((local, check))
    _run(task, first, found)
    for path, text in task.later.items():
        (task.root / path).write_text(text + "\n")
    if task.again:
        _run(task, [(0, check) for check in _checks() if check.name in AT_THE_END], found)
    return found


def _run(task: Task, wanted: Sequence[tuple[int, Any]], found: list[dict[str, Any]]) -> None:
    until = time.monotonic() + DEADLINE_S
    jobs = []
    for local, check in wanted:
        launch, env = task.ranks[local]
        context = Context(launch=launch, env=env, backend="nccl", root=task.root)
        job = probe.job_of(check, context, until)
        if check.name == "gpu_affinity":  # but for asking CUDA which GPU this is
            job = replace(job, work=functools.partial(_look, task, local, check, context))
        elif check.name == "amd_gpus":  # but for asking torch what it is built for
            job = replace(job, work=functools.partial(_look_at_amd, check, context, until))
        if check.name not in _LOADS:
            job = replace(job, shared="instant")
        jobs.append(replace(job, work=functools.partial(_with_libraries, task, job.work)))
    for (local, check), outcome in zip(wanted, probe.run(jobs), strict=True):
        found[local][check.name] = outcome.to_json()


def _with_libraries(task: Task, work: Any, line: probe.Line) -> Mapping[str, Any]:
    """Loaded by their paths first: their names then lead to them."""
    for path in task.libraries:
        ctypes.CDLL(path)
    facts: Mapping[str, Any] = work(line)
    return facts


def _look(task: Task, local: int, check: Any, context: Context, line: probe.Line) -> Any:
    own = task.own[local]
    if own is None:
        raise Untested("torch sees no GPU")
    return check.look(*own, set(range(task.cpus)), context)


def _look_at_amd(check: Any, context: Context, until: float, line: probe.Line) -> Any:
    inside = replace(context, breadcrumb=line.breadcrumb, witness=line.witness, deadline=until)
    return check.look(inside)


def outcomes(seen: Mapping[str, Any]) -> dict[str, Outcome]:
    return {check: Outcome.from_json(data) for check, data in seen.items()}
