"""DGX H100: eight GPUs behind NVSwitch, and a port of InfiniBand beside each."""

from __future__ import annotations

from tests.machines.host import (
    Gpu,
    Host,
    add_gpu,
    add_nic,
    by_nvml,
    interface,
    kernel,
    running,
    set_port,
    unlink,
    uuid_of,
)
from tests.machines.program import Fault, Machine, Severity
from tests.support.fabrics import roce_gids

MODEL = "NVIDIA H100 80GB HBM3"
PAIRS = (  # GPU, NIC beside it, host bridge, NUMA node
    ("0000:1b:00.0", "mlx5_0", "0000:18:00.0", "15", 0),
    ("0000:43:00.0", "mlx5_3", "0000:40:00.0", "3d", 0),
    ("0000:52:00.0", "mlx5_4", "0000:4f:00.0", "4c", 0),
    ("0000:61:00.0", "mlx5_5", "0000:5e:00.0", "5b", 0),
    ("0000:9d:00.0", "mlx5_6", "0000:9a:00.0", "97", 1),
    ("0000:c3:00.0", "mlx5_9", "0000:c0:00.0", "bd", 1),
    ("0000:d1:00.0", "mlx5_10", "0000:ce:00.0", "cb", 1),
    ("0000:df:00.0", "mlx5_11", "0000:dc:00.0", "d9", 1),
)
STORAGE = (  # no cable
    ("mlx5_1", "0000:29:00.0", "InfiniBand", 0),
    ("mlx5_2", "0000:29:00.1", "Ethernet", 0),
    ("mlx5_7", "0000:aa:00.0", "InfiniBand", 1),
    ("mlx5_8", "0000:aa:00.1", "Ethernet", 1),
)
CPUS = ("0-55,112-167", "56-111,168-223")


def build(host: Host) -> None:
    kernel(host, modules=("nvidia_uvm", "nvidia_peermem", "mlx5_ib", "ib_uverbs", "ib_umad"))
    for index, (slot, name, nic_slot, bus, numa) in enumerate(PAIRS):
        way = (f"pci0000:{bus}", f"0000:{bus}:01.0", f"0000:{bus}:02.0")
        at = {"below": way, "numa": numa, "cpus": CPUS[numa]}
        add_gpu(host, Gpu(slot, MODEL, uuid_of(host, index)), **at)
        add_nic(host, name, nic_slot, **at)
    host.write("sys/kernel/mm/memory_peers/nv_mem/version", "1.0")
    for switch in range(4):
        host.write(f"dev/nvidia-nvswitch{switch}", "")
    running(host, "nv-fabricmanage")
    by_nvml(host)
    for name, slot, layer, numa in STORAGE:
        bus = slot[5:7]
        add_nic(
            host,
            name,
            slot,
            below=(f"pci0000:{bus}", f"0000:{bus}:01.0"),
            numa=numa,
            cpus=CPUS[numa],
            layer=layer,
            gids={},
        )
        set_port(host, name, "1: DOWN", "3: Disabled")
    # The Ethernet card on the board has RDMA too, and nothing keeps NCCL from it.
    add_nic(
        host,
        "irdma0",
        "0000:0b:00.0",
        below=("pci0000:00", "0000:00:1c.0"),
        numa=0,
        cpus=CPUS[0],
        layer="Ethernet",
        rate="100 Gb/sec (4X EDR)",
        driver="irdma",
        firmware="1.68",
        board="",
        vendor="0x8086",
        kind="0x020000",
        netdev="eno3",
        gids=roce_gids(f"0a00:{host.node + 1:04x}"),
    )
    host.nics = [interface("eno3", f"10.0.0.{host.node + 1}"), interface("lo", "127.0.0.1")]


def a_port_is_down(host: Host) -> None:
    set_port(host, "mlx5_4", "1: DOWN", "2: Polling")


def no_fabric_manager(host: Host) -> None:
    unlink(host, "proc/4242/comm")
    for gpu in range(8):
        host.nvml[str(gpu)]["fabric"] = "2 0 0"


def bad_memory(host: Host) -> None:
    host.nvml["5"] |= {
        "nvmlDeviceGetTotalEccErrors.1.0": 3,
        "nvmlDeviceGetTotalEccErrors.1.1": 3,
        "nvmlDeviceGetRemappedRows": "0 1 1 0",
    }


MACHINE = Machine(
    title="DGX H100",
    about="Eight H100 behind four NVSwitches; a ConnectX-7 with 400 Gbit/s InfiniBand beside each.",
    sources=("NVIDIA DGX H100/H200 user guide, network ports and PCIe addresses",),
    build=build,
    faults=(
        Fault(
            "One InfiniBand port has no link",
            "rdma-port-down",
            a_port_is_down,
            interfaces=("mlx5_4:1",),
        ),
        Fault(
            "The fabric manager does not run",
            "fabric-manager-down",
            no_fabric_manager,
            ranks=tuple(range(8)),
            devices=lambda host: tuple(gpu.uuid for gpu in host.gpus),
        ),
        Fault(
            "One GPU has errors that ECC could not repair",
            "gpu-unhealthy",
            bad_memory,
            severity=Severity.FAIL,
            devices=lambda host: (host.gpus[5].uuid,),
            ranks=(5,),
        ),
    ),
)
