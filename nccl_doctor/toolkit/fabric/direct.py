"""Obstacles between GPUs and NICs: kernel modules, IOMMU, and PCIe bridges with ACS.

Sources: `ibGdrSupportInitOnce` in NCCL's src/transport/net_ib/gdr.cc; NCCL user guide,
troubleshooting (PCI access control services); ABI/testing/sysfs-kernel-iommu_groups; PCI Express
base specification, extended capability 000Dh.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.model.cluster import Cluster, Host
from nccl_doctor.toolkit.fabric.ports import word
from nccl_doctor.toolkit.nccl.conf import Setting

_PEERMEM = (
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
    "sys/module/nvidia_peermem/version",
)
_MODULES = ("nvidia_peermem", "nv_peer_mem", "ib_umad", "ib_uverbs", "mlx5_ib", "efa", "gdrdrv")
_DMABUF_SINCE = (5, 12)
"""Kernel that has `ibv_reg_dmabuf_mr`."""
_NVIDIA, _GPU_CLASS, _BRIDGE_CLASS = "0x10de", "0x03", "0x0604"
_EXTENDED, _ACS = 0x100, 0x0D
_NO_ANSWER = 0xFFFFFFFF
ACS_REDIRECTS = 0x0C
"""ACS Control: P2P Request Redirect and P2P Completion Redirect."""
_MOST = 64


class GpuDirectSeen(TypedDict):
    """Facts that `read_gpu_direct` returns."""

    modules: list[str]
    peermem: bool
    open_driver: bool | None
    kernel: str
    virtual: bool
    boot: list[str] | None
    iommu: dict[str, str]
    models: list[str]
    gpus_on_pci: int
    acs: dict[str, int | None]


def read_gpu_direct(root: Path = Path("/")) -> GpuDirectSeen:
    """Read modules, IOMMU groups, GPUs and bridges; ACS needs root, all else does not.

    Returns: `modules` (of a few names, those that are loaded), `peermem`, `open_driver` (NVIDIA's
    open kernel modules, None without any), `kernel` (release), `virtual` (under a hypervisor),
    `boot` (options about the IOMMU, None where the command line is masked), `iommu` (PCI address of
    a GPU or NIC → type of its IOMMU group: `DMA`, `DMA-FQ`, `identity`; no entry where there is no
    IOMMU), `models` (of NVIDIA's GPUs), `gpus_on_pci` (those that sysfs shows: 0 where it is
    masked, and then nothing is known of what is above them), `acs` (bridge above them → ACS
    Control; None where the configuration space cannot be read, which needs root).
    """
    modules = {line.split(" ", 1)[0] for line in _text(root / "proc/modules").splitlines()}
    gpus = list(_gpus(root))
    nics = [link.resolve() for link in sorted(root.glob("sys/class/infiniband/*/device"))[:_MOST]]
    version = _text(root / "proc/driver/nvidia/version")
    boot = _text(root / "proc/cmdline").split()
    return {
        "modules": [m for m in _MODULES if m in modules or (root / "sys/module" / m).exists()],
        "peermem": any((root / path).exists() for path in _PEERMEM),
        "open_driver": "Open Kernel Module" in version if version else None,
        "kernel": word(root / "proc/sys/kernel/osrelease"),
        "virtual": " hypervisor" in _text(root / "proc/cpuinfo", 1 << 14),
        "boot": [each for each in boot if "iommu" in each.partition("=")[0]] if boot else None,
        "iommu": {
            device.name: kind
            for device in (*gpus, *nics)
            if (kind := word(device / "iommu_group/type"))
        },
        "models": sorted(set(_models(root))),
        "gpus_on_pci": len(gpus),
        "acs": dict(_acs((*gpus, *nics))),
    }


def gpu_direct_road(facts: Mapping[str, Any], settings: Mapping[str, Setting]) -> tuple[str, str]:
    """Way of NICs to the memory of NVIDIA GPUs (`DMA-BUF`, `nvidia_peermem` or `none`), and why.

    Args:
        facts: from `read_gpu_direct`.
        settings: from `nccl_settings`.
    """
    enabled = settings.get("NCCL_DMABUF_ENABLE", Setting("1", "")).value != "0"
    if enabled and facts["open_driver"] and _release(facts["kernel"]) >= _DMABUF_SINCE:
        return "DMA-BUF", f"open kernel modules of NVIDIA, kernel {facts['kernel']}"
    if facts["peermem"]:
        return "nvidia_peermem", "the module is loaded"
    if facts["open_driver"] is None:
        return "none", "no NVIDIA driver"
    driver = "open" if facts["open_driver"] else "proprietary"
    off = "" if enabled else ", NCCL_DMABUF_ENABLE=0"
    return "none", f"no nvidia_peermem, {driver} driver, kernel {facts['kernel']}{off}"


def translating(facts: Mapping[str, Any]) -> list[str]:
    """PCI addresses of GPUs and NICs whose addresses the IOMMU translates."""
    return sorted(device for device, kind in facts["iommu"].items() if kind.startswith("DMA"))


def redirecting_bridges(facts: Mapping[str, Any]) -> list[str]:
    """Bridges above GPUs and NICs that send traffic between their ports up to the CPU."""
    return sorted(
        bridge
        for bridge, control in facts["acs"].items()
        if control is not None and control & ACS_REDIRECTS
    )


def unread_bridges(facts: Mapping[str, Any]) -> list[str]:
    """Bridges above GPUs and NICs whose ACS setting could not be read."""
    return sorted(bridge for bridge, control in facts["acs"].items() if control is None)


def acs_control(config: bytes) -> int | None:
    """The ACS Control register in a configuration space.

    Returns: 0 where the device has no such capability; None where less was read than it needs, or
    where the device did not answer: then all bits are ones.
    """
    if len(config) <= _EXTENDED:
        return None
    at = _EXTENDED
    for _ in range(len(config) // 8):
        header = int.from_bytes(config[at : at + 4], "little")
        if header == _NO_ANSWER:
            return None
        if header & 0xFFFF == _ACS:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = header >> 20
        if at < _EXTENDED or at + 8 > len(config):
            break
    return 0


def _gpus(root: Path) -> Iterator[Path]:
    devices = sorted(root.glob("sys/bus/pci/devices/*"))
    for device in devices:
        if word(device / "vendor") == _NVIDIA and word(device / "class").startswith(_GPU_CLASS):
            yield device.resolve()


def _models(root: Path) -> Iterator[str]:
    for path in root.glob("proc/driver/nvidia/gpus/*/information"):
        found = re.search(r"^Model:\s*(.+?)\s*$", _text(path), re.MULTILINE)
        if found:
            yield found.group(1)


def _acs(devices: Iterable[Path]) -> Iterator[tuple[str, int | None]]:
    """Bridges on the way from the root port to each device; their folders enclose the device's."""
    seen: set[Path] = set()
    for device in devices:
        for parent in device.parents:
            if parent in seen or not word(parent / "class").startswith(_BRIDGE_CLASS):
                continue
            seen.add(parent)
            if len(seen) <= _MOST:
                yield parent.name, acs_control(_bytes(parent / "config"))


def _text(path: Path, most: int = 1 << 16) -> str:
    return _bytes(path, most).decode("utf-8", "replace")


def _bytes(path: Path, most: int = 4096) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""


def _release(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else ()


CHECK = "gpu_direct"
"""The check whose facts `blockers` reads."""


def blockers(cluster: Cluster, host: Host) -> tuple[str, ...]:
    """Clauses on what check `gpu_direct` saw between the GPUs of a host, or could not read."""
    for _, facts in cluster.facts_on(CHECK, host):
        acs, iommu = len(redirecting_bridges(facts)), len(translating(facts))
        clauses = [f"ACS is on for {acs} PCIe bridges"] if acs else []
        clauses += [f"the IOMMU translates for {iommu} GPUs and NICs"] if iommu else []
        unread = 0 if acs else len(unread_bridges(facts))
        clauses += [f"ACS of {unread} PCIe bridges was not read: it needs root"] * bool(unread)
        return tuple(clauses)
    return ()
