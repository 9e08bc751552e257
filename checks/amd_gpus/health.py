"""Troubles of single AMD GPUs, from their facts. Pure rules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl_doctor.api import Confidence, Fix, Kind, Severity, Step, look, shell
from nccl_doctor.toolkit.advice import end_processes
from nccl_doctor.toolkit.gpu.ends import certainty_of_reader
from nccl_doctor.toolkit.gpu.kinds import (
    BUNDLE,
    CLOCKS_LIMITED,
    GPU_BUSY,
    GPU_LOST,
    GPU_THROTTLED,
    PCIE_DEGRADED,
)
from nccl_doctor.toolkit.shared_kinds import (
    GPU_UNHEALTHY,
    HAD_ERRORS,
    LITTLE_SPARE,
    STATE_UNKNOWN,
)

from .kinds import XGMI_DOWN, XGMI_ERRORS

Gpu = Mapping[str, Any]
"""One of the `gpus` of `gather_amd`."""

_GIB = 1 << 30
_HOLDS_BYTES = 1 << 28
"""Memory from which a process uses a GPU: ROCm holds a little of each GPU that it sees."""
_BROKEN = ("IO",)
"""Refusals that no missing permission (NO_PERM), no reset or sleep of a GPU (BUSY), and no library
that is older than the driver (UNEXPECTED_DATA) makes.
"""
_VITAL = {"memory", "temperature"}
"""Fields that the driver reports for every GPU that works."""
_OF_ALL = ("dlopen", "amdsmi_init", "amdsmi_get_lib", "amdsmi_get_socket", "amdsmi_get_processor")
"""Calls about all GPUs at once begin so: one GPU may keep them from returning for every reader."""
_HOT = {
    "prochot": "the board demands it (PROCHOT)",
    "socket": "the GPU is too hot",
    "vr": "its voltage regulators are too hot",
    "hbm": "its memory is too hot",
}
"""What holds clocks down on no healthy GPU; `ppt`, the power limit under load, is normal."""
_LOOK = Fix(
    look(shell("amd-smi metric -g BUS_ID --temperature --power --clock")),
    alternatives=["look at fans, airflow and power"],
)
_RESET = Step(
    shell("# amd-smi reset -g BUS_ID --gpureset"), note="drain the host before", persists=True
)
_LOG = look(shell("dmesg | grep amdgpu"), "shows why")
_XGMI_LOG = look(shell("dmesg | grep -i xgmi"))
_REBOOT = "reboot the host"
_REPLACE = "if it comes back: replace it"


@dataclass(frozen=True)
class Trouble:
    """A trouble of one GPU; `severity` None means that of the kind.

    None of them takes a host out of service (`drains`): not one was seen on hardware yet.
    """

    kind: Kind
    text: str
    fix: str
    severity: Severity | None = None
    confidence: Confidence = Confidence.CERTAIN


def is_readable(gpu: Gpu) -> bool:
    """True if the driver answers for this GPU."""
    return "name" in gpu and not (gpu.get("wedged") or gpu.get("raised"))


def is_held_by_any(gpu: Gpu) -> bool:
    """True if its reader ended in a call about all GPUs: any of them may be the reason."""
    return str((gpu.get("wedged") or {}).get("call", "")).startswith(_OF_ALL)


def troubles_of(gpu: Gpu, others: Sequence[Gpu], own: Collection[int]) -> Iterator[Trouble]:
    """Troubles of one GPU.

    Args:
        gpu: its facts.
        others: all GPUs of its host that answer; it is compared with those of its model.
        own: processes of the examination.
    """
    if gpu.get("wedged"):
        if not is_held_by_any(gpu):
            yield from _wedged(gpu["wedged"])
        return
    if gpu.get("raised"):
        yield Trouble(
            STATE_UNKNOWN,
            f"its state is not known: reading the answer to {gpu['raised']['call']} ended with "
            f"{gpu['raised']['how']}",
            Fix(
                look(shell("amd-smi static -g BUS_ID")),
                look(shell("amd-smi metric -g BUS_ID")),
                alternatives=[BUNDLE],
            ),
            Severity.WARN,
            Confidence.POSSIBLE,
        )
        return
    if not is_readable(gpu):
        return  # it is one of those that were not read
    silent = {name: sorted(_VITAL.intersection(gpu["refused"].get(name, ()))) for name in _BROKEN}
    said = [f"{name} for its {', '.join(fields)}" for name, fields in silent.items() if fields]
    if said:
        yield Trouble(
            GPU_UNHEALTHY,
            f"the driver answers {'; '.join(said)}",
            Fix(_LOG, _RESET, alternatives=[_REBOOT]),
            Severity.WARN,
            Confidence.LIKELY,
        )
    alike = [other for other in others if other["name"] == gpu["name"]]
    yield from _memory_errors(gpu)
    yield from _busy(gpu, own)
    yield from _throttled(gpu)
    yield from _clocks(gpu, alike)
    yield from _pcie(gpu, alike)
    yield from _xgmi(gpu, alike)


def _wedged(stuck: Mapping[str, Any]) -> Iterator[Trouble]:
    """The trouble of a GPU whose reader did not return; none if that was stopped or killed."""
    if certainty_of_reader(stuck) is None:
        return  # it is one of those that were not read
    state = f", process state {stuck['state']}" if stuck["state"] else ""
    # Likely at most: nobody has seen yet what else holds a reader of this library in state D.
    yield Trouble(
        GPU_LOST,
        f"{stuck['call']} {stuck['how']}{state}",
        Fix(
            _LOG,
            alternatives=[
                "drain the host and power-cycle it; if the GPU is lost again, have it reseated or "
                "replaced"
            ],
        ),
        confidence=Confidence.LIKELY,
    )


def _memory_errors(gpu: Gpu) -> Iterator[Trouble]:
    errors, pages, most = gpu["errors"] or {}, gpu["pages"] or {}, gpu["most_pages"]
    count, left_in = errors.get("uncorrectable", 0), pages.get("unreservable", 0)
    bad = sum(pages.values())
    if most and bad >= most:
        yield Trouble(
            LITTLE_SPARE,
            f"{bad} bad pages of memory, and from {most} on the driver does not start the GPU "
            "again",
            "drain the host and have the GPU replaced before it is rebooted",
            Severity.WARN,
        )
    elif left_in:
        yield Trouble(
            HAD_ERRORS,
            f"{left_in} bad {'page' if left_in == 1 else 'pages'} of memory could not be taken "
            "out of use",
            Fix(_RESET, alternatives=[_REBOOT, _REPLACE]),
            Severity.WARN,
        )
    if count:
        yield Trouble(
            HAD_ERRORS,
            f"{count} uncorrected ECC {'error' if count == 1 else 'errors'} since the driver was "
            "loaded",
            Fix(
                look(shell("amd-smi metric -g BUS_ID --ecc-blocks")),
                _RESET,
                alternatives=[_REBOOT, _REPLACE],
            ),
            Severity.WARN,
        )
    elif errors.get("deferred"):
        # Bad data that nobody has used yet; the driver takes its page out of use.
        yield Trouble(
            HAD_ERRORS,
            f"{errors['deferred']} deferred ECC errors since the driver was loaded",
            Fix(
                look(shell("amd-smi metric -g BUS_ID --ecc"), "look now and then"),
                look(shell("amd-smi bad-pages -g BUS_ID")),
            ),
            Severity.INFO,
        )


def _busy(gpu: Gpu, own: Collection[int]) -> Iterator[Trouble]:
    """Other users of a GPU. A process whose number is not of this PID namespace may be ours."""
    strange = [
        one
        for one in gpu["processes"] or ()
        if one.get("here", True) and one["pid"] not in own and one["bytes"] >= _HOLDS_BYTES
    ]
    if not strange:
        return
    memory = gpu["memory"]
    held = sum(one["bytes"] for one in strange)
    full = bool(memory) and memory["total"] - held < memory["total"] / 10
    who = ", ".join(
        f"pid {one['pid']} ({one['name'] or 'name not visible here'}, "
        f"{one['bytes'] / _GIB:.1f} GiB)"
        for one in strange[:4]
    )
    who += f" and {len(strange) - 4} more" if len(strange) > 4 else ""
    known = [str(one["pid"]) for one in strange if one["name"]]
    yield Trouble(
        GPU_BUSY,
        f"{who} {'uses' if len(strange) == 1 else 'use'} it",
        end_processes(known) if known else Fix(look(shell("amd-smi process"))),
        Severity.FAIL if full else Severity.WARN,
        # One without a name has ended, or is another user's: it may be one of ours.
        Confidence.CERTAIN if known else Confidence.POSSIBLE,
    )


def _throttled(gpu: Gpu) -> Iterator[Trouble]:
    reasons = [_HOT[name] for name in gpu["throttle"] or () if name in _HOT]
    if not reasons:
        for name, now, limit in (
            ("the GPU is too hot", "temperature", "slowdown_temperature"),
            ("its memory is too hot", "memory_temperature", "memory_max_temperature"),
        ):
            if gpu[now] and gpu[limit] and gpu[now] >= gpu[limit]:
                reasons.append(f"{name} ({gpu[now]} °C, limit {gpu[limit]} °C)")
    if reasons:
        yield Trouble(GPU_THROTTLED, "; ".join(reasons), _LOOK)


def _clocks(gpu: Gpu, alike: Sequence[Gpu]) -> Iterator[Trouble]:
    """Clocks and power limited by hand; what all GPUs share counts as intended."""
    level = gpu["level"]
    held = [other for other in alike if other["level"] == level]
    if level not in (None, "auto", "high") and (level == "low" or 2 * len(held) < len(alike)):
        yield Trouble(
            CLOCKS_LIMITED,
            f"performance level {level}",
            Fix(Step(shell("# amd-smi set -g BUS_ID --perf-level AUTO"), note="as root")),
            confidence=Confidence.CERTAIN if level == "low" else Confidence.LIKELY,
        )
    now, usual = gpu["power_limit_mw"], gpu["default_power_limit_mw"]
    if now and usual and now < usual and all(other["power_limit_mw"] == now for other in alike):
        yield Trouble(
            CLOCKS_LIMITED,
            f"power limit {now / 1000:g} W, default {usual / 1000:g} W",
            Fix(
                Step(
                    shell("# amd-smi set -g BUS_ID --power-cap {}", usual // 1000),
                    undo=shell("# amd-smi set -g BUS_ID --power-cap {}", now // 1000),
                    note="as root, if this is not intended",
                )
            ),
            Severity.INFO,
        )


def _pcie(gpu: Gpu, alike: Sequence[Gpu]) -> Iterator[Trouble]:
    """A PCIe link below what it can be, where most GPUs of the model are faster: an idle GPU may
    lower its link, and not every release counts lanes in the same way.
    """
    link = gpu["pcie"] or {}
    for name, unit in (("width", "lanes"), ("speed", "MT/s")):
        now, most = link.get(name), link.get(f"max_{name}")
        faster = [other for other in alike if ((other["pcie"] or {}).get(name) or 0) > (now or 0)]
        if now and most and now < most and 2 * len(faster) > len(alike):
            yield Trouble(
                PCIE_DEGRADED,
                f"{now} of {most} {unit}; most GPUs of the host have more",
                Fix(look(shell("amd-smi metric -g BUS_ID --pcie"), "reseat the GPU or its riser")),
                confidence=Confidence.CERTAIN if name == "width" else Confidence.LIKELY,
            )


def _xgmi(gpu: Gpu, alike: Sequence[Gpu]) -> Iterator[Trouble]:
    """Links that are down where GPUs of the same model have them; on all alike it is the design."""
    links = gpu["xgmi_links"] or ()
    up = links.count("up")
    most = max(
        (other["xgmi_links"].count("up") for other in alike if other["xgmi_links"]), default=0
    )
    down = [str(number) for number, state in enumerate(links) if state == "down"]
    if down and up < most:
        yield Trouble(
            XGMI_DOWN,
            f"{up} of {most} xGMI links are up; down: {', '.join(down)}",
            Fix(
                look(shell("amd-smi xgmi --link-status")),
                _XGMI_LOG,
                alternatives=[
                    f"{_REBOOT}, and have the GPU and its board checked if it comes back"
                ],
            ),
        )
    elif gpu["xgmi_peers"] is not None:
        peers = [other["xgmi_peers"] for other in alike if other["xgmi_peers"] is not None]
        more = [count for count in peers if count > gpu["xgmi_peers"]]
        if 2 * len(more) > len(peers):
            yield Trouble(
                XGMI_DOWN,
                f"it reaches {gpu['xgmi_peers']} other GPUs over xGMI; most GPUs of the host "
                f"reach {max(more)}",
                Fix(look(shell("amd-smi topology")), _XGMI_LOG, alternatives=[_REBOOT]),
            )
    count = (gpu["xgmi_errors"] or {}).get("uncorrectable", 0)
    if count:
        yield Trouble(
            XGMI_ERRORS,
            f"{count} uncorrected {'error' if count == 1 else 'errors'} of xGMI since the driver "
            "was loaded",
            Fix(
                look(
                    shell("amd-smi metric -g BUS_ID --ecc-blocks"),
                    "again after a job; if they grow, have the GPU checked",
                )
            ),
        )
