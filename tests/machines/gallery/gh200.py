"""GH200: one Hopper and one Grace on a module, and a port of InfiniBand."""

from __future__ import annotations

from tests.machines.host import (
    GIB,
    Gpu,
    Host,
    add_gpu,
    add_nic,
    by_nvml,
    interface,
    kernel,
    set_port,
    uuid_of,
)
from tests.machines.program import Fault, Machine, Severity

MODEL = "NVIDIA GH200 480GB"
C2C_LINKS = 10
_FIELD = "nvmlDeviceGetFieldValues"


def grace(host: Host, gpu: int, links: int = C2C_LINKS, up: int = C2C_LINKS) -> None:
    """The links of a GPU to its CPU; fields 170 (their number) and 171 (the state of each)."""
    host.nvml[str(gpu)] |= {f"{_FIELD}.170": links, f"{_FIELD}.171": int(up > 0)}
    for link in range(1, links):
        host.nvml[str(gpu)][f"{_FIELD}.171.{link}"] = int(link < up)


def build(host: Host) -> None:
    kernel(
        host,
        cpus=72,
        memory_gib=480,
        arch="aarch64",
        release="6.8.0-1015-nvidia-64k",
        modules=("nvidia_uvm", "nvidia_peermem", "mlx5_ib", "ib_uverbs", "ib_umad"),
    )
    at = {"numa": 0, "cpus": "0-71"}
    gpu = Gpu("0009:01:00.0", MODEL, uuid_of(host, 0), (9, 0), 96 * GIB)
    add_gpu(host, gpu, below=("pci0009:00", "0009:00:00.0"), **at)
    add_nic(host, "mlx5_0", "0000:01:00.0", below=("pci0000:00", "0000:00:00.0"), **at)
    by_nvml(
        host,
        fabric="0 0 0",
        nvmlDeviceGetPowerManagementLimit=900000,
        nvmlDeviceGetPowerManagementDefaultLimit=900000,
        nvmlDeviceGetNvLinkState__0="!NOT_SUPPORTED",
    )
    grace(host, 0)
    host.nics = [interface("enP5p3s0", f"10.0.0.{host.node + 1}"), interface("lo", "127.0.0.1")]


def links_to_the_cpu(host: Host) -> None:
    grace(host, 0, up=8)


def no_cable(host: Host) -> None:
    set_port(host, "mlx5_0", "1: DOWN", "2: Polling")


def row_remapping_failed(host: Host) -> None:
    host.nvml["0"]["nvmlDeviceGetRemappedRows"] = "0 1 0 1"


MACHINE = Machine(
    title="GH200",
    about="One GPU and one CPU of 72 Arm cores on each module, joined by NVLink-C2C; no NVSwitch.",
    sources=("NVIDIA Grace Hopper tuning guide", "NVML API reference, field values"),
    build=build,
    ranks=1,
    faults=(
        Fault(
            "Two of the links between GPU and CPU are down",
            "c2c-down",
            links_to_the_cpu,
            ranks=(0,),
            devices=lambda host: (host.gpus[0].uuid,),
        ),
        Fault(
            "The InfiniBand port has no link",
            "rdma-mixed",
            no_cable,
            severity=Severity.FAIL,
        ),
        Fault(
            "A row of the GPU's memory could not be replaced",
            "gpu-unhealthy",
            row_remapping_failed,
            severity=Severity.FAIL,
            ranks=(0,),
            devices=lambda host: (host.gpus[0].uuid,),
        ),
    ),
)
