"""MI300X: eight GPUs of AMD, each joined to all others by xGMI, and a port of RoCE beside each."""

from __future__ import annotations

import shutil

from tests.machines.host import (
    GIB,
    Gpu,
    Host,
    add_amd_gpu,
    add_nic,
    by_amdsmi,
    hip_uuid,
    interface,
    kernel,
)
from tests.machines.program import Fault, Machine, Severity
from tests.support.fabrics import roce_gids

MODEL = "AMD Instinct MI300X OAM"
BUSES = ("0c", "22", "38", "5c", "9f", "af", "bf", "df")
CPUS = ("0-95,192-287", "96-191,288-383")
CARDS = tuple(f"mlx5_{number}" for number in range(8))


def build(host: Host) -> None:
    modules = ("amdgpu", "mlx5_ib", "ib_uverbs", "ib_umad")
    kernel(host, cpus=384, driver="", modules=modules, vendor="AuthenticAMD")
    host.write("dev/kfd", "")
    host.nics = [interface("eno1", f"10.0.0.{host.node + 1}"), interface("lo", "127.0.0.1")]
    for index, bus in enumerate(BUSES):
        numa = index // 4
        root = f"{int(bus, 16) - 5:02x}"
        at = {"numa": numa, "cpus": CPUS[numa]}
        at["below"] = (f"pci0000:{root}", f"0000:{root}:01.1", f"0000:{int(bus, 16) - 3:02x}:00.0")
        gpu = Gpu(f"0000:{bus}:00.0", MODEL, hip_uuid(host, index), (9, 4), 192 * GIB, "gfx942")
        add_amd_gpu(host, gpu, **at)
        add_nic(
            host,
            CARDS[index],
            f"0000:{int(bus, 16) - 2:02x}:00.0",
            layer="Ethernet",
            rate="400 Gb/sec (4X NDR)",
            netdev=f"rdma{index}",
            gids=roce_gids(f"0a{index + 1:02x}:{host.node + 1:04x}"),
            kind="0x020000",
            **at,
        )
        host.nics.append(interface(f"rdma{index}", f"10.{index + 1}.0.{host.node + 1}", mtu=9000))
    by_amdsmi(host)
    host.env |= {"NCCL_SOCKET_IFNAME": "eno1", "NCCL_IB_HCA": f"={','.join(CARDS)}"}


def bad_memory(host: Host) -> None:
    host.amdsmi["5"]["ecc"] = "12 2 0"


def a_link_is_down(host: Host) -> None:
    """Between GPUs 1 and 6."""
    for gpu in ("1", "6"):
        host.amdsmi[gpu]["links"] = "UUUDUUUX"


def did_not_start(host: Host) -> None:
    """The driver could not start GPU 7: it is on the bus, and nowhere else."""
    gpu = host.gpus.pop()
    del host.amdsmi[str(len(host.gpus))]
    host.amdsmi["-"]["gpus"] = len(host.gpus)
    folder = (host.root / f"sys/bus/pci/devices/{gpu.slot}").resolve()
    (folder / "driver").unlink()
    shutil.rmtree(folder / "drm")
    shutil.rmtree(host.root / f"sys/class/kfd/kfd/topology/nodes/{len(host.gpus) + 2}")
    for node in sorted((host.root / "dev/dri").iterdir())[-8:]:
        node.unlink()


def uuid(host: Host, gpu: int) -> str:
    """The name of a GPU by amdsmi; torch has another."""
    return str(host.amdsmi[str(gpu)]["uuid"])


MACHINE = Machine(
    title="MI300X",
    about="Eight MI300X, each with seven xGMI links to the others, and a ConnectX-7 with 400 "
    "Gbit/s RoCE beside each; torch is built for ROCm. Each GPU has the render nodes of eight "
    "partitions, also where it is one whole (SPX).",
    sources=(
        "ROCm documentation, vLLM distributed inference with MoRI (MI300X, ConnectX-7)",
        "AMD SMI documentation, list of devices of its command line",
        "ROCm/rocDecode pull requests 38 and 310 (render nodes)",
    ),
    build=build,
    faults=(
        Fault(
            "One GPU has errors that ECC could not repair",
            "gpu-unhealthy",
            bad_memory,
            ranks=(5,),
            devices=lambda host: (uuid(host, 5),),
        ),
        Fault(
            "The xGMI link between two GPUs is down",
            "xgmi-down",
            a_link_is_down,
            ranks=(1, 6),
            devices=lambda host: (uuid(host, 1), uuid(host, 6)),
        ),
        Fault(
            "The driver did not start one GPU",
            "gpu-missing",
            did_not_start,
            severity=Severity.FAIL,
            ranks=(7,),
        ),
    ),
)
