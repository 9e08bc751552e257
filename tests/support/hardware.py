"""Made-up trees of sysfs: PCIe devices that count errors, and memory controllers that do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.support import fabrics

ROOT_PORT, GPU_PORT, NIC_PORT = "0000:00:01.0", "0000:02:00.0", "0000:02:01.0"
GPU, NIC = "0000:03:00.0", "0000:04:00.0"
_CORRECTABLE = (
    "RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr", "CorrIntErr", "HeaderOF",
)  # fmt: skip
_UNCORRECTABLE = ("Undefined", "DLP", "SDES", "TLP", "CmpltTO", "UnsupReq", "ACSViol")
_TOTALS = {"correctable": "COR", "nonfatal": "NONFATAL", "fatal": "FATAL"}
_BELOW = {
    ROOT_PORT: ROOT_PORT,
    GPU_PORT: f"{ROOT_PORT}/{GPU_PORT}",
    NIC_PORT: f"{ROOT_PORT}/{NIC_PORT}",
    GPU: f"{ROOT_PORT}/{GPU_PORT}/{GPU}",
    NIC: f"{ROOT_PORT}/{NIC_PORT}/{NIC}",
}


def count(root: Path, address: str, severity: str, **errors: int) -> None:
    """Let a device have counted so many errors; those that are not named are zero."""
    names = _CORRECTABLE if severity == "correctable" else _UNCORRECTABLE
    rows = dict.fromkeys(names, 0) | errors
    total = f"TOTAL_ERR_{_TOTALS[severity]} {sum(errors.values())}"
    text = "".join(f"{name} {number}\n" for name, number in rows.items())
    fabrics.write(root, f"{_folder(address)}/aer_dev_{severity}", text + total)


def pcie(root: Path, *, native: bool = True, virtual: bool = False, counts: bool = True) -> Path:
    """A GPU and a network card, each below a port of its own, both below one root port.

    `native`: the kernel, not the firmware, is told of errors. `counts`: the files are there.
    """
    kinds = {
        ROOT_PORT: ("0x060400", "0x8086", "0x352a"),
        GPU_PORT: ("0x060400", "0x1000", "0xc030"),
        NIC_PORT: ("0x060400", "0x1000", "0xc030"),
        GPU: ("0x030200", "0x10de", "0x2330"),
        NIC: ("0x020700", "0x15b3", "0x1021"),
    }
    for address, (number, vendor, device) in kinds.items():
        folder = _folder(address)
        for name, text in {"class": number, "vendor": vendor, "device": device}.items():
            fabrics.write(root, f"{folder}/{name}", text)
        fabrics.link(root, f"sys/bus/pci/devices/{address}", folder)
        for severity in _TOTALS if counts else ():
            count(root, address, severity)
    if native:
        service = f"{_folder(ROOT_PORT)}/{ROOT_PORT}:pcie002"
        fabrics.link(root, f"sys/bus/pci_express/drivers/aer/{ROOT_PORT}:pcie002", service)
    flags = "flags : fpu sse2" + (" hypervisor" if virtual else "")
    fabrics.write(root, "proc/cpuinfo", flags)
    return root


def memory(
    root: Path,
    modules: Mapping[str, tuple[int, int]],
    *,
    controller: str = "mc0",
    more: tuple[int, int] = (0, 0),
    days: int = 12,
    labels: bool = True,
) -> Path:
    """One controller: module (`dimm0`) → errors that were not, and that were corrected.

    `more`: those of which the controller does not know the module.
    """
    at = f"sys/devices/system/edac/mc/{controller}"
    for name, number in enumerate(("ue_count", "ce_count")):
        total = sum(counts[name] for counts in modules.values()) + more[name]
        fabrics.write(root, f"{at}/{number}", str(total))
    fabrics.write(root, f"{at}/mc_name", "Intel_10nm Socket#0 IMC#0")
    fabrics.write(root, f"{at}/seconds_since_reset", str(days * 86400))
    fabrics.write(root, f"{at}/power/control", "auto")
    for module, (uncorrected, corrected) in modules.items():
        fabrics.write(root, f"{at}/{module}/dimm_ue_count", str(uncorrected))
        fabrics.write(root, f"{at}/{module}/dimm_ce_count", str(corrected))
        label = f"CPU_SrcID#0_MC#{controller[2:]}_DIMM#{module[4:]}" if labels else ""
        fabrics.write(root, f"{at}/{module}/dimm_label", label)
    return root


def _folder(address: str) -> str:
    return f"sys/devices/pci0000:00/{_BELOW[address]}"
