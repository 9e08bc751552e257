"""Troubles of single GPUs, from their facts. Pure rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import Confidence, Fix, Severity, Step, look, shell
from nccl_doctor.toolkit.gpu.ends import certainty_of_reader
from nccl_doctor.toolkit.gpu.kinds import (
    BUNDLE,
    CLOCKS_LIMITED,
    GPU_LOST,
    GPU_THROTTLED,
    PCIE_DEGRADED,
)
from nccl_doctor.toolkit.gpu.nvml import LOST
from nccl_doctor.toolkit.gpu.xid import asks_for_nothing, xid_of
from nccl_doctor.toolkit.shared_kinds import (
    GPU_FORBIDDEN,
    GPU_UNHEALTHY,
    HAD_ERRORS,
    LITTLE_SPARE,
    STATE_UNKNOWN,
)

from .gpu_kinds import GPU_VIRTUAL
from .nvlinks import c2c_troubles, fabric_troubles, link_troubles
from .peers import HostGpus, Peers
from .trouble import Gpu, Trouble, is_readable
from .users import Users, busy_troubles

_SURE = ("RESET_REQUIRED", "IRQ_ISSUE", "INSUFFICIENT_POWER")
_BROKEN = ("UNKNOWN", "TIMEOUT", *_SURE)
"""Refusals of a handle that mean a faulty GPU; others mean that it is not ours. The first two have
other reasons as well (a driver that is busy): an Xid of this GPU is asked for as a second sign."""
_VITAL = {"uuid", "name", "memory", "temperature", "pcie_width"}
"""Fields that every driver reports for every GPU that works."""
_THROTTLES = {
    0x40: "thermal slowdown by the hardware: the GPU is too hot",
    0x20: "thermal slowdown by the driver: the GPU is too hot",
    0x80: "power brake: the power supply demands less power",
    0x08: "hardware slowdown",
}
"""Bits of nvmlClocksEventReason* that no healthy GPU has; a power cap under load is normal."""
_RESET = Fix(
    Step(shell("# nvidia-smi --gpu-reset -i BUS_ID"), note="drain the host before", persists=True),
    alternatives=["reboot the host"],
)
_ASKS: Mapping[str, tuple[Severity, str]] = {
    "GPU_RESET": (Severity.FAIL, _RESET),
    "NODE_REBOOT": (Severity.FAIL, "reboot the host"),
    "SYSTEM_REBOOT": (Severity.FAIL, "reboot the host"),
    "BUS_RESET": (Severity.FAIL, "reboot the host, or reset the PCIe bus of the GPU"),
    "RECOVER_IMEX_DOMAIN": (Severity.FAIL, "restart nvidia-imex on all hosts of the domain"),
    "DRAIN_P2P": (Severity.WARN, "drain the host and reset the GPUs that use NVLink together"),
    "DRAIN_AND_RESET": (Severity.WARN, _RESET),
}
"""Actions that the driver asks for; with the last two the GPU works at reduced capacity."""
_PROHIBITED = 2
_BY_HAND = 0x02
"""The bit of nvmlClocksEventReason* for clocks that somebody set (`nvidia-smi -ac` or `-lgc`)."""
_CLOCKS = (
    ("SM", "set_sm_clock_mhz", "default_sm_clock_mhz", "max_sm_clock_mhz"),
    ("memory", "set_memory_clock_mhz", "default_memory_clock_mhz", "max_memory_clock_mhz"),
)
"""Clocks, and the fields of what is set, what is the default, and what is possible."""
_VGPU = 2  # NVML_GPU_VIRTUALIZATION_MODE_VGPU
_RUNS = ("R", "S")
"""States of a process that is late, but not in uninterruptible sleep."""
_MOST_RETIRED = 60
"""Retired pages from which NVIDIA replaces a GPU; 64 is the maximum."""


def troubles_of(
    gpu: Gpu,
    host: HostGpus,
    xids: Sequence[Mapping[str, Any]],
    users: Users,
) -> Iterator[Trouble]:
    """Troubles of one GPU.

    Args:
        gpu: its facts.
        host: all GPUs of its host; it is compared with those of its model.
        xids: its Xids in the kernel log.
        users: of the GPUs of its host.
    """
    if is_readable(gpu):
        return _while_it_answers(gpu, host, xids, users)
    return _without_answer(gpu, host, xids)


def _without_answer(
    gpu: Gpu, host: HostGpus, xids: Sequence[Mapping[str, Any]]
) -> Iterator[Trouble]:
    if gpu["lost"]:
        yield Trouble(GPU_LOST, f"the driver reports {LOST}{_last_words(xids)}")
    elif gpu.get("wedged"):
        yield from _wedged(gpu, host, xids)
    elif gpu.get("raised"):
        yield Trouble(
            STATE_UNKNOWN,
            f"its state is not known: reading the answer to {gpu['raised']['call']} ended with "
            f"{gpu['raised']['how']}",
            Fix(
                look(shell("nvidia-smi -q -i {}", gpu["index"])),
                alternatives=[BUNDLE],
            ),
            Severity.WARN,
            Confidence.POSSIBLE,
        )
    else:
        broken = [name for name in gpu["refused"] if name in _BROKEN]
        # A container that may not open the file of a GPU gets UNKNOWN for it, too.
        if broken and not gpu.get("refused_files"):
            sure = broken[0] in _SURE or _is_confirmed(xids)
            yield Trouble(
                GPU_UNHEALTHY,
                f"the driver refuses access: {broken[0]}{_last_words(xids)}",
                confidence=Confidence.CERTAIN if sure else Confidence.LIKELY,
            )


def _while_it_answers(
    gpu: Gpu,
    host: HostGpus,
    xids: Sequence[Mapping[str, Any]],
    users: Users,
) -> Iterator[Trouble]:
    silent = sorted(_VITAL.intersection(gpu["refused"].get("UNKNOWN", ())))
    if silent:
        text = f"the driver answers UNKNOWN for its {', '.join(silent)}{_last_words(xids)}"
        sure = _is_confirmed(xids)
        yield Trouble(
            GPU_UNHEALTHY, text, confidence=Confidence.CERTAIN if sure else Confidence.LIKELY
        )
    peers = host.by_model[gpu["name"]]
    yield from _recovery(gpu)
    yield from _memory_errors(gpu)
    yield from _xids(xids)
    yield from fabric_troubles(gpu, host.facts.get("fabric_manager"))
    yield from busy_troubles(gpu, users)
    yield from _throttled(gpu)
    yield from _clocks(gpu, peers)
    yield from _power(gpu, peers)
    yield from _pcie(gpu, peers)
    yield from link_troubles(gpu, peers)
    yield from c2c_troubles(gpu, peers)


def _wedged(gpu: Gpu, host: HostGpus, xids: Sequence[Mapping[str, Any]]) -> Iterator[Trouble]:
    """The trouble of a GPU whose reader did not return; none if that was stopped or killed."""
    stuck = gpu["wedged"]
    sure = certainty_of_reader(stuck)
    if sure is None:
        return  # it is one of those that were not read
    crashed_alone = not host.readable and "killed the process" in stuck["how"]
    if _others_run(gpu, host.every) or (crashed_alone and not _is_confirmed(xids)):
        # It may wait for a lock that another reader holds; or the library crashes at every GPU, as
        # it does while it is replaced.
        sure = Confidence.LIKELY
    state = f", process state {stuck['state']}" if stuck["state"] else ""
    text = f"{stuck['call']} {stuck['how']}{state}{_last_words(xids)}"
    yield Trouble(GPU_LOST, text, confidence=sure)


def _others_run(gpu: Gpu, gpus: Sequence[Gpu]) -> bool:
    """True if a process that read another GPU was late too, and not in uninterruptible sleep: it
    may hold the driver's lock, for example to wake GPUs one after the other.
    """
    stuck = [other["wedged"] for other in gpus if other is not gpu and other.get("wedged")]
    return any(one["how"].startswith("did not return") and one["state"] in _RUNS for one in stuck)


def _is_confirmed(xids: Sequence[Mapping[str, Any]]) -> bool:
    """True if the kernel log has an Xid of this GPU after which it cannot be used."""
    rows = (xid_of(seen["xid"]) for seen in xids if not asks_for_nothing(seen))
    return any(row is not None and row.severity is Severity.FAIL for row in rows)


def _last_words(xids: Sequence[Mapping[str, Any]]) -> str:
    return f"; kernel log: {_in_words(xids[-1])}" if xids else ""


def _in_words(seen: Mapping[str, Any]) -> str:
    row = xid_of(seen["xid"])
    return f"Xid {seen['xid']}" + (f" ({row.means})" if row else "")


def _recovery(gpu: Gpu) -> Iterator[Trouble]:
    if "RESET_REQUIRED" in gpu["refused"]:
        severity, fix = _ASKS["GPU_RESET"]
        yield Trouble(GPU_UNHEALTHY, "the driver reports RESET_REQUIRED", fix, severity)
    elif gpu["recovery_action"] in _ASKS:
        severity, fix = _ASKS[gpu["recovery_action"]]
        text = f"the driver asks for {gpu['recovery_action'].lower().replace('_', ' ')}"
        # An IMEX domain spans hosts: another one may have broken it.
        elsewhere = gpu["recovery_action"] == "RECOVER_IMEX_DOMAIN"
        sure = Confidence.LIKELY if elsewhere else Confidence.CERTAIN
        yield Trouble(GPU_UNHEALTHY, text, fix, severity, sure)
    if gpu["compute_mode"] == _PROHIBITED:
        yield Trouble(
            GPU_FORBIDDEN,
            "its compute mode is Prohibited: no process may use it",
            Fix(Step(shell("# nvidia-smi -i BUS_ID -c DEFAULT"), note="as root")),
            drains=False,  # somebody has set it: the GPU works
        )
    if gpu.get("virtualization") == _VGPU:
        yield Trouble(GPU_VIRTUAL, "the driver reports a vGPU")


def _memory_errors(gpu: Gpu) -> Iterator[Trouble]:
    rows = gpu["remapped"] or {"pending": 0, "failed": 0}
    count, fix = gpu["ecc_uncorrected"] or 0, _RESET
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
        text = f"{count} uncorrected ECC errors, and bad memory stays in use until a reset"
        yield Trouble(GPU_UNHEALTHY, text, fix, Severity.FAIL)
    elif count:
        text = f"{count} uncorrected ECC errors since the driver was loaded"
        more = [*fix.alternatives, "if it comes back: replace it"]
        yield Trouble(HAD_ERRORS, text, Fix(*fix.steps, alternatives=more), Severity.WARN)
    elif pending:
        yield Trouble(
            HAD_ERRORS, "bad memory will be remapped at the next reset", fix, Severity.WARN
        )
    elif gpu.get("banks_without_spare"):
        yield Trouble(
            LITTLE_SPARE,
            f"{gpu['banks_without_spare']} memory banks have no spare row left: the next bad row "
            "there cannot be remapped",
            Fix(look(shell("nvidia-smi -q -d ROW_REMAPPER"), "look now and then")),
            Severity.INFO,
        )
    if gpu.get("sram_threshold_exceeded"):
        yield Trouble(
            HAD_ERRORS,
            "the driver reports more uncorrectable SRAM errors than allowed",
            "drain the host, run NVIDIA's field diagnostic, and have the GPU replaced if it fails",
            Severity.WARN,
        )
    if (gpu["retired_pages"] or 0) >= _MOST_RETIRED:
        yield Trouble(
            LITTLE_SPARE,
            f"{gpu['retired_pages']} memory pages are retired",
            "have the GPU replaced",
            Severity.WARN,
        )


def _xids(xids: Sequence[Mapping[str, Any]]) -> Iterator[Trouble]:
    """Troubles from Xids of a GPU that answers; none is certain: it may have been reset since."""
    for seen in xids:
        row = xid_of(seen["xid"])
        if row is None or row.severity is Severity.INFO or asks_for_nothing(seen):
            continue
        yield Trouble(
            HAD_ERRORS,
            f"kernel log: {_in_words(seen)}",
            row.fix,
            Severity.WARN,
            Confidence.LIKELY,
        )


def _throttled(gpu: Gpu) -> Iterator[Trouble]:
    held = gpu["throttle"] or 0
    reasons = [text for bit, text in _THROTTLES.items() if held & bit]
    if len(reasons) > 1:
        reasons = [text for text in reasons if text != _THROTTLES[0x08]]  # it only sums them up
    if not reasons:
        reasons = list(_heat(gpu))
    if reasons:
        yield Trouble(GPU_THROTTLED, "; ".join(reasons))


def _heat(gpu: Gpu) -> Iterator[str]:
    """Signs of heat: by the margin where the driver reports it, else by thresholds (before Ada)."""
    margin = gpu.get("margin_temperature")
    hot, limit = gpu.get("temperature"), gpu.get("slowdown_temperature")
    if margin is not None:
        if margin < 0:
            yield f"the GPU is {-margin} °C above its limit"
    elif hot is not None and limit and hot >= limit:
        yield "the GPU is too hot"
    hot, limit = gpu.get("memory_temperature"), gpu.get("memory_max_temperature")
    if hot and limit and hot >= limit:
        yield f"its memory is too hot ({hot} °C, limit {limit} °C)"


def _clocks(gpu: Gpu, peers: Peers) -> Iterator[Trouble]:
    """Clock limits that are set by hand. Locked clocks cannot be read: the driver only reports that
    some are set, and on some models always; so that counts only against its peers.
    """
    set_lower = []
    for words, set_to, default, highest in _CLOCKS:
        now, usual = gpu.get(set_to), gpu.get(default)
        if now and usual and now < usual:
            set_lower.append(f"{words} clock at most {now} of {gpu[highest] or usual} MHz")
    if set_lower:
        yield Trouble(CLOCKS_LIMITED, f"applications clocks: {', '.join(set_lower)}")
    elif (gpu["throttle"] or 0) & _BY_HAND:
        held = [other for other in peers.gpus if (other["throttle"] or 0) & _BY_HAND]
        if 2 * len(held) < len(peers.gpus):
            yield Trouble(
                CLOCKS_LIMITED,
                "the driver reports clocks that somebody set; most GPUs of the host have none",
                confidence=Confidence.LIKELY,
            )


def _power(gpu: Gpu, peers: Peers) -> Iterator[Trouble]:
    """A power limit that all GPUs share; `drift` reports one that a single GPU has."""
    now, usual = gpu["power_limit_mw"], gpu.get("default_power_limit_mw")
    if not (now and usual and now < usual):
        return
    if all(other["power_limit_mw"] == now for other in peers.gpus):
        yield Trouble(
            CLOCKS_LIMITED,
            f"power limit {now / 1000:g} W, default {usual / 1000:g} W",
            Fix(
                Step(
                    shell("# nvidia-smi -i BUS_ID -pl {}", f"{usual / 1000:g}"),
                    undo=shell("# nvidia-smi -i BUS_ID -pl {}", f"{now / 1000:g}"),
                    note="as root, if this is not intended",
                )
            ),
            Severity.INFO,
        )


def _pcie(gpu: Gpu, peers: Peers) -> Iterator[Trouble]:
    width, widest = gpu["pcie_width"], gpu["max_pcie_width"]
    if width and widest and width < widest:
        yield Trouble(PCIE_DEGRADED, f"x{width} of x{widest} lanes")
    now, most = gpu["pcie_generation"], gpu["max_pcie_generation"]
    if not (now and most and now < most):
        return
    # An idle GPU may lower its generation to save power: it counts only against its peers.
    others = [other["pcie_generation"] or 0 for other in peers.gpus]
    if 2 * sum(other > now for other in others) > len(others):
        yield Trouble(
            PCIE_DEGRADED,
            f"PCIe generation {now} of {most}; most GPUs of the host run at {max(others)}",
            confidence=Confidence.LIKELY,
        )
