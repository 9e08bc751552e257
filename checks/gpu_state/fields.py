"""The values that are read from one GPU, and how each answer becomes a plain fact.

Units are in the names: `_mhz`, `_mw` (milliwatt), `_bytes`; temperatures are degrees Celsius
(`margin_temperature`: how far below the point where the driver slows the GPU down). A field without
an answer is None, and named in `refused` under the driver's reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nccl_doctor.toolkit.gpu.nvml import ABSENT, RECOVERY, GpuAnswers, Nvml, Refused, names
from nccl_doctor.toolkit.gpu.processes import NVIDIA, process_on_gpu

_SM, _MEMORY = 1, 2  # NVML_CLOCK_*
_CORRECTED, _UNCORRECTED = 0, 1  # NVML_MEMORY_ERROR_TYPE_*
_SINCE_LOAD, _LIFETIME = 0, 1  # NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC
_SLOWDOWN, _MEMORY_MAX = 1, 2  # NVML_TEMPERATURE_THRESHOLD_*
_ECC = "nvmlDeviceGetTotalEccErrors"

_NUMBERS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "vbios": ("nvmlDeviceGetVbiosVersion", ()),
    "persistence": ("nvmlDeviceGetPersistenceMode", ()),
    "compute_mode": ("nvmlDeviceGetComputeMode", ()),
    "pstate": ("nvmlDeviceGetPerformanceState", ()),
    "slowdown_temperature": ("nvmlDeviceGetTemperatureThreshold", (_SLOWDOWN,)),
    "memory_max_temperature": ("nvmlDeviceGetTemperatureThreshold", (_MEMORY_MAX,)),
    "margin_temperature": ("nvmlDeviceGetMarginTemperature", ()),
    "power_mw": ("nvmlDeviceGetPowerUsage", ()),
    "power_limit_mw": ("nvmlDeviceGetPowerManagementLimit", ()),
    "default_power_limit_mw": ("nvmlDeviceGetPowerManagementDefaultLimit", ()),
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", (_SM,)),
    "max_sm_clock_mhz": ("nvmlDeviceGetMaxClockInfo", (_SM,)),
    "max_memory_clock_mhz": ("nvmlDeviceGetMaxClockInfo", (_MEMORY,)),
    "set_sm_clock_mhz": ("nvmlDeviceGetApplicationsClock", (_SM,)),
    "default_sm_clock_mhz": ("nvmlDeviceGetDefaultApplicationsClock", (_SM,)),
    "set_memory_clock_mhz": ("nvmlDeviceGetApplicationsClock", (_MEMORY,)),
    "default_memory_clock_mhz": ("nvmlDeviceGetDefaultApplicationsClock", (_MEMORY,)),
    "virtualization": ("nvmlDeviceGetVirtualizationMode", ()),
    "pcie_generation": ("nvmlDeviceGetCurrPcieLinkGeneration", ()),
    "max_pcie_generation": ("nvmlDeviceGetMaxPcieLinkGeneration", ()),
    "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth", ()),
    "max_pcie_width": ("nvmlDeviceGetMaxPcieLinkWidth", ()),
    "pcie_replays": ("nvmlDeviceGetPcieReplayCounter", ()),
    "ecc_corrected": (_ECC, (_CORRECTED, _SINCE_LOAD)),
    "ecc_uncorrected": (_ECC, (_UNCORRECTED, _SINCE_LOAD)),
    "ecc_uncorrected_lifetime": (_ECC, (_UNCORRECTED, _LIFETIME)),
    "retired_pages_pending": ("nvmlDeviceGetRetiredPagesPendingStatus", ()),
}
_COUNTERS = {"replay": 0, "recovery": 1, "crc_flit": 2}  # NVML_NVLINK_ERROR_DL_*
_NEWER_COUNTERS = {
    "recovery_failed": "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
    "recovered": "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS",
    "effective": "NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS",
}
"""What NVLink 5 counts in place of these: field values, one for each link."""
_LONG = (2, 3)  # NVML_VALUE_TYPE_UNSIGNED_LONG, …_LONG_LONG
_MOST_C2C_LINKS = 64
_FABRIC = ("NOT_SUPPORTED", "NOT_STARTED", "IN_PROGRESS", "COMPLETED")
_RECOVERY_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"


def read_gpu(library: Nvml, index: int, root: Path) -> GpuAnswers:
    """Read all values of one GPU.

    Returns: the facts of a GPU. Beside the numbers above (`set_` and `default_` clocks: the highest
    that programs are given, as somebody set it, and as it is otherwise): `name`, `uuid`, `bus_id`
    (as the kernel writes it), `numa`, `memory` `{total, used}` in bytes, `processes` `[{pid, bytes,
    name, here}]` of those that compute, `ecc` and `mig` `[now, after the next reset]`, `gsp` (the
    firmware that does part of the driver's work) `[on, on by default]`, `remapped` `{corrected,
    uncorrected, pending, failed}`, `banks_without_spare`, `sram_threshold_exceeded`,
    `retired_pages`, `throttle` (bits), `temperature`, `memory_temperature`, `recovery_action`,
    `nvlinks` (one state for each link) and `nvlink_errors` (sums over the links), `c2c` (one state
    for each link to the CPU), `fabric`, `chassis`.
    """
    asked = GpuAnswers(library, index)
    asked.handle = asked.ask("handle", ("nvmlDeviceGetHandleByIndex", (index,)))
    del asked.facts["handle"]
    if asked.handle is None:
        return asked
    # The UUID first: from here on every breadcrumb names it.
    asked.ask("uuid", ("nvmlDeviceGetUUID", ()))
    asked.ask("bus_id", ("nvmlDeviceGetPciInfo", ()), read=lambda pci: kernel_bus_id(pci.busId))
    asked.ask("name", ("nvmlDeviceGetName", ()))
    asked.facts["numa"] = _numa(root, asked.facts["bus_id"])
    # CUDA 14 removes the first of these.
    both = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
    asked.ask("temperature", *((function, (0,)) for function in both))
    for field, way in _NUMBERS.items():
        asked.ask(field, way)
    asked.ask(
        "memory",
        ("nvmlDeviceGetMemoryInfo", ()),
        read=lambda seen: {"total": seen.total, "used": seen.used},
    )
    asked.ask(
        "processes",
        *((f"nvmlDeviceGetComputeRunningProcesses{of}", ()) for of in ("", "_v3", "_v2")),
        read=lambda seen: [
            process_on_gpu(root, one.pid, one.usedGpuMemory, NVIDIA) for one in seen
        ],
    )
    asked.ask("ecc", ("nvmlDeviceGetEccMode", ()), read=list)
    asked.ask("mig", ("nvmlDeviceGetMigMode", ()), read=list)
    asked.ask("gsp", ("nvmlDeviceGetGspFirmwareMode", ()), read=list)
    asked.ask(
        "remapped",
        ("nvmlDeviceGetRemappedRows", ()),
        read=lambda rows: dict(
            zip(("corrected", "uncorrected", "pending", "failed"), rows, strict=True)
        ),
    )
    asked.ask(
        "banks_without_spare",
        ("nvmlDeviceGetRowRemapperHistogram", ()),
        read=lambda seen: seen.none,
    )
    _sram(library, asked)
    by_single = asked.ask("retired_pages", ("nvmlDeviceGetRetiredPages", (0,)), read=len)
    if by_single is not None:
        by_double = asked.ask("retired_pages", ("nvmlDeviceGetRetiredPages", (1,)), read=len)
        asked.facts["retired_pages"] = by_single + (by_double or 0)
    asked.ask(
        "throttle",
        ("nvmlDeviceGetCurrentClocksEventReasons", ()),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", ()),
    )
    _recovery(library, asked)
    _field(library, asked, "memory_temperature", "NVML_FI_DEV_MEMORY_TEMP")
    _c2c(library, asked)
    _nvlinks(library, asked, int(getattr(library.nvml, "NVML_NVLINK_MAX_LINKS", 18)))
    _fabric(library, asked)
    _chassis(library, asked)
    return asked


def kernel_bus_id(text: str) -> str:
    """The bus id as the kernel writes it: `00000000:1B:00.0` of NVML is `0000:1b:00.0`."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _numa(root: Path, bus_id: str | None) -> int | None:
    try:
        return int((root / f"sys/bus/pci/devices/{bus_id}/numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _field(
    library: Nvml,
    asked: GpuAnswers,
    name: str,
    constant: str,
    read: Callable[[int], Any] = lambda value: value,
) -> None:
    """Read a value that has a field number and no function of its own."""
    number = getattr(library.nvml, constant, None)
    ways = () if number is None else (("nvmlDeviceGetFieldValues", ([number],)),)
    asked.ask(
        name,
        *ways,
        read=lambda values: None if values[0].nvmlReturn else read(values[0].value.uiVal),
    )


def _recovery(library: Nvml, asked: GpuAnswers) -> None:
    """Read the recovery action that the driver asks for; drivers before 570 do not report it."""
    actions = names(library.nvml, RECOVERY)
    _field(library, asked, "recovery_action", _RECOVERY_FIELD, actions.get)


def _filled(library: Nvml, asked: GpuAnswers, function: str, kind: str) -> Any:
    """A structure, filled in by the driver.

    Raises:
        Refused: the driver refuses.
        AttributeError: the bindings are older than the structure.
    """
    made = getattr(library.nvml, kind)()
    asked.value(function, ctypes.byref(made))
    return made


def _sram(library: Nvml, asked: GpuAnswers) -> None:
    """Read whether caches had more errors than allowed; needs root."""
    field = "sram_threshold_exceeded"
    try:
        seen = _filled(
            library, asked, "nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t"
        )
        asked.facts[field] = seen.bThresholdExceeded
    except AttributeError:
        asked.refuse(field, ABSENT)
    except Refused as refused:
        asked.refuse(field, refused.name)


def _scoped(
    library: Nvml, asked: GpuAnswers, fields: Sequence[tuple[str, int]]
) -> list[int | None]:
    """Values of fields that each name a link; None where there is no answer."""
    numbers = [(getattr(library.nvml, name, None), link) for name, link in fields]
    if not numbers or any(number is None for number, _ in numbers):
        return [None] * len(numbers)
    try:
        answers = asked.value("nvmlDeviceGetFieldValues", numbers)
    except Refused:
        return [None] * len(numbers)
    return [None if answer.nvmlReturn else _whole(answer) for answer in answers]


def _whole(answer: Any) -> int:
    value = answer.value
    return int(value.ullVal if answer.valueType in _LONG else value.uiVal)


def _c2c(library: Nvml, asked: GpuAnswers) -> None:
    """Read the links between this GPU and its CPU, as Grace has them: 1 is active."""
    (count,) = _scoped(library, asked, [("NVML_FI_DEV_C2C_LINK_COUNT", 0)])
    links = range(min(count or 0, _MOST_C2C_LINKS))
    states = _scoped(library, asked, [("NVML_FI_DEV_C2C_LINK_GET_STATUS", link) for link in links])
    asked.facts["c2c"] = [state for state in states if state is not None]


def _newer_counters(
    library: Nvml, asked: GpuAnswers, states: Sequence[int]
) -> dict[str, int] | None:
    up = [link for link, state in enumerate(states) if state]
    found = {}
    for name, field in _NEWER_COUNTERS.items():
        known = [
            value
            for value in _scoped(library, asked, [(field, link) for link in up])
            if value is not None
        ]
        if known:
            found[name] = sum(known)
    return found or None


def _nvlinks(library: Nvml, asked: GpuAnswers, most: int) -> None:
    """Read NVLinks one by one, until the driver reports that there is no such link."""
    states: list[int] = []
    errors = dict.fromkeys(_COUNTERS, 0)
    counted = False
    for link in range(most):
        try:
            states.append(asked.value("nvmlDeviceGetNvLinkState", link))
        except Refused as refused:
            if link and refused.name == "NOT_SUPPORTED":  # one that this model does not use
                continue
            if not link:
                asked.refuse("nvlinks", refused.name)
            break
        for name, counter in _COUNTERS.items() if states[-1] else ():
            with contextlib.suppress(Refused):
                errors[name] += asked.value("nvmlDeviceGetNvLinkErrorCounter", link, counter)
                counted = True
    asked.facts["nvlinks"] = states
    asked.facts["nvlink_errors"] = errors if counted else _newer_counters(library, asked, states)


def _fabric(library: Nvml, asked: GpuAnswers) -> None:
    """Read the place and state of this GPU in the NVLink fabric: `{state, status, degraded,
    health_mask, cluster_uuid, clique}`.

    The structure has grown with the driver; of an older one, `degraded` and `health_mask` are None.
    `cluster_uuid` names the NVLink domain that GPUs of several hosts share; None where a host has
    its fabric to itself. GPUs of one domain reach each other if their `clique` is the same.
    """
    found = None
    for function, kind in (
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t"),
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v3_t"),
        ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
    ):
        try:
            found = _filled(library, asked, function, kind)
            break
        except (Refused, AttributeError):
            continue
    asked.facts["fabric"] = None
    if found is not None:
        state = found.state
        mask = getattr(found, "healthMask", None)
        asked.facts["fabric"] = {
            "state": _FABRIC[state] if state < len(_FABRIC) else str(state),
            "status": found.status,
            "degraded": None if mask is None else mask & 3 == 1,
            "health_mask": mask,
            "cluster_uuid": _uuid(bytes(found.clusterUuid)),
            "clique": found.cliqueId,
        }


def _uuid(raw: bytes) -> str | None:
    return str(uuid.UUID(bytes=raw)) if any(raw) else None


def _chassis(library: Nvml, asked: GpuAnswers) -> None:
    """Read in which chassis this GPU is, as a digest of its serial number; not every driver and
    machine reports it.
    """
    asked.facts["chassis"] = None
    with contextlib.suppress(Refused, AttributeError, UnicodeDecodeError):
        seen = _filled(library, asked, "nvmlDeviceGetPlatformInfo", "c_nvmlPlatformInfo_v2_t")
        serial = seen.chassisSerialNumber.strip()
        if serial.strip("0"):
            asked.facts["chassis"] = hashlib.sha256(serial.encode()).hexdigest()[:12]
