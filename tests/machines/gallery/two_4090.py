"""Two GeForce 4090 in a desktop: no NVLink, no P2P, no InfiniBand, no ECC."""

from __future__ import annotations

from tests.machines.host import GIB, Gpu, Host, add_gpu, by_nvml, interface, kernel, uuid_of
from tests.machines.program import Fault, Machine, Severity

MODEL = "NVIDIA GeForce RTX 4090"
SLOTS = ("0000:01:00.0", "0000:41:00.0")
CPUS = "0-31"
NOT_THERE = "!NOT_SUPPORTED"


def build(host: Host) -> None:
    kernel(host, memory_gib=256, modules=("nvidia_uvm",))
    for index, slot in enumerate(SLOTS):
        gpu = Gpu(slot, MODEL, uuid_of(host, index), (8, 9), 24 * GIB)
        bus = slot[5:7]
        way = (f"pci0000:{bus[0]}0", f"0000:{bus[0]}0:01.1")
        add_gpu(host, gpu, below=way, numa=-1, cpus=CPUS, speed="16.0 GT/s PCIe")
    by_nvml(
        host,
        nvmlDeviceGetMaxPcieLinkGeneration=4,
        nvmlDeviceGetCurrPcieLinkGeneration=4,
        nvmlDeviceGetPowerManagementLimit=450000,
        nvmlDeviceGetPowerManagementDefaultLimit=450000,
        nvmlDeviceGetEccMode=NOT_THERE,
        nvmlDeviceGetMigMode=NOT_THERE,
        nvmlDeviceGetRemappedRows=NOT_THERE,
        nvmlDeviceGetTotalEccErrors__0__0=NOT_THERE,
        nvmlDeviceGetTotalEccErrors__1__0=NOT_THERE,
        nvmlDeviceGetTotalEccErrors__1__1=NOT_THERE,
        nvmlDeviceGetPersistenceMode=1,
        fabric=NOT_THERE,
        nvmlDeviceGetNvLinkState__0=NOT_THERE,
    )
    # Peer-to-peer is not there for this model, by the chipset.
    host.nvml["0"] |= {"nvmlDeviceGetP2PStatus.1.0": 1, "nvmlDeviceGetTopologyCommonAncestor.1": 30}
    host.nics = [interface("enp5s0", f"192.168.1.{host.node + 1}"), interface("lo", "127.0.0.1")]


def half_the_lanes(host: Host) -> None:
    host.nvml["1"]["nvmlDeviceGetCurrPcieLinkWidth"] = 4


def too_hot(host: Host) -> None:
    host.nvml["0"] |= {
        "throttle": 72,
        "nvmlDeviceGetTemperature.0": 93,
        "nvmlDeviceGetClockInfo.1": 345,
    }


def fell_off(host: Host) -> None:
    host.nvml["1"]["nvmlDeviceGetTemperature.0"] = "!GPU_IS_LOST"
    host.gone.add(host.gpus[1].uuid)


MACHINE = Machine(
    title="2×RTX 4090",
    about="Desktops with two GeForce 4090 each, over Ethernet: GPUs that cannot reach each other.",
    sources=("NVIDIA/nccl issue 1838; NVML's NOT_SUPPORTED for GeForce",),
    build=build,
    ranks=2,
    faults=(
        Fault(
            "A riser gives one GPU four lanes",
            "pcie-degraded",
            half_the_lanes,
            devices=lambda host: (host.gpus[1].uuid,),
            ranks=(1,),
        ),
        Fault(
            "One GPU is too hot",
            "gpu-throttled",
            too_hot,
            devices=lambda host: (host.gpus[0].uuid,),
            ranks=(0,),
        ),
        Fault(
            "One GPU has fallen off the bus",
            "gpu-lost",
            fell_off,
            severity=Severity.FAIL,
            devices=lambda host: (host.gpus[1].uuid,),
            ranks=(1,),
        ),
    ),
)
