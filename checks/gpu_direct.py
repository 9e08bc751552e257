"""Can NICs and GPUs reach each other's memory directly?

What it checks
--------------
On hosts with NVIDIA GPUs and RDMA ports: how the NICs would reach the memory of the GPUs (GPUDirect
RDMA): DMA-BUF (open kernel modules of NVIDIA, Linux 5.12 or later) or the module nvidia_peermem, by
the files that NCCL itself looks for. Also whether an IOMMU translates the addresses of GPUs and
NICs (type of their groups in /sys/kernel/iommu_groups), and, as root, whether PCIe bridges above
them have ACS on (config space in sysfs). Nothing is copied.

Why it matters
--------------
Without GPUDirect RDMA all data goes through host memory, at half the speed or less. With ACS, or an
IOMMU that translates, data from one device to another goes up to the root complex: it is slow, and
on some platforms it never arrives, so that the first collective hangs right after NCCL prints `Init
COMPLETE`.

How to fix
----------
modprobe nvidia_peermem on the host (not in the container), or the open kernel modules of NVIDIA.
IOMMU: boot with iommu=pt (intel_iommu=on iommu=pt), or turn it off in the BIOS. ACS: in the BIOS,
or as root on each bridge: setpci -s <bridge> ECAP_ACS+6.w=0000. To see whether this is the cause:
NCCL_P2P_DISABLE=1 for GPUs, NCCL_NET_GDR_LEVEL=LOC for NICs.

When it is wrong
----------------
A virtual machine may need ACS: there it is only information. It is also only information where
neither NICs nor GPUs without NVLink depend on it, or where check `gpu_work` copied from GPU to GPU
and everything arrived. The driver of the NIC may still refuse DMA-BUF. GPUs that NVLink joins do
not copy over PCIe. GeForce GPUs have no GPUDirect RDMA and are not judged. EFA uses its own method.
Without root, and for a bridge that sleeps, ACS is not seen (`acs-not-read`).
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
NCCL user guide, troubleshooting (GPU Direct, PCI access control services); NCCL
src/transport/net_ib/gdr.cc; NVIDIA, GPUDirect RDMA documentation; kernel documentation,
ABI/testing/sysfs-kernel-iommu_groups; NVIDIA/nccl issues 257, 606, 631 and 1737.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    OutcomeStatus,
    Severity,
    Skip,
    Step,
    Untested,
    Where,
    export,
    look,
    odd_ones_out,
    shell,
)
from nccl_doctor.toolkit.fabric.direct import (
    GpuDirectSeen,
    gpu_direct_road,
    read_gpu_direct,
    redirecting_bridges,
    translating,
    unread_bridges,
)
from nccl_doctor.toolkit.fabric.hca import HCA, rdma_admits, rdma_off
from nccl_doctor.toolkit.fabric.ports import rdma_ports, speaks_verbs
from nccl_doctor.toolkit.gpu.devices import count_gpus, host_gpus
from nccl_doctor.toolkit.nccl.conf import nccl_settings

_PEERMEM = Step(
    shell("modprobe nvidia_peermem"),
    undo=shell("modprobe -r nvidia_peermem"),
    note="on the host itself",
)
MISSING = Kind(
    "gpudirect-rdma-missing",
    Layer.DEVICE,
    "NICs cannot reach the memory of the GPUs directly",
    "Without GPUDirect RDMA all data goes through host memory.",
    Fix(
        _PEERMEM,
        alternatives=["install the open kernel modules of NVIDIA"],
    ),
    Severity.WARN,
)
_DRIVER = Fix(
    Step(shell("modprobe nvidia"), note="on the host itself"),
    look(shell("dmesg | grep -i -e nvidia -e NVRM"), "why the driver is not loaded"),
)
_WITH_DMABUF = Fix(
    Step(shell("unset NCCL_DMABUF_ENABLE")),
    alternatives=[Fix(_PEERMEM)],
)
_TO_SEE = (
    Fix(
        export(NCCL_P2P_DISABLE="1", NCCL_NET_GDR_LEVEL="LOC"),
        text="to see whether it matters: export NCCL_P2P_DISABLE=1 for GPUs, "
        "NCCL_NET_GDR_LEVEL=LOC for NICs",
    ),
)
IOMMU = Kind(
    "iommu-translates",
    Layer.DEVICE,
    "The IOMMU translates traffic between GPUs and NICs",
    "The traffic goes through the root complex: it is slow, and on some platforms never arrives.",
    Fix(text="boot with iommu=pt, or turn the IOMMU off in the BIOS", alternatives=_TO_SEE),
    Severity.WARN,
)
ACS = Kind(
    "acs-redirects",
    Layer.DEVICE,
    "PCIe bridges above GPUs or NICs have ACS on",
    "Traffic from one device to another goes up to the root complex: it is slow, or never arrives.",
    Fix(
        Step(shell("# setpci -s ADDRESS ECAP_ACS+6.w=0000"), note="as root, for each bridge"),
        alternatives=[Fix(text="turn ACS off in the BIOS"), *_TO_SEE],
    ),
    Severity.WARN,
)
UNREAD = Kind(
    "acs-not-read",
    Layer.DEVICE,
    "ACS of PCIe bridges could not be read",
    "With ACS, traffic from one device to another may be slow or never arrive; this run could "
    "not check that.",
    Fix(
        look(
            shell("lspci -vvv | grep -i acsctl"),
            "as root: + after ReqRedir or CmpltRedir is ACS on",
        )
    ),
    Severity.INFO,
)


class GpuDirectFacts(GpuDirectSeen):
    """Facts that `observe` returns; other checks read them."""

    road: str
    why: str
    gpus: int
    rdma: int
    verbs: int
    level: str


class GpuDirect(Check):
    """Kernel modules, IOMMU groups and PCIe bridges of each host."""

    name = "gpu_direct"
    layer = Layer.DEVICE
    kinds = (MISSING, IOMMU, ACS, UNREAD)
    reads = ("gpu_state", "gpu_work")

    def observe(self, ctx: Context) -> GpuDirectFacts:
        """Read modules, IOMMU groups and bridges.

        Returns: `road`, `why`: see `gpu_direct_road`; `rdma`: number of active ports that NCCL may
        use, and `verbs`: of those that need no plug-in; `gpus`; `level`: NCCL_NET_GDR_LEVEL; and
        what `read_gpu_direct` returns.
        """
        if ctx.backend != "nccl":
            raise Skip("the job does not use NCCL")
        gpus = host_gpus(ctx.root)
        if not (gpus["nodes"] or gpus["proc"]):
            raise Skip("no NVIDIA GPU here")
        settings = nccl_settings(ctx.env, root=ctx.root)
        hca = settings[HCA].value if HCA in settings else ""
        ctx.breadcrumb("read GPUs, NICs and bridges in /sys")
        ports = [
            port
            for port in rdma_ports(ctx.root / "sys/class/infiniband")
            if port["state"] == "ACTIVE" and not rdma_off(settings)
            if rdma_admits(hca, port["device"], int(port["port"]))
        ]
        if not ports and count_gpus(gpus) < 2:
            raise Skip("one GPU, and no active RDMA port")
        facts = read_gpu_direct(ctx.root)
        if not (facts["gpus_on_pci"] or ports):
            raise Untested(f"{count_gpus(gpus)} GPUs here, but /sys/bus/pci shows none of them")
        road, why = gpu_direct_road(facts, settings)
        level = settings["NCCL_NET_GDR_LEVEL"].value if "NCCL_NET_GDR_LEVEL" in settings else ""
        return {
            **facts,
            "road": road,
            "why": why,
            "gpus": count_gpus(gpus),
            "rdma": len(ports),
            "verbs": len([port for port in ports if speaks_verbs(port)]),
            "level": level,
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on hosts without GPUDirect RDMA; then on obstacles to direct copies."""
        seen = {rank.host.label: facts for rank, facts in cluster.facts(self.name)}
        yield from _missing(seen)
        for rank, facts in cluster.facts(self.name):
            yield from _on_the_way(cluster, rank.host, facts)


def _missing(seen: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    able = {host: facts["road"] != "none" for host, facts in seen.items() if _wants(facts)}
    odd = odd_ones_out(able)
    for host in (host for host, can in able.items() if not can):
        others = "" if odd is None else f"; {sum(able.values())} other hosts have it"
        yield Finding(
            MISSING,
            f"{seen[host]['why']}{others}",
            Where(hosts=(host,)),
            {name: seen[host][name] for name in ("modules", "peermem", "open_driver", "kernel")},
            _fix_of(seen[host]),
            confidence=Confidence.LIKELY,
        )


def _wants(facts: Mapping[str, Any]) -> bool:
    """True if GPUDirect RDMA is expected here; LOC turns it off on purpose."""
    toys = bool(facts["models"]) and all("GeForce" in model for model in facts["models"])
    return bool(facts["verbs"]) and facts["level"].upper() not in ("LOC", "0") and not toys


def _fix_of(facts: Mapping[str, Any]) -> str:
    """The fix where the kind's own is not the first thing to do; else empty."""
    if facts["open_driver"] is None:
        return _DRIVER
    if "NCCL_DMABUF_ENABLE=0" in facts["why"]:
        return _WITH_DMABUF
    return ""


def _on_the_way(cluster: Cluster, host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    gpus = _joined_by_pcie(cluster, host) and not _copies_arrive(cluster, host)
    matters = bool(facts["rdma"] or gpus) and not facts["virtual"]
    severity = None if matters else Severity.INFO
    translated = translating(facts)
    if translated:
        kinds = sorted({facts["iommu"][device] for device in translated})
        boot = facts["boot"]
        options = "unknown, /proc/cmdline cannot be read" if boot is None else " ".join(boot)
        yield Finding(
            IOMMU,
            f"IOMMU group type {', '.join(kinds)} for {len(translated)} GPUs and NICs; kernel "
            f"options: {options or 'none about the IOMMU'}",
            Where(hosts=(host.label,), devices=tuple(translated)),
            severity=severity,
            confidence=Confidence.POSSIBLE,
        )
    bridges = redirecting_bridges(facts)
    if bridges:
        values = sorted({f"{facts['acs'][bridge]:#06x}" for bridge in bridges})
        yield Finding(
            ACS,
            f"ACS control {', '.join(values)} on {len(bridges)} bridges",
            Where(hosts=(host.label,), devices=tuple(bridges)),
            severity=severity,
            confidence=Confidence.POSSIBLE,
        )
    elif matters:
        yield from _unread(host, facts)


def _unread(host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    bridges, text = unread_bridges(facts), ""
    if bridges:
        text = f"not read: ACS control of {len(bridges)} PCIe bridges above GPUs and NICs"
    if facts.get("gpus_on_pci", 1) == 0:
        text = f"not read: ACS and IOMMU of {facts['gpus']} GPUs (/sys/bus/pci shows none of them)"
    if text:
        yield Finding(UNREAD, text, Where(hosts=(host.label,)), {"bridges": bridges})


_HAS_NONE = ("NOT_SUPPORTED", "INVALID_ARGUMENT")
"""Answers of NVML about the first link of a GPU without NVLink."""


def _joined_by_pcie(cluster: Cluster, host: Host) -> bool:
    """True if a host has several GPUs without NVLink, as check `gpu_state` saw it."""
    for _, facts in cluster.facts_on("gpu_state", host):
        gpus = facts["gpus"]
        return len(gpus) > 1 and all(_has_no_nvlink(gpu) for gpu in gpus)
    return False


def _copies_arrive(cluster: Cluster, host: Host) -> bool:
    """True if ranks of a host copied from GPU to GPU (check `gpu_work`), and all data arrived."""
    ends = [item.outcome for item in cluster.evidence_on("gpu_work", host)]
    if any(end.status in (OutcomeStatus.HUNG, OutcomeStatus.DIED) for end in ends):
        return False
    peers = [peer for end in ends if (peer := end.facts.get("peer"))]
    return bool(peers) and not any(peer["error"] or peer["wrong"] for peer in peers)


def _has_no_nvlink(gpu: Mapping[str, Any]) -> bool:
    refused = {name for name, fields in (gpu.get("refused") or {}).items() if "nvlinks" in fields}
    return gpu.get("nvlinks") is not None and not any(gpu["nvlinks"]) and refused <= {*_HAS_NONE}
