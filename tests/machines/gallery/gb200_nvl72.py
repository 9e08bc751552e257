"""GB200 NVL72: trays of four GPUs and two Graces, in one NVLink domain with the other trays."""

from __future__ import annotations

from tests.machines.gallery.gh200 import grace
from tests.machines.gallery.hgx_b200 import blackwell
from tests.machines.host import (
    GIB,
    Gpu,
    Host,
    add_gpu,
    add_nic,
    interface,
    kernel,
    running,
    unlink,
    uuid_of,
)
from tests.machines.program import HOSTS, Fault, Machine, Severity

MODEL = "NVIDIA GB200"
TRAY = (  # GPU, NIC, its name, NUMA node
    ("0008:01:00.0", "0000:03:00.0", "mlx5_0", 0),
    ("0009:01:00.0", "0002:03:00.0", "mlx5_1", 0),
    ("0018:01:00.0", "0010:03:00.0", "mlx5_4", 1),
    ("0019:01:00.0", "0012:03:00.0", "mlx5_5", 1),
)
CPUS = ("0-71", "72-143")
CHANNEL = "dev/nvidia-caps-imex-channels/channel0"
IMEX = 4300


def build(host: Host) -> None:
    kernel(
        host,
        cpus=144,
        memory_gib=960,
        arch="aarch64",
        release="6.8.0-1021-nvidia-64k",
        modules=("nvidia_uvm", "mlx5_ib", "ib_uverbs", "ib_umad"),
    )
    for index, (slot, nic_slot, name, numa) in enumerate(TRAY):
        at = {"numa": numa, "cpus": CPUS[numa]}
        gpu = Gpu(slot, MODEL, uuid_of(host, index), (10, 0), 186 * GIB)
        add_gpu(host, gpu, below=(f"pci{slot[:4]}:00", f"{slot[:4]}:00:00.0"), **at)
        bridge = f"{nic_slot[:4]}:00:00.0"
        add_nic(host, name, nic_slot, below=(f"pci{nic_slot[:4]}:00", bridge), **at)
    blackwell(
        host,
        milliwatts=1_200_000,
        mhz=2062,
        fabric="3 0 0 1 171",
        nvmlDeviceGetPlatformInfo="1821024190001",
    )
    for index in range(len(TRAY)):
        grace(host, index)
    host.write(CHANNEL, "")
    running(host, "nvidia-imex", IMEX)
    nodes = "".join(f"10.0.0.{node + 1}\n" for node in range(HOSTS))
    host.write("etc/nvidia-imex/nodes_config.cfg", nodes)
    host.nics = [interface("enP22p3s0f0", f"10.0.0.{host.node + 1}"), interface("lo", "127.0.0.1")]


def no_imex(host: Host) -> None:
    unlink(host, f"proc/{IMEX}/comm")


def no_channel(host: Host) -> None:
    unlink(host, CHANNEL)


def links_to_the_cpu(host: Host) -> None:
    grace(host, 2, up=7)


MACHINE = Machine(
    title="GB200 NVL72",
    about="Two trays of one rack, with four GPUs and two Grace CPUs each: NVLink between hosts, "
    "which needs IMEX on each of them, and a channel for the job.",
    sources=("NVIDIA Multi-Node NVLink systems user guide", "NVIDIA IMEX guide"),
    build=build,
    ranks=4,
    faults=(
        Fault(
            "The IMEX service of one tray does not run",
            "imex-not-running",
            no_imex,
            severity=Severity.FAIL,
        ),
        Fault(
            "One job container has no IMEX channel",
            "imex-channel-unusable",
            no_channel,
            severity=Severity.FAIL,
        ),
        Fault(
            "Three of the links between a GPU and its CPU are down",
            "c2c-down",
            links_to_the_cpu,
            ranks=(2,),
            devices=lambda host: (host.gpus[2].uuid,),
        ),
    ),
)
