"""GCP a3-megagpu-8g: nine network cards without RDMA, and FasTrak as NCCL's network plug-in."""

from __future__ import annotations

from tests.machines.gallery import dgx_h100
from tests.machines.host import (
    Gpu,
    Host,
    add_gpu,
    by_nvml,
    interface,
    kernel,
    pci,
    running,
    uuid_of,
)
from tests.machines.program import Fault, Machine, Severity

MODEL = "NVIDIA H100 80GB HBM3"
PAIRS = (  # GPU, card beside it
    ("0000:04:00.0", "0000:06:00.0"),
    ("0000:05:00.0", "0000:07:00.0"),
    ("0000:0a:00.0", "0000:0c:00.0"),
    ("0000:0b:00.0", "0000:0d:00.0"),
    ("0000:84:00.0", "0000:86:00.0"),
    ("0000:85:00.0", "0000:87:00.0"),
    ("0000:8a:00.0", "0000:8c:00.0"),
    ("0000:8b:00.0", "0000:8d:00.0"),
)
CPUS = ("0-51,104-155", "52-103,156-207")
PLUGIN = "libnccl-net.so"
CARDS = ",".join(f"eth{number}" for number in range(1, 9))


def build(host: Host) -> None:
    kernel(host, cpus=208, memory_gib=1872, modules=("nvidia_uvm", "gve"), virtual=True)
    for index, (slot, card) in enumerate(PAIRS):
        numa, bus = index // 4, slot[5:6]
        way = (f"pci0000:{bus}0", f"0000:{bus}{index % 4 // 2}:01.0")
        at = {"below": way, "numa": numa, "cpus": CPUS[numa]}
        add_gpu(host, Gpu(slot, MODEL, uuid_of(host, index)), **at)
        folder = pci(host, card, "0x020000", vendor="0x1ae0", speed="Unknown", **at)
        host.write(f"{folder}/net/eth{index + 1}/operstate", "up")
    for switch in range(4):
        host.write(f"dev/nvidia-nvswitch{switch}", "")
    running(host, "nv-fabricmanage")
    by_nvml(host, nvmlDeviceGetVirtualizationMode=1)
    host.env |= {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_CROSS_NIC": "0",
        "NCCL_FASTRAK_CTRL_DEV": "eth0",
        "NCCL_FASTRAK_IFNAME": CARDS,
        "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
        "NCCL_NET_PLUGIN": PLUGIN,
        "NCCL_ALGO": "Ring,Tree",
        "NCCL_PROTO": "Simple",
    }
    host.nics = [interface("lo", "127.0.0.1"), interface("eth0", f"10.0.0.{host.node + 1}")]
    host.nics += [
        interface(f"eth{number}", f"10.{number}.0.{host.node + 1}", mtu=8244)
        for number in range(1, 9)
    ]
    host.libraries.append(PLUGIN)


def no_plugin(host: Host) -> None:
    host.libraries.remove(PLUGIN)


def slipped(host: Host) -> None:
    host.env["NCCL_SOCKET_IFNAME"] = "ens4"


MACHINE = Machine(
    title="GCP a3-megagpu-8g",
    about="Eight H100 and eight cards of 200 Gbit/s without RDMA, which the plug-in FasTrak "
    "(GPUDirect-TCPXO) drives.",
    sources=("Google Cloud documentation, GPUDirect-TCPXO and A3 Mega",),
    build=build,
    faults=(
        Fault("The image of one host lacks the plug-in", "net-plugin-missing", no_plugin),
        Fault(
            "One GPU has errors that ECC could not repair",
            "gpu-unhealthy",
            dgx_h100.bad_memory,
            severity=Severity.FAIL,
            ranks=(5,),
            devices=lambda host: (host.gpus[5].uuid,),
        ),
        Fault(
            "NCCL_SOCKET_IFNAME names the interface of another image",
            "interface-missing",
            slipped,
            interfaces=("ens4",),
            severity=Severity.FAIL,
        ),
    ),
)
