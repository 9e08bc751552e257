"""The state of all AMD GPUs of this host, as facts. Touches the driver: for a probe child only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.api import Skip, Untested
from nccl_doctor.toolkit.cgroup import kills_between, memory_kills
from nccl_doctor.toolkit.gpu.amdsmi import NO_LIBRARY, UNKNOWN_RELEASE, AmdSmi, Gpu
from nccl_doctor.toolkit.gpu.apart import RESERVE_S, WorkEnd, twice_apart
from nccl_doctor.toolkit.gpu.ends import certainty_of_reader
from nccl_doctor.toolkit.gpu.nvml import Crumb, Refused
from nccl_doctor.toolkit.gpu.processes import AMD, is_own, process_on_gpu
from nccl_doctor.toolkit.gpu.unread import of_reader
from nccl_doctor.toolkit.host import is_first_namespace, text_of

_MOST_GPUS = 64
_AMD, _ACCELERATOR = "0x1002", "0x12"
_INSTALL = "install the package amd-smi-lib of the ROCm release of the driver"


class AmdGpuStates(TypedDict):
    """The state of all AMD GPUs, as `gather_amd` returns it."""

    library: str | None
    driver: str | None
    error: dict[str, Any] | None
    hidden: int
    gpus: list[dict[str, Any]]
    own: list[int]
    memory_kills: int


def gather_amd(
    crumb: Crumb,
    root: Path = Path("/"),
    left: Callable[[], float] = lambda: float("inf"),
    folders: Sequence[str] = (),
) -> AmdGpuStates:
    """The facts that the rules of `rules` read.

    Each GPU is read in its own process, as in check `gpu_state`: one whose driver never answers is
    `wedged`, and the others are still described.

    Args:
        crumb: called with each call before it is made.
        root: folder in which `dev`, `proc` and `sys` lie.
        left: seconds until this process is killed.
        folders: where the library may be, beside the places where the loader looks.

    Returns: `library`: its version; `error`: the end of the process that listed the GPUs;
    `hidden`: GPUs of the machine whose render node is not in this container; `gpus`: see `_read`,
    or of one without an answer what `Ended.without_answer` returns.

    Raises:
        Skip: there is no AMD GPU for computing.
        Untested: there is nothing to read them by, or none may be used here.
    """
    if not (root / "dev/kfd").exists():
        raise _none(root)
    if not list((root / "dev/dri").glob("renderD*")):
        raise Untested(
            "/dev/kfd is here, but no /dev/dri/renderD*: no AMD GPU can be used or read; start the "
            "container with --device /dev/kfd --device /dev/dri"
        )
    kills = memory_kills(root)
    limit_s = max(1.0, left() - RESERVE_S)
    (listed,) = twice_apart([partial(_list, folders)], limit_s, left, crumb)
    if listed.raised:
        raise RuntimeError(listed.raised)
    if listed.how:
        error = listed.without_answer()["wedged"]
        if certainty_of_reader(error) is None:
            more = kills_between(kills, memory_kills(root))
            raise Untested(of_reader("the AMD GPUs", error, more))
        return _facts(error=error, kills=kills_between(kills, memory_kills(root)))
    if "refused" in listed.value:
        raise Untested(_why(listed.value["refused"]))
    shown = [index for index, bus in enumerate(listed.value["buses"]) if not _is_hidden(root, bus)][
        :_MOST_GPUS
    ]
    works = [partial(_read, index, root, folders) for index in shown]
    ends = twice_apart(works, max(1.0, left() - RESERVE_S), left, crumb) if works else []
    if ends and all(end.raised for end in ends):
        raise RuntimeError(ends[0].raised)  # not the fault of a single GPU
    gpus = [
        _without(index, listed.value["buses"][index], end) if end.how else end.value
        for index, end in zip(shown, ends, strict=True)
    ]
    if not gpus:
        raise Untested("amdsmi shows no AMD GPU that this container was given")
    pids = {one["pid"] for gpu in gpus for one in gpu.get("processes") or ()}
    return _facts(
        library=listed.value["library"],
        driver=next((gpu["driver"] for gpu in gpus if gpu.get("driver")), None),
        hidden=len(listed.value["buses"]) - len(shown),
        gpus=gpus,
        own=sorted(pid for pid in pids if is_own(pid, root)),
        kills=kills_between(kills, memory_kills(root)),
    )


def _facts(*, kills: int, **known: Any) -> AmdGpuStates:
    empty: AmdGpuStates = {
        "library": None,
        "driver": None,
        "error": None,
        "hidden": 0,
        "gpus": [],
        "own": [],
        "memory_kills": kills,
    }
    return {**empty, **known}  # type: ignore[typeddict-item]


def _none(root: Path) -> Skip | Untested:
    """The reason where the kernel shows no AMD GPU for computing."""
    on_bus = sum(1 for _ in _accelerators(root))
    if on_bus and is_first_namespace(root / "proc"):
        # Accelerators have no other use; a graphics card may just show a picture.
        return Untested(
            f"{on_bus} AMD {'accelerator is' if on_bus == 1 else 'accelerators are'} on the PCI "
            "bus, and /dev/kfd is not here: modprobe amdgpu; `dmesg | grep amdgpu` shows why not"
        )
    return Skip("no AMD GPU for computing here (no /dev/kfd)")


def _accelerators(root: Path) -> Iterator[str]:
    """Bus ids of AMD's accelerators that no other driver holds, as vfio-pci for a guest."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if (device / "driver").exists() and (device / "driver").resolve().name != "amdgpu":
            continue
        vendor, kind = text_of(device / "vendor").strip(), text_of(device / "class").strip()
        if vendor == _AMD and kind.startswith(_ACCELERATOR):
            yield device.name


def _is_hidden(root: Path, bus: str | None) -> bool:
    """True if this container was not given the render node of a GPU; /sys shows all the same."""
    nodes = [path.name for path in (root / f"sys/bus/pci/devices/{bus}/drm").glob("renderD*")]
    return bool(nodes) and not any((root / "dev/dri" / name).exists() for name in nodes)


def _why(refused: Mapping[str, str]) -> str:
    """The reason why the library cannot be asked."""
    name = refused["name"]
    if name == NO_LIBRARY:
        return f"AMD GPUs are here, and libamd_smi.so to read their state is not: {_INSTALL}"
    if name.startswith(UNKNOWN_RELEASE):
        release = name.removeprefix(UNKNOWN_RELEASE).strip()
        return (
            f"libamd_smi.so {release} is not one whose structures this version knows (ROCm 6.2 to "
            "7: 24.6 to 26): the state of the AMD GPUs was not read"
        )
    return f"amdsmi refuses: {refused['call']}: {name}"


def _without(index: int, bus: str | None, ended: WorkEnd) -> dict[str, Any]:
    """Facts of a GPU whose process did not return, or raised."""
    known: dict[str, Any] = {"index": index, "bus_id": bus, "lost": False, "refused": {}}
    return {**known, **ended.without_answer()}


def _list(folders: Sequence[str], crumb: Crumb) -> dict[str, Any]:
    """The version of the library, and the bus id of each GPU in its order."""
    try:
        library = AmdSmi(crumb, folders)
        release = library.start()
        handles = library.gpus()
    except Refused as refused:
        return {"refused": {"call": refused.call, "name": refused.name}}
    buses = []
    for index in range(len(handles)):
        gpu = Gpu(library, release, index)
        gpu.find(handles)
        buses.append(gpu.facts["bus_id"])
    return {"library": str(release), "buses": buses}


def _read(index: int, root: Path, folders: Sequence[str], crumb: Crumb) -> dict[str, Any]:
    """The facts of one GPU.

    Returns: names and units as in the facts of `gpu_state`, where they mean the same: `index`,
    `bus_id`, `uuid`, `name`, `memory`, `processes`, `temperature` (of the hottest place),
    `slowdown_temperature` (critical), `memory_temperature`, `memory_max_temperature`,
    `power_limit_mw`, `default_power_limit_mw`, `max_sm_clock_mhz`. And: `unique_id` (hexadecimal,
    by the kernel), `errors` and `xgmi_errors` `{correctable, uncorrectable, deferred}`, `pages`
    `{reserved, pending, unreservable}`, `most_pages`, `pcie` `{width, max_width, speed,
    max_speed}`, `level`, `throttle` (names of HELD_BY), `xgmi_links` (`up`, `down`, `disabled`),
    `xgmi_peers`, `compute_partition`, `memory_partition`, `driver`. A field without an
    answer is None, and named in `refused`.
    """
    library = AmdSmi(crumb, folders)
    try:
        release = library.start()
        handles = library.gpus()
    except Refused as refused:
        return {"index": index, "lost": False, "refused": {refused.name: ["handle"]}}
    gpu = Gpu(library, release, index)
    if index >= len(handles):
        return {"index": index, "lost": False, "refused": {"NOT_FOUND": ["handle"]}}
    gpu.find(handles)
    for field, read in _fields(gpu, handles).items():
        gpu.ask(field, read)
    facts = gpu.facts
    cap, seen = facts.pop("power_cap") or {}, facts["processes"]
    facts["power_limit_mw"], facts["default_power_limit_mw"] = cap.get("now"), cap.get("default")
    if seen is not None:
        facts["processes"] = [process_on_gpu(root, pid, held, AMD) for pid, held in seen]
    unique = text_of(root / f"sys/bus/pci/devices/{facts['bus_id']}/unique_id").strip()
    facts["unique_id"] = unique.lower() or None
    return facts


def _fields(gpu: Gpu, handles: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    return {
        "name": partial(gpu.text, "amdsmi_get_gpu_asic_info"),
        "driver": partial(gpu.text, "amdsmi_get_gpu_driver_info"),
        "memory": gpu.memory,
        "temperature": partial(gpu.temperature, of_memory=False, limit=False),
        "slowdown_temperature": partial(gpu.temperature, of_memory=False, limit=True),
        "memory_temperature": partial(gpu.temperature, of_memory=True, limit=False),
        "memory_max_temperature": partial(gpu.temperature, of_memory=True, limit=True),
        "errors": gpu.errors,
        "xgmi_errors": gpu.xgmi_errors,
        "pages": gpu.pages,
        "most_pages": gpu.most_pages,
        "pcie": gpu.pcie,
        "power_cap": gpu.power_cap,
        "max_sm_clock_mhz": gpu.most_clock,
        "level": gpu.level,
        "throttle": gpu.throttle,
        "xgmi_links": gpu.xgmi_links,
        "xgmi_peers": partial(gpu.xgmi_peers, handles),
        "compute_partition": partial(gpu.partition, "amdsmi_get_gpu_compute_partition"),
        "memory_partition": partial(gpu.partition, "amdsmi_get_gpu_memory_partition"),
        "processes": gpu.processes,
    }
