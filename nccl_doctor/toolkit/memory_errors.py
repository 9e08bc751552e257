"""The kernel's counts of memory errors, by memory controller and module.

Source: the kernel's ABI/testing/sysfs-devices-edac and admin-guide/RAS. Without a driver for the
memory controller there is no count.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.toolkit.host import text_of

Controllers = Mapping[str, Mapping[str, Any]]
"""The result of `memory_errors`."""

CORRECTED_TOO_MANY = 10
"""Corrected errors of one module: mcelog takes that many in a day as a sign of a failing module
(`ce-error-threshold` in the section `dimm` of its configuration, 10 / 24h).
"""


def memory_errors(root: Path = Path("/")) -> dict[str, dict[str, Any]]:
    """Memory controller (`mc0`) → its counts since its driver was loaded, or they were reset.

    Returns: `{"name", "since_s", "uncorrected", "corrected", "modules"}`; `since_s` is seconds, or
    None; `modules` has those with errors, by their folder (`dimm0`, or `rank0` if the controller
    does not know modules): `{"label", "uncorrected", "corrected"}`.
    """
    found: dict[str, dict[str, Any]] = {}
    for folder in sorted(root.glob("sys/devices/system/edac/mc/mc[0-9]*")):
        # The sums first: a new error must not look like one without a module.
        uncorrected, corrected = _number(folder / "ue_count"), _number(folder / "ce_count")
        if uncorrected is None and corrected is None:
            continue
        modules: dict[str, dict[str, Any]] = {}
        for module in sorted((*folder.glob("dimm[0-9]*"), *folder.glob("rank[0-9]*"))):
            counts = {
                "uncorrected": _number(module / "dimm_ue_count") or 0,
                "corrected": _number(module / "dimm_ce_count") or 0,
            }
            if any(counts.values()):
                modules[module.name] = {"label": text_of(module / "dimm_label"), **counts}
        found[folder.name] = {
            "name": text_of(folder / "mc_name"),
            "since_s": _number(folder / "seconds_since_reset"),
            "uncorrected": uncorrected or 0,
            "corrected": corrected or 0,
            "modules": modules,
        }
    return found


def _number(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.isdigit() else None


# --- pure ---


def by_module(controllers: Controllers) -> dict[str, dict[str, Any]]:
    """Place (`mc0/dimm1`) → `{"label", "uncorrected", "corrected"}`, for modules with errors.

    Errors that a controller counted for none of its modules are its own: `mc0`.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, controller in controllers.items():
        modules = controller["modules"]
        for module, counts in modules.items():
            found[f"{name}/{module}"] = dict(counts)
        rest = {
            kind: max(0, controller[kind] - sum(module[kind] for module in modules.values()))
            for kind in ("uncorrected", "corrected")
        }
        if any(rest.values()):
            found[name] = {"label": "", **rest}
    return found


def memory_risen(before: Controllers, after: Controllers) -> dict[str, dict[str, Any]]:
    """The same for errors counted in between, without controllers that were reset."""
    known = {
        name: controller
        for name, controller in after.items()
        if name in before
        and all(controller[kind] >= before[name][kind] for kind in ("uncorrected", "corrected"))
    }
    earlier = by_module(before)
    grown: dict[str, dict[str, Any]] = {}
    for place, counts in by_module(known).items():
        was = earlier.get(place, {})
        rise = {
            kind: max(0, counts[kind] - was.get(kind, 0)) for kind in ("uncorrected", "corrected")
        }
        if any(rise.values()):
            grown[place] = {"label": counts["label"], **rise}
    return grown


def module_names(places: Mapping[str, Mapping[str, Any]], kind: str) -> tuple[str, ...]:
    """Names of the modules with errors of a kind: the label, which the log uses too, or else the
    place.
    """
    return tuple(
        sorted({counts["label"] or place for place, counts in places.items() if counts[kind]})
    )
