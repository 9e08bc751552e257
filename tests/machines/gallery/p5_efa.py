"""AWS p5.48xlarge: thirty-two EFA devices, and aws-ofi-nccl as NCCL's network plug-in."""

from __future__ import annotations

import shutil

from tests.machines.host import (
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

MODEL = "NVIDIA H100 80GB HBM3"
GPUS = ("53", "64", "75", "86", "97", "a8", "b9", "ca")
CPUS = ("0-47,96-143", "48-95,144-191")
PLUGIN = "libnccl-net.so"


def card(bus: str, number: int) -> str:
    """The name of an EFA device beside the GPU on this bus."""
    return f"rdmap{int(bus, 16) - 4 + number}s0"


def build(host: Host) -> None:
    kernel(host, cpus=192, modules=("nvidia_uvm", "efa", "ib_uverbs", "gdrdrv"), virtual=True)
    for index, bus in enumerate(GPUS):
        numa = index // 4
        at = {"below": (f"pci0000:{int(bus, 16) - 0xB:02x}", f"0000:{int(bus, 16) - 0xB:02x}:01.0")}
        at |= {"numa": numa, "cpus": CPUS[numa]}
        add_gpu(host, Gpu(f"0000:{bus}:00.0", MODEL, uuid_of(host, index)), **at)
        for number in range(4):
            slot = f"0000:{int(bus, 16) - 4 + number:02x}:00.0"
            add_nic(
                host,
                card(bus, number),
                slot,
                layer="Unknown",
                rate="100 Gb/sec (4X EDR)",
                driver="efa",
                firmware="0.0.0.0",
                gids={
                    0: (f"fe80:0000:0000:0000:{host.node:04x}:{index:04x}:{number:04x}:0001", "")
                },
                counters=False,
                board="",
                vendor="0x1d0f",
                kind="0x020000",
                **at,
            )
            for counter in ("rdma_read_wr_err", "rdma_write_wr_err", "unresponsive_remote_events"):
                at_port = f"sys/class/infiniband/{card(bus, number)}/ports/1"
                host.write(f"{at_port}/hw_counters/{counter}", "0")
    for switch in range(4):
        host.write(f"dev/nvidia-nvswitch{switch}", "")
    running(host, "nv-fabricmanage")
    by_nvml(host, nvmlDeviceGetVirtualizationMode=1)
    host.env |= {"FI_PROVIDER": "efa", "NCCL_SOCKET_IFNAME": "^docker,lo"}
    host.nics = [
        interface("enp71s0", f"10.0.0.{host.node + 1}", mtu=9001),
        interface("docker0", "172.17.0.1"),
        interface("lo", "127.0.0.1"),
    ]
    host.libraries.append(PLUGIN)


def no_plugin(host: Host) -> None:
    host.libraries.remove(PLUGIN)


def no_devices(host: Host) -> None:
    """The container sees EFA in /sys, and was started without `--device=/dev/infiniband`."""
    shutil.rmtree(host.root / "dev/infiniband")


def two_links_down(host: Host) -> None:
    host.nvml["3"] |= {"nvmlDeviceGetNvLinkState.4": 0, "nvmlDeviceGetNvLinkState.5": 0}


def other_name(host: Host) -> None:
    host.env["NCCL_SOCKET_IFNAME"] = "eth0"


MACHINE = Machine(
    title="AWS p5.48xlarge",
    about="Eight H100 with thirty-two EFA devices; NCCL reaches them through aws-ofi-nccl.",
    sources=("AWS, EC2 user guide: Elastic Fabric Adapter; aws-ofi-nccl issues 803 and 1020",),
    build=build,
    faults=(
        Fault(
            "The image of one host lacks aws-ofi-nccl",
            "net-plugin-missing",
            no_plugin,
            severity=Severity.FAIL,
        ),
        Fault(
            "One container was not given the EFA devices",
            "rdma-unusable",
            no_devices,
            interfaces=tuple(sorted(f"{card(bus, n)}:1" for bus in GPUS for n in range(4))),
            severity=Severity.FAIL,
        ),
        Fault(
            "One GPU has two NVLinks down",
            "nvlink-down",
            two_links_down,
            ranks=(3,),
            devices=lambda host: (host.gpus[3].uuid,),
        ),
        Fault(
            "NCCL_SOCKET_IFNAME names the interface of another instance type",
            "interface-missing",
            other_name,
            interfaces=("eth0",),
            severity=Severity.FAIL,
        ),
    ),
)
