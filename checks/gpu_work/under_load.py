"""Clock, power and temperature of a GPU while it works, and what holds it back.

Reading calls the driver, and belongs in a probe child; the other functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nccl_doctor.toolkit.gpu.nvml import Crumb, Nvml, Refused, Way, start

_SM = 1  # NVML_CLOCK_SM
_FIELDS: Mapping[str, tuple[Way, ...]] = {
    # First the values that change soonest when the GPU becomes idle.
    "throttle": (
        ("nvmlDeviceGetCurrentClocksEventReasons", ()),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", ()),
    ),
    "sm_clock_mhz": (("nvmlDeviceGetClockInfo", (_SM,)),),
    "power_mw": (("nvmlDeviceGetPowerUsage", ()),),
    "temperature": (("nvmlDeviceGetTemperature", (0,)),),
    "pcie_generation": (("nvmlDeviceGetCurrPcieLinkGeneration", ()),),
    "pcie_width": (("nvmlDeviceGetCurrPcieLinkWidth", ()),),
    "max_sm_clock_mhz": (("nvmlDeviceGetMaxClockInfo", (_SM,)),),
    "power_limit_mw": (("nvmlDeviceGetPowerManagementLimit", ()),),
}
_HELD_BACK = {
    0x40: "thermal slowdown by the hardware",
    0x20: "thermal slowdown by the driver",
    0x80: "power brake",
    0x08: "hardware slowdown",
    0x04: "power limit",
    0x02: "clocks set by hand",
    0x10: "clocks of a sync boost group",
}
"""Bits of nvmlClocksEventReason*; when the hardware is too hot or short of power, the fourth bit is
set as well and means the same.
"""


class LoadReader:
    """Reader of one GPU, found by its UUID; without NVML it returns no values."""

    def __init__(self, uuid: str | None, crumb: Crumb) -> None:
        """Load the library and find the GPU, so that reading takes a few milliseconds."""
        self._library: Nvml | None = None
        self._handle: Any = None
        with suppress(ImportError, Refused):
            if uuid:
                library = start(crumb)
                self._handle = library.call("nvmlDeviceGetHandleByUUID", uuid)
                self._library = library

    def read(self) -> dict[str, int]:
        """Values of the GPU now, without those that the driver refuses.

        Returns: some of `sm_clock_mhz`, `max_sm_clock_mhz`, `power_mw` and `power_limit_mw`
            (milliwatt), `temperature` (degrees Celsius), `throttle` (bits), `pcie_generation` and
            `pcie_width`.
        """
        found: dict[str, int] = {}
        if self._library is None:
            return found
        for field, ways in _FIELDS.items():
            for function, arguments in ways:
                with suppress(Refused, TypeError, ValueError):
                    found[field] = int(self._library.call(function, self._handle, *arguments))
                    break
        return found


def held_back(load: Mapping[str, Any]) -> list[str]:
    """Reasons of the driver for lower clocks."""
    bits = load.get("throttle") or 0
    if bits & 0xC0:
        bits &= ~0x08
    return [words for bit, words in _HELD_BACK.items() if bits & bit]


def in_words(load: Mapping[str, Any]) -> str:
    """The values in words: `thermal slowdown by the driver, SM clock 1200 of 1980 MHz, 84 °C`."""
    said = held_back(load)
    for now, most, scale, words in (
        ("sm_clock_mhz", "max_sm_clock_mhz", 1, "SM clock {} MHz"),
        ("power_mw", "power_limit_mw", 1000, "{} W"),
    ):
        if load.get(now):
            number = f"{load[now] / scale:.0f}"
            number += f" of {load[most] / scale:.0f}" if load.get(most) else ""
            said.append(words.format(number))
    if load.get("temperature") is not None:
        said.append(f"{load['temperature']} °C")
    return ", ".join(said)
