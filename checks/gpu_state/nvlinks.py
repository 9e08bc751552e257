"""Troubles of the NVLinks of one GPU, and of its registration in their fabric. Pure.

Source: NVML API reference, "Fabric definitions" and "NvLink Methods".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from nccl_doctor.api import (
    Confidence,
    Fix,
    Severity,
    Step,
    look,
    shell,
)
from nccl_doctor.toolkit.gpu.kinds import NVLINK_DOWN, NVLINK_ERRORS
from nccl_doctor.toolkit.gpu.lost import manager_is_down
from nccl_doctor.toolkit.shared_kinds import FABRIC_MANAGER_DOWN

from .gpu_kinds import C2C_DOWN
from .peers import Peers
from .trouble import Gpu, Trouble

NOT_AS_IT_SHOULD = FABRIC_MANAGER_DOWN.variant(
    title="The NVLink fabric is not set up as it should be for a GPU",
    why="The GPU is registered and CUDA starts, but NVLinks or hosts may be missing in its part of "
    "the fabric.",
)
GIVES_LESS = NVLINK_DOWN.variant(
    title="The NVLink fabric gives a GPU less than it should",
    why="Collectives go at the speed of this GPU, and all ranks wait for it.",
)
_TRUE, _FALSE = 1, 2
"""Values of a two-bit field of NVML_GPU_FABRIC_HEALTH_MASK_*; 0 is not supported."""
_ROUTE_RECOVERY, _ROUTE_UNHEALTHY, _TIMEOUT_RECOVERY = 2, 4, 6
"""Bit positions of the fields."""
_CONFIGURATION = 8
_PARTITION_ASSIGNED, _CONTROLLER = 12, 14
_DISCONNECTED = 2
"""Value of the field GFM_STATE; 1 is connected."""
_NO_PARTITION = 4
_WELL = (0, 1)  # not supported, none
_INCORRECT = {
    2: "its SysGUID is not the expected one",
    3: "its chassis serial number is not the expected one",
    4: "the GPU is in no partition",
    5: "too few NVLinks",
    6: "the firmware of the GPU does not fit",
    7: "its location is not valid",
    8: "the state of the GPU is not valid",
}
"""NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_* in words."""
_WAIT = Fix(
    look(shell("nvidia-smi -q | grep -i -A 6 fabric"), "wait until it is over"),
    alternatives=["if it does not end: reset the GPU"],
)
_CONTROL = (
    "look at the fabric manager of the NVSwitches (NMX-C, on a switch tray of the rack) and the "
    "partitions that it has made"
)
_IN_RACK = Fix(
    Step(
        shell("systemctl start nvidia-fabricmanager"),
        undo=shell("systemctl stop nvidia-fabricmanager"),
        note="on a host with NVSwitches of its own",
    ),
    alternatives=[f"in a rack with NVLink between hosts: {_CONTROL}"],
)
_MANY, _TIMES = 1000, 10
"""Least number of errors, and least ratio to any other GPU of the host, for a trouble."""
_COUNTED = {
    "crc_flit": "CRC errors",
    "replay": "replays",
    "effective": "errors that were not corrected",
}


def is_registered(fabric: Mapping[str, Any] | None) -> bool:
    """True if the GPU has its place in the NVLink fabric."""
    return fabric is not None and fabric["state"] == "COMPLETED" and not fabric["status"]


def is_cut_off(fabric: Mapping[str, Any] | None) -> bool:
    """True if the fabric reports, now, less bandwidth or unhealthy routes for a registered GPU."""
    if not fabric or not is_registered(fabric):
        return False
    mask = fabric.get("health_mask") or 0
    return bool(fabric["degraded"]) or mask >> _ROUTE_UNHEALTHY & 3 == _TRUE


def fabric_troubles(gpu: Gpu, manager: Mapping[str, Any] | None = None) -> Iterator[Trouble]:
    """Troubles of the registration with the NVLink fabric, and of the health that it reports.

    That a GPU is not registered is certainly a fault of this host only where the fabric `manager`
    of its own is down; and a registration that failed, where it has one. Otherwise it may be under
    way, the fabric may be that of other hosts, or this is a virtual machine without NVLinks.
    """
    seen = gpu["fabric"]
    if not seen or seen["state"] == "NOT_SUPPORTED":
        return
    mask = seen.get("health_mask") or 0
    if seen["state"] != "COMPLETED":
        words, incorrect = seen["state"].lower().replace("_", " "), _incorrect(mask)
        why = f"; {incorrect}" if incorrect else ""
        sure = manager_is_down(manager) and seen["state"] != "IN_PROGRESS"
        yield Trouble(
            FABRIC_MANAGER_DOWN,
            f"registration with the NVLink fabric: {words}{why}",
            _IN_RACK if gpu.get("chassis") and not (manager and manager["switches"]) else "",
            confidence=Confidence.CERTAIN if sure else Confidence.LIKELY,
        )
    elif seen["status"]:
        text = f"registration with the NVLink fabric failed (status {seen['status']})"
        sure = bool(manager and manager["switches"] and manager["running"] is not None)
        yield Trouble(
            FABRIC_MANAGER_DOWN,
            text,
            confidence=Confidence.CERTAIN if sure else Confidence.LIKELY,
        )
    else:
        yield from _health(mask, bool(seen["degraded"]))


@lru_cache
def _health(mask: int, degraded: bool) -> tuple[Trouble, ...]:
    """Troubles of a registered GPU: decoded once, as nearly all GPUs have the same mask."""
    return tuple(_decoded(mask, degraded=degraded))


def _decoded(mask: int, *, degraded: bool) -> Iterator[Trouble]:
    incorrect = _incorrect(mask)
    if incorrect:
        text = f"the NVLink fabric is not set up for this GPU: {incorrect}"
        yield Trouble(NOT_AS_IT_SHOULD, text, severity=Severity.WARN)
    if mask >> _PARTITION_ASSIGNED & 3 == _FALSE and mask >> _CONFIGURATION & 0xF != _NO_PARTITION:
        text = "the NVLink fabric has assigned this GPU to no partition"
        yield Trouble(NOT_AS_IT_SHOULD, text, _CONTROL, Severity.WARN, Confidence.LIKELY)
    if mask >> _CONTROLLER & 3 == _DISCONNECTED:
        text = "the NVLink fabric has lost its controller (global fabric manager)"
        yield Trouble(NOT_AS_IT_SHOULD, text, _CONTROL, Severity.WARN, Confidence.LIKELY)
    if degraded:
        yield Trouble(GIVES_LESS, "the NVLink fabric gives this GPU less bandwidth")
    if mask >> _ROUTE_UNHEALTHY & 3 == _TRUE:
        yield Trouble(GIVES_LESS, "the NVLink fabric reports unhealthy routes for this GPU")
    for shift, words in (
        (_ROUTE_RECOVERY, "recovers routes of this GPU"),
        (_TIMEOUT_RECOVERY, "recovers from an access that timed out on this GPU"),
    ):
        if mask >> shift & 3 == _TRUE:
            yield Trouble(GIVES_LESS, f"the NVLink fabric {words} right now", _WAIT)


def _incorrect(mask: int) -> str:
    number = mask >> _CONFIGURATION & 0xF
    return "" if number in _WELL else _INCORRECT.get(number, f"incorrect configuration {number}")


def link_troubles(gpu: Gpu, peers: Peers) -> Iterator[Trouble]:
    """Troubles of links that are down, and of links with errors.

    Args:
        gpu: its facts.
        peers: GPUs of its host of the same model, including itself.
    """
    states = gpu["nvlinks"]
    up, usual = sum(states), peers.nvlinks
    fabric = (gpu["fabric"] or {}).get("state")
    if up < usual:
        down = len(states) - up
        of_switch = fabric not in (None, "NOT_SUPPORTED")
        yield Trouble(
            NVLINK_DOWN,
            f"{up} NVLinks are up, {usual} on another GPU of the host"
            + (f" ({down} are down)" if down else ""),
            # Bridges join some GPUs of a host and leave others without any.
            confidence=Confidence.CERTAIN if up or of_switch else Confidence.POSSIBLE,
        )
    elif 0 < up < len(states) and fabric == "COMPLETED" and not _is_of_model(gpu, peers):
        # All links lead to switches. A guest with one GPU may have none.
        text = f"{up} of {len(states)} NVLinks are up"
        yield Trouble(NVLINK_DOWN, text, confidence=Confidence.LIKELY)
    yield from _errors(gpu, peers)


def c2c_troubles(gpu: Gpu, peers: Peers) -> Iterator[Trouble]:
    """Links to the CPU that are down, where others of this GPU or of one like it are up.

    Args: as of `link_troubles`.
    """
    states = gpu.get("c2c") or ()
    up, usual = sum(states), peers.c2c
    if up < usual or (0 < up < len(states) and not _same_c2c(gpu, peers)):
        text = f"{up} of {len(states)} C2C links to the CPU are up"
        text += f", {usual} on another GPU of the host" if up < usual else ""
        yield Trouble(C2C_DOWN, text, confidence=Confidence.LIKELY)


def _same_c2c(gpu: Gpu, peers: Peers) -> bool:
    """True if all GPUs of a model have the same links: some models use fewer."""
    gpus = peers.gpus
    return len(gpus) > 1 and all(other.get("c2c") == gpu.get("c2c") for other in gpus)


def _is_of_model(gpu: Gpu, peers: Peers) -> bool:
    """True if all GPUs of a model have the same links: some models use fewer."""
    gpus = peers.gpus
    return len(gpus) > 1 and all(other["nvlinks"] == gpu["nvlinks"] for other in gpus)


def _errors(gpu: Gpu, peers: Peers) -> Iterator[Trouble]:
    mine = gpu["nvlink_errors"] or {}
    if mine.get("recovery"):
        yield Trouble(NVLINK_ERRORS, f"its NVLinks recovered {mine['recovery']} times")
        return
    if mine.get("recovery_failed"):
        # NVLink 5: the link was down then, and may have come back since.
        text = f"its NVLinks went down {mine['recovery_failed']} times, as a recovery failed"
        yield Trouble(NVLINK_ERRORS, text, confidence=Confidence.LIKELY)
        return
    many = [name for name in _COUNTED if mine.get(name, 0) >= _MANY]
    if not many:
        return
    others = [other["nvlink_errors"] for other in peers.gpus if other is not gpu]
    others = [counts for counts in others if counts]
    if len(others) < 2:
        return  # links correct errors by themselves: only very unusual counts matter
    for name in many:
        most = max(counts.get(name, 0) for counts in others)
        if mine[name] >= _TIMES * most:
            words = _COUNTED[name]
            text = f"its NVLinks counted {mine[name]} {words}, at most {most} on another GPU of "
            yield Trouble(NVLINK_ERRORS, f"{text}the host", "", Severity.INFO, Confidence.LIKELY)
