"""Problems of hosts with what a configuration offloads to them, without knowing the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import Confidence, Fix, On, Severity, Step, shell
from nccl_doctor.system.limits import LOCK_MORE, MORE_MEMORY

from .table import Problem, Settings, whole

PATH, MEMORY = "offload-path-unusable", "offload-memory-low"
OPERATOR = "offload-operator-unavailable"

_GIB = 1 << 30
_STATES = 16
"""Bytes for each parameter on the CPU: Adam's two moments and the master copy, in fp32, and the
gradient."""
_FEW = 10**9
"""Parameters: a model with fewer needs no offloading."""
_CPU_OPTIMIZERS = ("adam", "adamw", "adagrad", "lion")


_BUILD_TOOLS = Fix(
    Step(shell("pip install ninja"), persists=True),
    Step(shell("apt install g++ libaio-dev"), note="as root", persists=True),
    alternatives=[
        Fix(
            Step(shell("pip install ninja"), persists=True),
            Step(shell("dnf install gcc-c++ libaio-devel"), note="as root", persists=True),
        )
    ],
)


def nvme_paths(settings: Settings) -> list[str]:
    """The folders that the configuration swaps to."""
    if settings.stage != 3:
        return []
    paths = [
        settings.get(f"zero_optimization.offload_{what}.nvme_path")
        for what in ("param", "optimizer")
        if settings.offload(what) == "nvme"
    ]
    return [path for path in paths if isinstance(path, str) and path]


def offloads(settings: Settings) -> bool:
    """True if anything goes to the CPU or to NVMe, so that hosts must be examined."""
    return bool(settings.stage and (settings.offload("param") or settings.offload("optimizer")))


def swap_buffers(settings: Settings) -> int:
    """Bytes that each rank locks in memory for swapping parameters; 0 without swapping."""
    if settings.stage != 3 or settings.offload("param") != "nvme":
        return 0
    name = "zero_optimization.offload_param"
    count, size = whole(settings.get(f"{name}.buffer_count")), settings.get(f"{name}.buffer_size")
    elements = whole(size)
    # DeepSpeed's defaults, and the smallest type that parameters have.
    count = 5 if count is None else count
    return 2 * count * (10**8 if elements is None else elements)


def offload_problems(
    settings: Settings, facts: Mapping[str, Any], memory: Mapping[str, Any] | None, hosts: int
) -> Iterator[Problem]:
    """Problems of one host. `facts`: its `offload` facts; `memory`: facts of that check."""
    yield from _paths(facts["paths"], hosts)
    yield from _operators(settings, facts)
    buffers = swap_buffers(settings)
    if buffers and facts["locked"] is not None and facts["locked"] < buffers:
        yield Problem(
            MEMORY,
            f"each rank locks {_gib(buffers)} for swapping parameters (buffer_count × "
            f"buffer_size), but may lock only {facts['locked'] // 1024} KiB",
            LOCK_MORE,
            Severity.FAIL,
            Confidence.LIKELY,
        )
    if memory is not None:
        yield from _memory(settings, memory, buffers, hosts)


def _paths(paths: Mapping[str, Mapping[str, Any]], hosts: int) -> Iterator[Problem]:
    for path, seen in paths.items():
        if seen["error"]:
            yield Problem(
                PATH,
                f"nvme_path {path}: {seen['error']}",
                Fix(
                    Step(
                        shell("mkdir -p {}", path),
                        On.EVERY,
                        note="on a local NVMe disk that the job may write to",
                        persists=True,
                    )
                ),
            )
        elif seen["direct"] is False:
            yield Problem(
                PATH,
                f"nvme_path {path} is on a file system without direct I/O, which swapping needs",
                "give nvme_path a folder on a local NVMe disk (ext4 or XFS)",
                Severity.WARN,
                Confidence.LIKELY,
            )
        elif seen["free"] is not None and seen["free"] * hosts < _STATES * _FEW:
            most = seen["free"] * hosts // _STATES // 10**6
            yield Problem(
                PATH,
                f"nvme_path {path} has {_gib(seen['free'])} free: at {_STATES} bytes per "
                f"parameter, {hosts} such hosts hold a model of {most} million parameters",
                "give nvme_path a folder on a larger disk, or free space there",
                Severity.WARN,
                Confidence.POSSIBLE,
            )


def _operators(settings: Settings, facts: Mapping[str, Any]) -> Iterator[Problem]:
    ops = facts["ops"]
    if ops is None:
        return
    name = settings.get("optimizer.type")
    named = isinstance(name, str) and name.lower() in _CPU_OPTIMIZERS
    torch_adam = settings.is_on("optimizer.params.torch_adam")
    wanted = []
    if settings.offload("optimizer") and named and not torch_adam:
        wanted.append(f"cpu_{str(name).lower().removesuffix('w')}")
    if nvme_paths(settings):
        wanted.append("async_io")
    for op in wanted:
        if ops.get(op):
            continue
        missing = [tool for tool in ("ninja", "compiler") if not facts[tool]]
        if op == "async_io" and not facts["libaio"]:
            missing.append("libaio with its header")
        if missing:
            named_tools = " and ".join(missing).replace("compiler", "a C++ compiler")
            yield Problem(
                OPERATOR,
                f"DeepSpeed builds {op} at the start of the job, but there is no {named_tools}",
                _BUILD_TOOLS,
                # A build of an earlier run may lie in the cache; ninja is asked for all the same.
                Severity.FAIL if "ninja" in missing else Severity.WARN,
                Confidence.LIKELY,
            )


def _memory(
    settings: Settings, memory: Mapping[str, Any], buffers: int, hosts: int
) -> Iterator[Problem]:
    rooms = [memory["available"]] if memory["available"] is not None else []
    group = memory["group"]
    if group is not None:
        rooms.append(max(0, group["limit"] - group["used"]))
    if not rooms:
        return
    left, ranks = min(rooms), memory["local_ranks"]
    fix = Fix(text="use smaller buffers", alternatives=[MORE_MEMORY])
    if buffers * ranks > left:
        never = group is not None and buffers * ranks > group["limit"]
        yield Problem(
            MEMORY,
            f"{ranks} ranks lock {_gib(buffers)} each for swapping parameters (buffer_count × "
            f"buffer_size), but only {_gib(left)} are left on this host",
            fix,
            Severity.FAIL if never else Severity.WARN,
            Confidence.CERTAIN if never else Confidence.LIKELY,
        )
        return
    most = left * hosts // _STATES
    if settings.offload("optimizer") == "cpu" and most < _FEW:
        yield Problem(
            MEMORY,
            f"only {_gib(left)} are left on this host: with offload_optimizer to the CPU at "
            f"{_STATES} bytes per parameter, {hosts} such hosts hold a model of {most // 10**6} "
            "million parameters",
            fix,
            Severity.WARN,
            Confidence.POSSIBLE,
        )


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
