"""The kernel's counts of PCIe errors at GPUs, network cards and the ports above them.

Sources: the kernel's ABI/testing/sysfs-bus-pci-devices-aer_stats and drivers/pci/pcie/aer.c: the
files exist for every device with the capability, even if errors are not counted. The kernel counts
below root ports to which its `aer` driver is bound; elsewhere the firmware handles the errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from nccl_doctor.toolkit.fabric.ports import word

Device = Mapping[str, Any]
"""One of the `devices` of `pcie_errors`."""

FATAL, NONFATAL, CORRECTABLE = "fatal", "nonfatal", "correctable"
SEVERITIES = (FATAL, NONFATAL, CORRECTABLE)
LINK_ERRORS = frozenset(
    {
        "RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout",
        "Receiver Error", "Bad TLP", "Bad DLLP", "RELAY_NUM Rollover", "Replay Timer Timeout",
    }
)  # fmt: skip
"""Correctable errors of the link itself, as newer and older kernels name them. The others (advisory
non-fatal, internal, header log overflow) do not come from cable, slot or riser.
"""
BY_SOFTWARE = frozenset({"UnsupReq", "ACSViol", "Unsupported Request", "ACS Violation"})
"""Uncorrectable errors that a driver or a scan of the bus causes on a good link."""
LINK_ERRORS_PER_MINUTE = 8
"""More than that is too many: the rate of PCIe replays that DCGM tolerates for a GPU
(DCGM_LIMIT_MAX_PCIREPLAY_RATE in its dcgm_gpu_hardware_limits.h).
"""
_STANDS_OUT = 10
_WORTH_A_WORD = 100
"""Links train when a machine starts, with some errors; these two keep that out of the report."""
_PEERS = 3
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA, _AMD = "0x10de", "0x1002"
_MOST = 256


def pcie_errors(root: Path = Path("/")) -> dict[str, Any]:
    """Error counts since the kernel found each device; the devices are not accessed.

    Returns: `devices`: PCI address → `{"kind", "model", "port", "fatal", "nonfatal",
    "correctable"}`, with `kind` for people, `model` the vendor and device numbers, `port` the
    address of the port above or the empty string, and counts by the kernel's names, without zeros.
    A device whose errors are not counted has no entry. `why_not`: why there is no entry at all, or
    the empty string.
    """
    chains = list(_chains(root))
    bound = {
        entry.name.partition(":pcie")[0]
        for entry in root.glob("sys/bus/pci_express/drivers/aer/*:pcie*")
    }
    virtual = _is_virtual(root)
    devices: dict[str, dict[str, Any]] = {}
    shown = False
    for kind, chain in chains:
        counts_here = not virtual and chain[-1].name in bound
        for at, device in enumerate(chain):
            if device.name in devices or len(devices) >= _MOST:
                continue
            counts = {severity: _counts(device / f"aer_dev_{severity}") for severity in SEVERITIES}
            if all(count is None for count in counts.values()):
                continue
            shown = True
            if counts_here or any(counts.values()):
                devices[device.name] = {
                    "kind": kind if at == 0 else "PCIe port",
                    "model": f"{word(device / 'vendor')}:{word(device / 'device')}",
                    "port": chain[at + 1].name if at + 1 < len(chain) else "",
                    **{severity: count or {} for severity, count in counts.items()},
                }
    why_not = ""
    if not chains:
        why_not = "no GPU and no network card on a PCI bus here"
    elif not shown:
        why_not = "the kernel shows no counters of PCIe errors here"
    elif not devices:
        why_not = (
            "a virtual machine: only its host counts PCIe errors"
            if virtual
            else "the firmware handles PCIe errors here, so the kernel does not count them"
        )
    return {"devices": devices, "why_not": why_not}


def _chains(root: Path) -> Iterator[tuple[str, tuple[Path, ...]]]:
    """Kind of each device, and its folder with those of the ports above it, nearest first."""
    for link in sorted(root.glob("sys/bus/pci/devices/*")):
        kind = _kind(link)
        if kind and not (link / "physfn").exists():  # virtual functions count nothing themselves
            device = link.resolve()
            above = [parent for parent in device.parents if _ADDRESS.fullmatch(parent.name)]
            yield kind, (device, *above)


def _kind(device: Path) -> str:
    number, vendor = word(device / "class"), word(device / "vendor")
    if number.startswith(("0x03", "0x12")) and vendor in (_NVIDIA, _AMD):
        return "GPU"
    if number.startswith("0x0680") and vendor == _NVIDIA:
        return "NVSwitch"
    if number.startswith("0x02") or (number and (device / "infiniband").is_dir()):
        return "network card"
    return ""


def _counts(path: Path) -> dict[str, int] | None:
    """Counts in lines such as `BadTLP 3`, whose names may hold spaces; None if unreadable.

    The total counts messages, not errors, and is left out.
    """
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    rows = (line.strip().rpartition(" ") for line in lines)
    return {
        name.strip(): int(count)
        for name, _, count in rows
        if count.isdigit() and int(count) and name and not name.startswith("TOTAL_")
    }


def _is_virtual(root: Path) -> bool:
    try:
        with (root / "proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            return " hypervisor" in file.read(1 << 14)
    except OSError:
        return False


# --- pure ---


def link_errors(device: Device) -> int:
    """Number of correctable errors of the link itself."""
    return sum(count for name, count in device[CORRECTABLE].items() if name in LINK_ERRORS)


def pcie_risen(
    before: Mapping[str, Device], after: Mapping[str, Device]
) -> dict[str, dict[str, dict[str, int]]]:
    """Address → severity → name → increase, for devices known at both times.

    A device that was reset, or found again, is left out.
    """
    grown: dict[str, dict[str, dict[str, int]]] = {}
    for address, device in after.items():
        for severity in SEVERITIES if address in before else ():
            for name, count in device[severity].items():
                rise = count - before[address][severity].get(name, 0)
                if rise > 0:
                    grown.setdefault(address, {}).setdefault(severity, {})[name] = rise
    return grown


def pcie_is_broken(rise: Mapping[str, Mapping[str, int]], seconds: float) -> bool | None:
    """True if the new errors of a device show broken hardware; None if they mean nothing."""
    uncorrected = {**rise.get(FATAL, {}), **rise.get(NONFATAL, {})}
    by_hardware = bool(rise.get(FATAL)) or any(name not in BY_SOFTWARE for name in uncorrected)
    replayed = sum(
        count for name, count in rise.get(CORRECTABLE, {}).items() if name in LINK_ERRORS
    )
    if by_hardware or replayed > LINK_ERRORS_PER_MINUTE * max(1.0, seconds / 60):
        return True
    return False if uncorrected else None


def by_link(devices: Mapping[str, Device], addresses: set[str]) -> list[list[str]]:
    """These devices in groups, those directly below one another together: both ends of a link count
    its errors.
    """
    groups: list[list[str]] = []
    for address in sorted(addresses):
        touching = [
            group
            for group in groups
            if any(devices[a]["port"] == b for one in group for a, b in _ways(one, address))
        ]
        groups = [group for group in groups if group not in touching]
        groups.append(sorted({address, *(one for group in touching for one in group)}))
    return sorted(groups)


def _ways(one: str, other: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return (one, other), (other, one)


def counts_in_words(counts: Mapping[str, Mapping[str, int]], sign: str = "") -> str:
    """Counts as text: `fatal SDES 1; correctable BadTLP 12, RxErr 3`."""
    return "; ".join(
        f"{severity} " + ", ".join(f"{name} {sign}{n}" for name, n in sorted(names.items()))
        for severity in SEVERITIES
        if (names := counts.get(severity))
    )


def pcie_outliers(hosts: Mapping[int, Mapping[str, Device]]) -> dict[int, dict[str, str]]:
    """Devices with errors that others of their model do not have: key of the host → address → text.

    Fatal errors count if most devices of the model, on all hosts, have none, or if there are too
    few of them to compare. Link errors count only in comparison with others: hosts have run for
    different times.
    """
    like: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for key, devices in hosts.items():
        for address, device in devices.items():
            like.setdefault((device["kind"], device["model"]), []).append((key, address))
    outliers: dict[int, dict[str, str]] = {}
    for places in like.values():
        fatal = [place for place in places if hosts[place[0]][place[1]][FATAL]]
        if len(places) > _PEERS and 2 * len(fatal) > len(places):
            fatal = []  # a bus reset at the start looks like that
        for place in places:
            device = hosts[place[0]][place[1]]
            links = link_errors(device)
            others = [link_errors(hosts[k][a]) for k, a in places if (k, a) != place]
            stands_out = (
                len(others) >= _PEERS
                and links >= _WORTH_A_WORD
                and links > _STANDS_OUT * median(others)
            )
            words = []
            if place in fatal:
                words.append(counts_in_words({FATAL: device[FATAL]}))
            if stands_out:
                words.append(
                    f"{links} correctable errors of its link; the median of other devices of its "
                    f"model is {median(others):g}"
                )
            if words:
                outliers.setdefault(place[0], {})[place[1]] = "; ".join(words)
    return outliers
