"""CPU frequency governors, and whether they keep CPUs at their lowest clock.

The driver of CPU frequencies decides what the governor `powersave` means. The generic one always
requests the lowest clock allowed. intel_pstate and amd_pstate in active mode have two governors of
their own with the same names: there, `powersave` follows the load. Source: kernel documentation,
admin-guide/pm/cpufreq, intel_pstate and amd-pstate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.api import number_range

_GENERIC = (
    "acpi-cpufreq", "cppc-cpufreq", "pcc-cpufreq", "intel-cpufreq", "amd-pstate",
)  # fmt: skip
"""Drivers with which `powersave` is the generic one; the last two in passive mode. Other drivers
are not judged."""
_NEARLY = 0.9


def read_governors(cpus: Iterable[int], root: Path = Path("/")) -> dict[str, Any] | None:
    """The frequency governors of these CPUs.

    Returns: None if the kernel sets no clocks, as in most virtual machines. `driver`; `governors`:
    name → CPUs as text (`0–63`); for the first CPU with `powersave` `lowest_khz`, the lowest clock
    allowed, and `highest_khz`, the highest it has; None if they cannot be read.
    """
    driver, lowest, highest = "", None, None
    by_name: dict[str, list[int]] = defaultdict(list)
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        name = _text(folder / "scaling_governor")
        if not name:
            continue
        if name == "powersave" and name not in by_name:
            lowest, highest = _khz(folder / "scaling_min_freq"), _khz(folder / "cpuinfo_max_freq")
        driver = driver or _text(folder / "scaling_driver")  # the kernel has one at a time
        by_name[name].append(cpu)
    if not by_name:
        return None
    return {
        "driver": driver,
        "governors": {name: number_range(found) for name, found in sorted(by_name.items())},
        "lowest_khz": lowest,
        "highest_khz": highest,
    }


def holds_low(clock: Mapping[str, Any]) -> bool:
    """True if `powersave`, by these facts, keeps its CPUs well below their highest clock."""
    if "powersave" not in clock["governors"]:
        return False
    if clock["driver"].replace("_", "-") not in _GENERIC:
        return False
    lowest, highest = clock["lowest_khz"], clock["highest_khz"]
    return not (lowest and highest) or bool(lowest < _NEARLY * highest)


def _khz(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return ""
