"""HGX B200: eight GPUs whose NVSwitches have no device files of their own."""

from __future__ import annotations

from typing import Any

from tests.machines.gallery import dgx_h100
from tests.machines.host import (
    GIB,
    Gpu,
    Host,
    add_gpu,
    add_nic,
    by_nvml,
    interface,
    kernel,
    running,
    uuid_of,
)
from tests.machines.program import Fault, Machine, Severity

MODEL = "NVIDIA B200"
NOT_THERE = "!NOT_SUPPORTED"


def blackwell(host: Host, *, milliwatts: int, mhz: int, **more: Any) -> None:
    """What NVML says of GPUs of this generation: NVLink 5 counts errors by field values, and clocks
    for applications are no more."""
    kinds = ("Applications", "DefaultApplications")
    by_nvml(
        host,
        nvmlDeviceGetPowerManagementLimit=milliwatts,
        nvmlDeviceGetPowerManagementDefaultLimit=milliwatts,
        nvmlDeviceGetMaxClockInfo__1=mhz,
        nvmlDeviceGetMaxClockInfo__2=3996,
        nvmlDeviceGetClockInfo__1=mhz,
        **{f"nvmlDeviceGet{kind}Clock__{clock}": NOT_THERE for kind in kinds for clock in (1, 2)},
        **more,
    )
    for gpu in host.nvml.values():
        gpu |= dict.fromkeys([call for call in gpu if "NvLinkErrorCounter" in call], NOT_THERE)


def build(host: Host) -> None:
    kernel(host, modules=("nvidia_uvm", "nvidia_peermem", "mlx5_ib", "ib_uverbs", "ib_umad"))
    for index, (slot, _, nic_slot, bus, numa) in enumerate(dgx_h100.PAIRS):
        way = (f"pci0000:{bus}", f"0000:{bus}:01.0", f"0000:{bus}:02.0")
        at = {"below": way, "numa": numa, "cpus": dgx_h100.CPUS[numa]}
        add_gpu(host, Gpu(slot, MODEL, uuid_of(host, index), (10, 0), 180 * GIB), **at)
        add_nic(host, f"mlx5_{index}", nic_slot, **at)
    running(host, "nv-fabricmanage")
    blackwell(host, milliwatts=1_000_000, mhz=1965)
    host.nics = [interface("eno1", f"10.0.0.{host.node + 1}"), interface("lo", "127.0.0.1")]


def no_registration(host: Host) -> None:
    """GPU 2 waits for the fabric manager."""
    host.nvml["2"]["fabric"] = "2 0 0"


def degraded(host: Host) -> None:
    host.nvml["6"]["nvmlDeviceGetNvLinkState.0"] = 0


MACHINE = Machine(
    title="HGX B200",
    about="Eight B200; the NVSwitches of the fourth generation are not seen in /dev, NVLink 5 "
    "counts errors by field values, and clocks for applications are no more.",
    sources=("NVIDIA Fabric Manager user guide", "NVML API reference"),
    build=build,
    faults=(
        Fault(
            "One GPU is not registered with the NVLink fabric",
            "fabric-manager-down",
            no_registration,
            ranks=(2,),
            devices=lambda host: (host.gpus[2].uuid,),
        ),
        Fault(
            "One NVLink is down",
            "nvlink-down",
            degraded,
            ranks=(6,),
            devices=lambda host: (host.gpus[6].uuid,),
        ),
        Fault(
            "One GPU reports a double-bit error",
            "gpu-unhealthy",
            dgx_h100.bad_memory,
            severity=Severity.FAIL,
            ranks=(5,),
            devices=lambda host: (host.gpus[5].uuid,),
        ),
    ),
)
