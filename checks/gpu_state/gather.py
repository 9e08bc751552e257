"""The state of all GPUs of this host, as facts. Touches the driver: for a probe child only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.api import Skip, Untested
from nccl_doctor.toolkit.cgroup import kills_between, memory_kills
from nccl_doctor.toolkit.gpu.apart import RESERVE_S, WorkEnd, each_apart, twice_apart
from nccl_doctor.toolkit.gpu.devices import HostGpus, host_gpus
from nccl_doctor.toolkit.gpu.ends import certainty_of_reader
from nccl_doctor.toolkit.gpu.nvml import (
    LOST,
    Crumb,
    Pairs,
    Refused,
    System,
    prepare,
    read_pairs,
    read_system,
    start,
)
from nccl_doctor.toolkit.gpu.processes import is_own
from nccl_doctor.toolkit.gpu.unread import of_reader
from nccl_doctor.toolkit.host import is_first_namespace

from .device_files import refused_files
from .fabric_manager import FabricManager, read_fabric_manager
from .fields import read_gpu
from .in_service import programs_in_service
from .kernel_log import KernelLog, read_kernel_log
from .trouble import is_readable

MOST_GPUS = 64
_LEAST_PAIRS_S = 3.0
_AFTER_PAIRS_S = 3.0
_IN_SERVICE_S = 1.0
_OPEN_S = 3.0
_NVIDIA, _DISPLAY = "0x10de", "0x03"


class _Call(TypedDict):
    call: str
    name: str


class CallError(_Call, total=False):
    """A call that failed, and the name of its error; the end of the process that made it, or device
    files that may not be opened.
    """

    how: str
    state: str
    wchan: str
    stopped_s: float
    refused_files: list[str]


class GpuStates(System, Pairs):
    """The state of all GPUs, as `gather_gpus` returns it."""

    error: CallError | None
    on_pci: int
    gpus: list[dict[str, Any]]
    pairs_error: CallError | None
    own: list[int]
    kernel_log: KernelLog
    fabric_manager: FabricManager
    memory_kills: int
    in_service: list[str]


def gather_gpus(
    crumb: Crumb, root: Path = Path("/"), left: Callable[[], float] = lambda: float("inf")
) -> GpuStates:
    """The facts that the rules of `health`, `hostwide` and `drift` read.

    Each GPU is read in its own process: one whose driver never answers is `wedged`, and the others
    are still described. A process that died is started once more: only a GPU ends it twice.

    Args:
        crumb: called with each call before it is made.
        root: folder in which `dev`, `proc`, `sys` and `var` lie.
        left: seconds until this process is killed.

    Returns: `error`: the call without which nothing can be read, and how the process ended in it;
    `on_pci`: NVIDIA GPUs that the kernel sees on the bus and that no other driver has; `gpus`,
    those of `read_gpu` in the order of NVML, or of a wedged one `index`, `uuid` if known, and
    `wedged`: `{call, how, state, wchan, stopped_s}`, or of one at whose answers this raised, the
    same and `raised`: `{call, how}`; of one without a handle also `refused_files`, device files
    that may not be opened; `pairs_error`: the call that kept pairs from being asked for; `own`:
    process ids of this examination; `memory_kills`: processes that the kernel killed for lack of
    memory meanwhile; `in_service` of `programs_in_service`.

    Raises:
        Skip: there is no NVIDIA GPU.
        Untested: there is nothing to read GPUs by, or the library refuses, for a reason that is
            not the GPUs'.
    """
    kills = memory_kills(root)
    on_host, on_pci = host_gpus(root), len(list(_on_pci(root)))
    before = _in_service(root) if _seen(on_host, on_pci, root) else []
    prepare()
    limit_s = max(1.0, left() - RESERVE_S)
    (system,) = twice_apart([partial(_system, root)], limit_s, left, crumb)
    if system.raised:
        raise RuntimeError(system.raised)
    error = _error(system)
    versions: System = {"driver": on_host["driver"], "nvml": None, "cuda": None, "count": 0}
    gpus: list[dict[str, Any]] = []
    if error is None:
        versions = system.value["system"]
        if not versions["count"]:
            raise _none_shown(on_host, on_pci, root, crumb)
        gpus = _all(min(versions["count"], MOST_GPUS), root, crumb, left)
    elif error["name"] == _NO_BINDINGS:
        if seen := _seen(on_host, on_pci, root):
            raise Untested(
                f"{seen} here, and the bindings to read their state are not installed: {_INSTALL}"
            )
        raise Skip(_nothing(on_host, f"nvidia-ml-py is not installed ({_INSTALL})"))
    else:
        _give_up(error, on_host, on_pci, kills_between(kills, memory_kills(root)))
    pids = {one["pid"] for gpu in gpus for one in gpu.get("processes") or ()}
    own = sorted(pid for pid in pids if is_own(pid, root))
    pairs, pairs_error = _between([gpu for gpu in gpus if is_readable(gpu)], crumb, left)
    return {
        **versions,
        **pairs,
        "error": error,
        "on_pci": on_pci,
        "gpus": gpus,
        "pairs_error": pairs_error,
        "own": own,
        "kernel_log": read_kernel_log(root, crumb),
        "fabric_manager": read_fabric_manager(root, crumb),
        "memory_kills": kills_between(kills, memory_kills(root)),
        "in_service": sorted({*before, *_in_service(root)}),
    }


_NO_BINDINGS = "no bindings"
_INSTALL = "python -m pip install nvidia-ml-py"
_NOT_THE_GPUS = (
    "NO_PERMISSION",
    "OPERATING_SYSTEM",  # a control group forbids it
    "MEMORY",
    "INSUFFICIENT_RESOURCES",
    "FUNCTION_NOT_FOUND",
    "ARGUMENT_VERSION_MISMATCH",
)
"""Refusals that come from this process: its rights, its limits, its bindings."""


def _system(root: Path, crumb: Crumb) -> dict[str, Any]:
    try:
        return {"system": read_system(start(crumb))}
    except ImportError:
        return {"error": {"call": "import pynvml", "name": _NO_BINDINGS}}
    except Refused as refused:
        refusal = {"call": refused.call, "name": refused.name}
        return {"error": {**refusal, "refused_files": refused_files(root, crumb, gpus=False)}}


def _error(system: WorkEnd) -> CallError | None:
    """None, or the call without an answer and its error, or the end of the process in it."""
    if system.how:
        return {
            "call": str(system.crumb.get("call", "nvmlInit")),
            "name": system.how,
            "how": system.how,
            "state": system.state,
            "wchan": system.wchan,
            "stopped_s": system.stopped_s,
        }
    error: CallError | None = system.value.get("error")
    return error


def _in_service(root: Path) -> list[str]:
    """Programs that work on the GPUs; none if the answer does not come soon."""
    (ended,) = each_apart([lambda _: programs_in_service(root)], _IN_SERVICE_S, _unheard)
    return list(ended.value or ())


def _unheard(step: str, **details: Any) -> None:
    """Drop a breadcrumb of work that touches no GPU."""


def _all(count: int, root: Path, crumb: Crumb, left: Callable[[], float]) -> list[dict[str, Any]]:
    """The facts of each GPU, in the order of NVML."""
    works = [partial(_one, index, root) for index in range(count)]
    limit_s = max(1.0, left() - RESERVE_S)
    all_ended = twice_apart(works, limit_s, left, crumb)
    if all(ended.raised for ended in all_ended):
        raise RuntimeError(all_ended[0].raised)  # not the fault of a single GPU
    return [
        _without_answer(index, ended) if ended.how else ended.value
        for index, ended in enumerate(all_ended)
    ]


def _one(index: int, root: Path, crumb: Crumb) -> dict[str, Any]:
    try:
        library = start(crumb)
    except Refused as refused:
        lost = refused.name == LOST
        return {"index": index, "lost": lost, "refused": {refused.name: ["handle"]}}
    facts = read_gpu(library, index, root).facts
    if "uuid" not in facts and not facts["lost"]:
        facts["refused_files"] = refused_files(root, crumb, gpus=True)
    return facts


def _without_answer(index: int, ended: WorkEnd) -> dict[str, Any]:
    """Facts of a GPU whose process did not return, or raised."""
    device = str(ended.crumb.get("device", ""))
    uuid = {"uuid": device} if device.startswith(("GPU-", "MIG-")) else {}
    known = {"index": index, **uuid, "lost": False, "refused": {}}
    return {**known, **ended.without_answer()}


def _between(
    readable: Sequence[Mapping[str, Any]], crumb: Crumb, left: Callable[[], float]
) -> tuple[Pairs, CallError | None]:
    """The answers about pairs of GPUs, and the call that kept pairs from being asked for."""
    unknown: Pairs = {"p2p": {}, "nearest": {}, "pairs_refused": {}}
    if len(readable) < 2:
        return unknown, None
    # Without persistence mode, reading pairs has to wake all GPUs again.
    limit_s = max(_LEAST_PAIRS_S, left() - _AFTER_PAIRS_S)
    (ended,) = each_apart([partial(_pairs, readable)], limit_s, crumb)
    if ended.how:
        return unknown, {"call": str(ended.crumb.get("call", "the driver")), "name": ended.how}
    return ended.value.get("pairs", unknown), ended.value.get("error")


def _pairs(gpus: Sequence[Mapping[str, Any]], crumb: Crumb) -> dict[str, Any]:
    try:
        return {"pairs": read_pairs(start(crumb), gpus)}
    except Refused as refused:
        return {"error": {"call": refused.call, "name": refused.name}}


def _ended_pairs(ended: WorkEnd) -> dict[str, Any]:
    if not ended.how:
        return dict(ended.value)
    call = str(ended.crumb.get("call", "the driver"))
    return {"pairs_error": {"call": call, "name": ended.how}}


def _seen(on_host: HostGpus, on_pci: int, root: Path) -> str:
    """The NVIDIA GPUs that this process has, in words; empty if none.

    A container sees those of the machine in /proc and /sys, and has those with a device file.
    """
    count = on_host["nodes"]
    if not count and is_first_namespace(root / "proc"):
        count = on_host["proc"] or on_pci
    return f"{count} NVIDIA {'GPU is' if count == 1 else 'GPUs are'}" if count else ""


def _none_shown(on_host: HostGpus, on_pci: int, root: Path, crumb: Crumb) -> Skip | Untested:
    """Reason why a driver that runs shows no GPU: there is none, or its device file is here."""
    if not on_host["nodes"]:
        return Skip("the NVIDIA driver shows no GPU here")
    (ended,) = each_apart([lambda said: refused_files(root, said, gpus=True)], _OPEN_S, crumb)
    why = (
        "they did not start, or were taken off the bus: `dmesg | grep -e NVRM -e Xid`, then reset "
        "them or restart the host"
    )
    if refused := ended.value:
        why = (
            f"{', '.join(refused)} may not be opened here: start the container again, or ask for "
            "the permission"
        )
    elif not (on_pci or on_host["proc"]):
        why = "none is on the PCI bus: the files are left over, or the GPUs fell off the bus"
    number = on_host["nodes"]
    files = "1 device file" if number == 1 else f"{number} device files"
    return Untested(f"{files} of NVIDIA GPUs here, and the driver shows no GPU; {why}")


def _nothing(on_host: HostGpus, reason: str) -> str:
    if on_host["kfd"] and not (on_host["nodes"] or on_host["proc"]):
        return "no NVIDIA GPU here; check amd_gpus reads the state of AMD GPUs"
    return reason if on_host["nodes"] or on_host["proc"] else f"no NVIDIA GPU here, and {reason}"


def _give_up(error: CallError, on_host: HostGpus, on_pci: int, kills: int) -> None:
    """Raise if the refusal is no sign of a faulty GPU."""
    name = error["name"]
    if error.get("how") and certainty_of_reader(error) is None:
        raise Untested(of_reader("the GPU driver", error, kills))
    if name == "UNKNOWN" and error.get("refused_files"):
        raise Untested(
            f"NVML refuses ({error['call']}: {name}), and {', '.join(error['refused_files'])} may "
            "not be opened here: start the container again, or ask for the permission"
        )
    if name == "LIBRARY_NOT_FOUND":
        reason = "libnvidia-ml.so.1 is not installed here"
        if on_host["nodes"]:
            reason += " (in a container: NVIDIA_DRIVER_CAPABILITIES=all, or add utility)"
            raise Untested(reason)
        raise Skip(_nothing(on_host, reason))
    if name == "DRIVER_NOT_LOADED" and (on_host["driver"] or not on_pci):
        # Loaded, but without device files: a container without a GPU.
        raise Skip(_nothing(on_host, "the NVIDIA driver cannot be reached from here"))
    if name == "LIB_RM_VERSION_MISMATCH":
        raise Untested(
            f"libnvidia-ml.so.1 has another version than the kernel driver ({on_host['driver']})"
        )
    if name in _NOT_THE_GPUS:
        raise Untested(f"NVML refuses: {error['call']}: {name}")


def _on_pci(root: Path) -> Iterator[str]:
    """Bus ids of NVIDIA GPUs that no other driver holds, such as vfio-pci for a guest."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            kind = (device / "class").read_text(encoding="ascii").strip()
        except OSError:
            continue
        driver = device / "driver"
        taken = driver.is_symlink() and os.path.basename(os.readlink(driver)) != "nvidia"
        if vendor == _NVIDIA and kind.startswith(_DISPLAY) and not taken:
            yield device.name
