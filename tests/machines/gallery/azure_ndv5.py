"""Azure ND H100 v5: a virtual machine with every PCI device in a domain of its own."""

from __future__ import annotations

from tests.machines.gallery import dgx_h100, p5_efa
from tests.machines.host import (
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

MODEL = "NVIDIA H100 80GB HBM3"
CPUS = ("0-47", "48-95")
TOPOLOGY = "/opt/microsoft/ndv5-topo.xml"
DOMAINS = ("0001", "0002", "0003", "0008", "0009", "000a", "000b", "000c")


def build(host: Host) -> None:
    kernel(host, cpus=96, virtual=True, modules=("nvidia_uvm", "nvidia_peermem", "mlx5_ib"))
    for index, domain in enumerate(DOMAINS):
        numa, nic = index // 4, f"01{index + 1:02x}"
        at = {"numa": numa, "cpus": CPUS[numa]}
        gpu = Gpu(f"{domain}:00:00.0", MODEL, uuid_of(host, index))
        add_gpu(host, gpu, below=(f"pci{domain}:00",), **at)
        add_nic(host, f"mlx5_ib{index}", f"{nic}:00:00.0", below=(f"pci{nic}:00",), **at)
    host.write("sys/kernel/mm/memory_peers/nv_mem/version", "1.0")
    by_nvml(host, nvmlDeviceGetVirtualizationMode=1)
    host.write(TOPOLOGY.lstrip("/"), '<system version="1"></system>')
    host.write("etc/nccl.conf", f"NCCL_IB_PCI_RELAXED_ORDERING=1\nNCCL_TOPO_FILE={TOPOLOGY}")
    host.env |= {"NCCL_SOCKET_IFNAME": "eth0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    host.nics = [interface("lo", "127.0.0.1"), interface("eth0", f"10.0.0.{host.node + 4}")]


def waits_for_subnet_manager(host: Host) -> None:
    set_port(host, "mlx5_ib3", "2: INIT", "5: LinkUp")


MACHINE = Machine(
    title="Azure ND H100 v5",
    about="Eight H100 and eight ports of InfiniBand passed through to a virtual machine, where "
    "nothing shows which are near each other: NCCL has it from a topology file, by /etc/nccl.conf.",
    sources=("Azure/azhpc-images, topology/ndv5-topo.xml and its nccl.conf",),
    build=build,
    faults=(
        Fault(
            "One port waits for the subnet manager",
            "rdma-port-unconfigured",
            waits_for_subnet_manager,
            interfaces=("mlx5_ib3:1",),
        ),
        Fault(
            "One GPU has two NVLinks down",
            "nvlink-down",
            p5_efa.two_links_down,
            ranks=(3,),
            devices=lambda host: (host.gpus[3].uuid,),
        ),
        Fault(
            "One GPU has errors that ECC could not repair",
            "gpu-unhealthy",
            dgx_h100.bad_memory,
            severity=Severity.FAIL,
            ranks=(5,),
            devices=lambda host: (host.gpus[5].uuid,),
        ),
    ),
)
