"""A Kubernetes pod: no processes of its machine, and no InfiniBand in its /sys."""

from __future__ import annotations

from tests.machines.host import Gpu, Host, add_gpu, by_nvml, interface, kernel, uuid_of
from tests.machines.program import Fault, Machine, Severity

MODEL = "NVIDIA L40S"
SLOTS = ("0000:4a:00.0",)


def build(host: Host) -> None:
    kernel(host, cpus=64, memory_gib=512, container=True)
    for index, slot in enumerate(SLOTS):
        gpu = Gpu(slot, MODEL, uuid_of(host, index), (8, 9), 48 << 30)
        bus = slot[5:7]
        add_gpu(host, gpu, below=(f"pci0000:{bus}", f"0000:{bus}:01.0"), numa=0, cpus="0-63")
    by_nvml(
        host,
        nvmlDeviceGetMaxPcieLinkGeneration=4,
        nvmlDeviceGetCurrPcieLinkGeneration=4,
        nvmlDeviceGetPowerManagementLimit=350000,
        nvmlDeviceGetPowerManagementDefaultLimit=350000,
        fabric="!NOT_SUPPORTED",
        nvmlDeviceGetNvLinkState__0="!NOT_SUPPORTED",
    )
    host.env |= {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "NVIDIA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in host.gpus),
    }
    host.nics = [interface("lo", "127.0.0.1"), interface("eth0", f"10.244.0.{host.node + 1}")]
    host.shm_mib = 16 << 10


def default_shm(host: Host) -> None:
    host.shm_mib = 64


def other_network(host: Host) -> None:
    host.env["NCCL_SOCKET_IFNAME"] = "net1"


def no_device_file(host: Host) -> None:
    (host.root / "dev/nvidia0").unlink()
    host.gpus.clear()
    host.nvml = {"-": {**host.nvml["-"], "nvmlDeviceGetCount_v2": 0}}


MACHINE = Machine(
    title="Kubernetes pod",
    about="Pods with one L40S each, /dev/shm as an emptyDir, and no InfiniBand.",
    sources=("Kubernetes documentation, emptyDir with medium Memory", "containerd, default mounts"),
    build=build,
    ranks=1,
    faults=(
        Fault("The pod has the 64 MiB of /dev/shm by default", "shm-too-small", default_shm),
        Fault(
            "The pod was given no GPU",
            "gpu-missing",
            no_device_file,
            severity=Severity.FAIL,
            ranks=(0,),
        ),
        Fault(
            "NCCL_SOCKET_IFNAME names a second network that the pod does not have",
            "interface-missing",
            other_network,
            interfaces=("net1",),
            severity=Severity.FAIL,
        ),
    ),
)
