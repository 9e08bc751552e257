"""What the facts of GPUs say about their state. Pure rules, one GPU or one host at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl_doctor.model import Confidence, Kind, Severity
from nccl_doctor.tools.gpu.kinds import (
    CLOCKS_LIMITED,
    GPU_BUSY,
    GPU_LOST,
    GPU_THROTTLED,
    GPU_VIRTUAL,
    NVLINK_DOWN,
    NVLINK_ERRORS,
    PCIE_DEGRADED,
)
from nccl_doctor.tools.gpu.nvml import LOST
from nccl_doctor.tools.gpu.xid import asks_for_nothing, xid_of
from nccl_doctor.tools.shared_kinds import FABRIC_MANAGER_DOWN, GPU_UNHEALTHY

Gpu = Mapping[str, Any]
"""One of the `gpus` of `gather_gpus`."""

_BROKEN = ("UNKNOWN", "RESET_REQUIRED", "IRQ_ISSUE", "TIMEOUT", "INSUFFICIENT_POWER")
"""Refusals of a handle that mean a GPU out of order; others mean that it is not ours."""
_VITAL = {"uuid", "name", "memory", "temperature", "pcie_width"}
"""What every driver says of every GPU that works."""
_THROTTLES = {
    0x40: "the GPU is too hot (hardware)",
    0x20: "the GPU is too hot (driver)",
    0x80: "power brake: the power supply asks for less",
    0x08: "hardware slowdown",
}
"""Bits of nvmlClocksEventReason* that no healthy GPU has; a power cap under load is none."""
_ASKS = {
    "GPU_RESET": (Severity.FAIL, "nvidia-smi --gpu-reset -i BUS_ID, or reboot the host"),
    "NODE_REBOOT": (Severity.FAIL, "reboot the host"),
    "SYSTEM_REBOOT": (Severity.FAIL, "reboot the host"),
    "BUS_RESET": (Severity.FAIL, "reboot the host, or reset the PCIe bus of the GPU"),
    "RECOVER_IMEX_DOMAIN": (Severity.FAIL, "restart nvidia-imex on all hosts of the domain"),
    "DRAIN_P2P": (Severity.WARN, "drain the host and reset the GPUs that use NVLink together"),
    "DRAIN_AND_RESET": (Severity.WARN, "drain the host, then nvidia-smi --gpu-reset -i BUS_ID"),
}
"""What the driver asks for: with the last two the GPU works, at less than its full capacity."""
_MPS = "nvidia-cuda-mps"
_PROHIBITED = 2
_BY_HAND = 0x02
"""The bit of nvmlClocksEventReason* for clocks that somebody set (`nvidia-smi -ac` or `-lgc`)."""
_VGPU = 2  # NVML_GPU_VIRTUALIZATION_MODE_VGPU
_MOST_RETIRED = 60
"""Retired pages from which on NVIDIA replaces a GPU; 64 is all that there can be."""
_SOME_BYTES = 2 << 30
_GIB = 1 << 30


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong with one GPU; `severity` None is that of the kind."""

    kind: Kind
    text: str
    fix: str = ""
    severity: Severity | None = None
    confidence: Confidence = Confidence.CERTAIN


def is_readable(gpu: Gpu) -> bool:
    """Whether the driver answers for it."""
    return "uuid" in gpu and not gpu["lost"] and not gpu.get("wedged")


def troubles_of(
    gpu: Gpu, others: Sequence[Gpu], xids: Sequence[Mapping[str, Any]], own: Collection[int]
) -> Iterator[Trouble]:
    """What is wrong with one GPU.

    Args:
        gpu: the one.
        others: all GPUs of its host that answer; those of its model are what it is compared with.
        xids: what the kernel log says of it.
        own: processes of the examination.
    """
    if gpu["lost"]:
        yield Trouble(GPU_LOST, f"the driver says {LOST}{_last_words(xids)}")
        return
    if gpu.get("wedged"):
        stuck = gpu["wedged"]
        state = f", process state {stuck['state']}" if stuck["state"] else ""
        text = f"{stuck['call']} {stuck['how']}{state}{_last_words(xids)}"
        yield Trouble(GPU_LOST, text)
        return
    if not is_readable(gpu):
        broken = [name for name in gpu["refused"] if name in _BROKEN]
        if broken:
            yield Trouble(
                GPU_UNHEALTHY, f"the driver gives no access: {broken[0]}{_last_words(xids)}"
            )
        return
    silent = sorted(_VITAL.intersection(gpu["refused"].get("UNKNOWN", ())))
    if silent:
        text = f"the driver answers UNKNOWN for its {', '.join(silent)}"
        yield Trouble(GPU_UNHEALTHY, f"{text}{_last_words(xids)}")
    alike = [other for other in others if other["name"] == gpu["name"]]
    yield from _recovery(gpu)
    yield from _memory_errors(gpu)
    yield from _xids(xids)
    yield from _fabric(gpu)
    yield from _busy(gpu, own)
    yield from _throttled(gpu)
    yield from _clocks(gpu, alike)
    yield from _pcie(gpu, alike)
    yield from _nvlink(gpu, alike)


def _last_words(xids: Sequence[Mapping[str, Any]]) -> str:
    return f"; kernel log: {_in_words(xids[-1])}" if xids else ""


def _in_words(seen: Mapping[str, Any]) -> str:
    row = xid_of(seen["xid"])
    return f"Xid {seen['xid']}" + (f" ({row.means})" if row else "")


def _recovery(gpu: Gpu) -> Iterator[Trouble]:
    if "RESET_REQUIRED" in gpu["refused"]:
        severity, fix = _ASKS["GPU_RESET"]
        yield Trouble(GPU_UNHEALTHY, "the driver says RESET_REQUIRED", fix, severity)
    elif gpu["recovery_action"] in _ASKS:
        severity, fix = _ASKS[gpu["recovery_action"]]
        text = f"the driver asks for {gpu['recovery_action'].lower().replace('_', ' ')}"
        yield Trouble(GPU_UNHEALTHY, text, fix, severity)
    if gpu["compute_mode"] == _PROHIBITED:
        yield Trouble(
            GPU_UNHEALTHY,
            "its compute mode is Prohibited: no process may use it",
            "nvidia-smi -c DEFAULT",
        )
    if gpu.get("virtualization") == _VGPU:
        yield Trouble(GPU_VIRTUAL, "the driver says that it is a vGPU")


def _memory_errors(gpu: Gpu) -> Iterator[Trouble]:
    rows = gpu["remapped"] or {"pending": 0, "failed": 0}
    count, fix = gpu["ecc_uncorrected"] or 0, "nvidia-smi --gpu-reset -i BUS_ID, or reboot the host"
    pending = bool(rows["pending"] or gpu["retired_pages_pending"])
    if rows["failed"]:
        yield Trouble(
            GPU_UNHEALTHY,
            "bad memory could not be remapped: no spare rows are left",
            "drain the host and have the GPU replaced",
            Severity.FAIL,
        )
    elif count and pending:
        # Bad memory that is still in use, or withheld as whole pages, until a reset.
        text = f"{count} uncorrected ECC errors, and bad memory in place until a reset"
        yield Trouble(GPU_UNHEALTHY, text, fix, Severity.FAIL)
    elif count:
        text = f"{count} uncorrected ECC errors since the driver was loaded"
        yield Trouble(GPU_UNHEALTHY, text, f"{fix}; if it comes back, replace", Severity.WARN)
    elif pending:
        yield Trouble(
            GPU_UNHEALTHY, "bad memory is to be remapped at the next reset", fix, Severity.WARN
        )
    if (gpu["retired_pages"] or 0) >= _MOST_RETIRED:
        yield Trouble(
            GPU_UNHEALTHY,
            f"{gpu['retired_pages']} pages of its memory are retired",
            "have the GPU replaced",
            Severity.WARN,
        )


def _xids(xids: Sequence[Mapping[str, Any]]) -> Iterator[Trouble]:
    """Of a GPU that answers: it may have been reset since, so nobody can be certain."""
    for seen in xids:
        row = xid_of(seen["xid"])
        if row is None or row.severity is Severity.INFO or asks_for_nothing(seen):
            continue
        yield Trouble(
            GPU_UNHEALTHY,
            f"kernel log: {_in_words(seen)}",
            row.fix,
            Severity.WARN,
            Confidence.LIKELY,
        )


def _fabric(gpu: Gpu) -> Iterator[Trouble]:
    seen = gpu["fabric"]
    if not seen or seen["state"] == "NOT_SUPPORTED":
        return
    if seen["state"] != "COMPLETED":
        words = seen["state"].lower().replace("_", " ")
        yield Trouble(FABRIC_MANAGER_DOWN, f"registration with the NVLink fabric: {words}")
    elif seen["status"]:
        text = f"registration with the NVLink fabric failed (status {seen['status']})"
        yield Trouble(FABRIC_MANAGER_DOWN, text)
    elif seen["degraded"]:
        yield Trouble(NVLINK_DOWN, "the NVLink fabric gives this GPU less bandwidth")


def _busy(gpu: Gpu, own: Collection[int]) -> Iterator[Trouble]:
    memory, processes = gpu["memory"], gpu["processes"] or ()
    strange = [
        one
        for one in processes
        if one["pid"] not in own and not (one["name"] or "").startswith(_MPS)
    ]
    full = bool(memory) and memory["total"] - memory["used"] < memory["total"] / 10
    severity = Severity.FAIL if full else Severity.WARN
    if strange:
        who = ", ".join(
            f"pid {one['pid']} ({one['name'] or 'not to be seen from here'})" for one in strange[:4]
        )
        who += f" and {len(strange) - 4} more" if len(strange) > 4 else ""
        known = [str(one["pid"]) for one in strange if one["name"]]
        yield Trouble(
            GPU_BUSY,
            f"{who} on it",
            f"kill {' '.join(known)}, if nobody needs it" if known else "",
            severity,
        )
    elif memory and not processes and not (gpu["mig"] or [0])[0] and _much(memory):
        yield Trouble(
            GPU_BUSY,
            f"{memory['used'] / _GIB:.0f} of {memory['total'] / _GIB:.0f} GiB in use, by no "
            "process that can be seen from here",
            "look from the host, outside containers: nvidia-smi, fuser -v /dev/nvidia*",
            severity,
            Confidence.LIKELY,
        )


def _much(memory: Mapping[str, int]) -> bool:
    """More than the driver keeps for itself."""
    return memory["used"] > max(_SOME_BYTES, memory["total"] / 20)


def _throttled(gpu: Gpu) -> Iterator[Trouble]:
    reasons = [text for bit, text in _THROTTLES.items() if (gpu["throttle"] or 0) & bit]
    if len(reasons) > 1:
        reasons = [text for text in reasons if text != _THROTTLES[0x08]]  # it only sums them up
    hot, limit = gpu["temperature"], gpu["slowdown_temperature"]
    if not reasons and hot is not None and limit and hot >= limit:
        reasons = ["the GPU is too hot"]
    if reasons:
        yield Trouble(GPU_THROTTLED, "; ".join(reasons))


def _clocks(gpu: Gpu, alike: Sequence[Gpu]) -> Iterator[Trouble]:
    """Limits that somebody set. Locked clocks cannot be asked for: the driver only says that it
    holds to some, and on some models always; so that counts only against its peers.
    """
    set_lower = []
    for name, words in (("sm", "SM"), ("memory", "memory")):
        now, usual = gpu.get(f"set_{name}_clock_mhz"), gpu.get(f"default_{name}_clock_mhz")
        most = gpu[f"max_{name}_clock_mhz"]
        if now and usual and now < usual:
            set_lower.append(f"{words} clock at most {now} of {most or usual} MHz")
    if set_lower:
        yield Trouble(CLOCKS_LIMITED, f"applications clocks: {', '.join(set_lower)}")
    elif (gpu["throttle"] or 0) & _BY_HAND:
        held = [other for other in alike if (other["throttle"] or 0) & _BY_HAND]
        if 2 * len(held) < len(alike):
            yield Trouble(
                CLOCKS_LIMITED,
                "the driver holds to clocks that somebody set, unlike on most GPUs of the host",
                confidence=Confidence.LIKELY,
            )


def _pcie(gpu: Gpu, alike: Sequence[Gpu]) -> Iterator[Trouble]:
    width, widest = gpu["pcie_width"], gpu["max_pcie_width"]
    if width and widest and width < widest:
        yield Trouble(PCIE_DEGRADED, f"x{width} of x{widest} lanes")
    # An idle GPU may lower its generation to save power: it counts only against its peers.
    now, most = gpu["pcie_generation"], gpu["max_pcie_generation"]
    faster = [other for other in alike if (other["pcie_generation"] or 0) > (now or 0)]
    if now and most and now < most and 2 * len(faster) > len(alike):
        yield Trouble(
            PCIE_DEGRADED,
            f"generation {now} of {most}, where most GPUs of the host run at "
            f"{max(other['pcie_generation'] for other in faster)}",
            confidence=Confidence.LIKELY,
        )


def _nvlink(gpu: Gpu, alike: Sequence[Gpu]) -> Iterator[Trouble]:
    up = sum(gpu["nvlinks"])
    usual = max(sum(other["nvlinks"]) for other in alike)
    if up < usual:
        down = len(gpu["nvlinks"]) - up
        of_switch = (gpu["fabric"] or {}).get("state") not in (None, "NOT_SUPPORTED")
        yield Trouble(
            NVLINK_DOWN,
            f"{up} NVLinks are up, {usual} on another GPU of the host"
            + (f" ({down} are down)" if down else ""),
            # Bridges join some GPUs of a host and leave others without any.
            confidence=Confidence.CERTAIN if up or of_switch else Confidence.POSSIBLE,
        )
    recovered = (gpu["nvlink_errors"] or {}).get("recovery", 0)
    if recovered:
        yield Trouble(NVLINK_ERRORS, f"its NVLinks recovered {recovered} times")
