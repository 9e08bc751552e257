"""One made-up host while it is built: its files, its GPUs by NVML, its environment, its network."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nccl_doctor.toolkit.net.interfaces import Interface
from tests.amdsmi import stand_in as amd_stand_in
from tests.nvml import stand_in
from tests.support import fabrics

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """A GPU as the job sees it; `arch` is the name of AMD's architecture."""

    slot: str
    name: str
    uuid: str
    capability: tuple[int, int] = (9, 0)
    memory: int = 80 * GIB
    arch: str = ""


@dataclass
class Host:
    """A host of a made-up machine; `build` of the machine fills it, a fault then breaks it.

    Attributes:
        root: what lies below / there.
        node: its number in the job; only addresses and serial numbers depend on it.
        env: variables of every rank; `env_of_rank`: those of one local rank.
        seen_by_rank: numbers of the GPUs that a control group lets a local rank see, if any does.
        parts: local rank → its GPU, and UUID and bytes of its MIG slice of that, which is all that
            it sees.
        gone: UUIDs of GPUs that no rank can use any more.
        nvml: what NVML answers there; empty where there is none.
        amdsmi: what AMD's management library answers there; where it does, torch is one for ROCm.
        nics: interfaces of IP, in the order of getifaddrs.
        libraries: files that programs find by their names there.
        in_shm: name → bytes of the files there.
        cpus: their number.
        shm_mib: size of /dev/shm, where it is smaller than that of a test machine.
        told: check → facts that no file has, over those that `recorded` gives to every machine.
        later: path → text that the file has as the run ends.
    """

    root: Path
    node: int
    env: dict[str, str] = field(default_factory=dict)
    env_of_rank: Callable[[int], Mapping[str, str]] = lambda local: {}
    gpus: list[Gpu] = field(default_factory=list)
    seen_by_rank: Callable[[int], Sequence[int]] | None = None
    parts: dict[int, tuple[Gpu, str, int]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    nvml: stand_in.Machine = field(default_factory=dict)
    amdsmi: amd_stand_in.Machine = field(default_factory=dict)
    nics: list[Interface] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)
    shm_mib: int = 0
    in_shm: dict[str, int] = field(default_factory=dict)
    cpus: int = 0
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    later: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"node{self.node}"

    @property
    def address(self) -> str:
        """Address of its first interface that leads anywhere."""
        return next(nic.addresses[0] for nic in self.nics if not nic.loopback)

    def write(self, path: str, text: str) -> None:
        fabrics.write(self.root, path, text)

    def tell(self, check: str, **facts: Any) -> None:
        """Facts of a check that come from no file."""
        self.told.setdefault(check, {}).update(facts)


def kernel(
    host: Host,
    *,
    cpus: int = 224,
    memory_gib: int = 2048,
    driver: str = "580.95.05",
    open_modules: bool = True,
    release: str = "6.8.0-60-generic",
    modules: Sequence[str] = (),
    container: bool = False,
    virtual: bool = False,
    vendor: str = "GenuineIntel",
    arch: str = "x86_64",
) -> None:
    """What every Linux host has: identity, memory, limits of the kernel, NVIDIA's driver.

    `container`: processes of the machine are not seen.
    """
    serial = f"{0x5EED0000 + host.node:08x}"
    write = host.write
    host.cpus = cpus
    status = "Name:\tpython\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000"
    write("proc/self/status", status)
    write("proc/self/maps", "")
    write("proc/self/uid_map", "         0          0 4294967295")
    write("etc/machine-id", serial * 4)
    write("proc/sys/kernel/random/boot_id", f"{serial}-1111-2222-3333-444455556666")
    write("proc/sys/kernel/osrelease", release)
    write("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999")
    write("proc/sys/net/ipv4/tcp_abort_on_overflow", "0")
    write("proc/sys/net/core/somaxconn", "4096")
    write("proc/uptime", "864000.00 1728000.00")
    write("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro")
    kib = memory_gib << 20
    write(
        "proc/meminfo",
        f"MemTotal: {kib} kB\nMemFree: {kib // 2} kB\nMemAvailable: {kib // 10 * 9} kB\n"
        f"Buffers: 1024 kB\nCached: 1024 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB",
    )
    if arch == "x86_64":
        flags = "fpu sse2" + " hypervisor" * virtual
        write("proc/cpuinfo", f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}")
    else:
        write("proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41")
        host.tell("cpus", machine=arch)
    running(host, "python" if container else "systemd", 1)
    if not container:
        running(host, "kthreadd", 2, flags=0x200000)
    write("proc/vmstat", "oom_kill 0")
    names = ("nvidia", *modules) if driver else modules
    write("proc/modules", "".join(f"{name} 16384 0 - Live 0x0\n" for name in names))
    for name in modules:
        write(f"sys/module/{name}/version", "1.0")
    (host.root / "dev/shm").mkdir(parents=True, exist_ok=True)
    if driver:
        kind = f"Open Kernel Module for {arch}" if open_modules else f"{arch} Kernel Module"
        words = f"NVRM version: NVIDIA UNIX {kind}  {driver}  Release Build"
        write("proc/driver/nvidia/version", words)
        write("dev/nvidiactl", "")


def pci(
    host: Host,
    address: str,
    kind: str,
    *,
    vendor: str,
    below: Sequence[str],
    numa: int,
    cpus: str,
    speed: str = "32.0 GT/s PCIe",
    acs: int | None = 0,
) -> str:
    """A PCIe device below these bridges, the first of them a host bridge; its folder."""
    folder = f"sys/devices/{below[0]}"
    for bridge in below[1:]:
        folder += f"/{bridge}"
        if not (host.root / folder / "class").exists():
            host.write(f"{folder}/class", "0x060400")
            (host.root / folder / "config").write_bytes(fabrics.config_space(acs))
    folder += f"/{address}"
    for file, text in {
        "class": kind,
        "vendor": vendor,
        "numa_node": str(numa),
        "local_cpulist": cpus,
        "current_link_speed": speed,
        "max_link_speed": speed,
        "current_link_width": "16",
        "max_link_width": "16",
    }.items():
        host.write(f"{folder}/{file}", text)
    fabrics.link(host.root, f"sys/bus/pci/devices/{address}", folder)
    return folder


def add_gpu(
    host: Host, gpu: Gpu, *, below: Sequence[str], numa: int, cpus: str, **how: Any
) -> None:
    """A GPU on the bus, with its device file; what NVML says of it is another matter."""
    number = len(host.gpus)
    host.gpus.append(gpu)
    folder = pci(
        host, gpu.slot, "0x030200", vendor="0x10de", below=below, numa=numa, cpus=cpus, **how
    )
    fabrics.link(host.root, f"{folder}/driver", "sys/bus/pci/drivers/nvidia")
    host.write(f"proc/driver/nvidia/gpus/{gpu.slot}/information", f"Model: \t\t {gpu.name}")
    host.write(f"dev/nvidia{number}", "")


def add_amd_gpu(
    host: Host, gpu: Gpu, *, below: Sequence[str], numa: int, cpus: str, **how: Any
) -> None:
    """A GPU of AMD on the bus, with its node of the KFD, and the render nodes of the eight
    partitions that it may have; what amdsmi says of it is another matter."""
    number = len(host.gpus)
    host.gpus.append(gpu)
    folder = pci(
        host, gpu.slot, "0x120000", vendor="0x1002", below=below, numa=numa, cpus=cpus, **how
    )
    fabrics.link(host.root, f"{folder}/driver", "sys/bus/pci/drivers/amdgpu")
    host.write(f"{folder}/unique_id", _unique(host, number))
    first = 128 + 8 * number
    host.write(f"{folder}/drm/renderD{first}/dev", f"226:{first}")
    for minor in range(first, first + 8):
        host.write(f"dev/dri/renderD{minor}", "")
    node = f"sys/class/kfd/kfd/topology/nodes/{number + 2}"  # the first ones are CPUs
    host.write(f"{node}/properties", f"simd_count 1216\ndrm_render_minor {first}")


def _unique(host: Host, index: int) -> str:
    return f"{0x1BADCAFE00000000 + 16 * host.node + index:016x}"


def hip_uuid(host: Host, index: int) -> str:
    """As torch writes HIP's UUID, whose bytes are the digits of the unique id."""
    digits = _unique(host, index).encode().hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def by_amdsmi(host: Host) -> None:
    """Let amdsmi describe the GPUs of the host, as those of a healthy machine."""
    host.amdsmi = amd_stand_in.mi300x(len(host.gpus))
    for index, gpu in enumerate(host.gpus):
        mine = host.amdsmi[str(index)]
        mine |= {"bdf": gpu.slot, "name": gpu.name, "memory_total": gpu.memory}
        mine["uuid"] = mine["uuid"].replace("-8000-", f"-80{host.node:02x}-")
    host.nvml = {"-": {"nvmlInitWithFlags": "!DRIVER_NOT_LOADED"}}


def running(host: Host, name: str, pid: int = 4242, *, flags: int = 0) -> None:
    """A process that is seen there."""
    host.write(f"proc/{pid}/comm", name)
    rest = "0 0 0 0 9 9 0 0 20 0 1 0 9" + 30 * " 0"
    host.write(f"proc/{pid}/stat", f"{pid} ({name}) S 1 1 1 0 -1 {flags} {rest}")
    host.write(f"proc/{pid}/status", f"Name:\t{name}\nUid:\t0\t0\t0\t0\nThreads:\t1")


def uuid_of(host: Host, index: int) -> str:
    return f"GPU-{host.node:04x}{index:04x}-0000-0000-0000-000000000000"


def by_nvml(host: Host, file: str = "h100x8", **each: Any) -> None:
    """Let NVML describe the GPUs of the host, as `tests/nvml/machines/FILE.json` has one of them;
    `each` are other answers of every GPU (dots of the calls are `__`)."""
    host.nvml = stand_in.described(file, len(host.gpus))
    for index, gpu in enumerate(host.gpus):
        mine = host.nvml[str(index)]
        mine |= {key.replace("__", "."): value for key, value in each.items()}
        domain, _, rest = gpu.slot.partition(":")
        mine["nvmlDeviceGetName"] = gpu.name
        mine["nvmlDeviceGetUUID"] = gpu.uuid
        mine["nvmlDeviceGetPciInfo_v3"] = f"{int(domain, 16):08X}:{rest.upper()}"
        mine["nvmlDeviceGetMemoryInfo"] = f"{gpu.memory} {gpu.memory - GIB} {GIB}"


def add_nic(
    host: Host,
    name: str,
    slot: str,
    *,
    below: Sequence[str],
    numa: int,
    cpus: str,
    layer: str = "InfiniBand",
    rate: str = fabrics.NDR,
    driver: str = "mlx5_core",
    firmware: str = "28.39.3560",
    gids: Mapping[int, tuple[str, str]] | None = None,
    counters: bool = True,
    netdev: str = "",
    board: str = "MT_0000000838",
    vendor: str = "0x15b3",
    kind: str = "0x020700",
) -> None:
    """An RDMA device with one port, as its driver shows it."""
    folder = pci(host, slot, kind, vendor=vendor, below=below, numa=numa, cpus=cpus)
    root, at = host.root, f"sys/class/infiniband/{name}"
    fabrics.link(root, f"{folder}/driver", f"sys/bus/pci/drivers/{driver}")
    fabrics.link(root, f"{at}/device", folder)
    uverbs = f"uverbs{sum(1 for _ in root.glob('sys/class/infiniband_verbs/*'))}"
    host.write(f"sys/class/infiniband_verbs/{uverbs}/ibdev", name)
    host.write(f"dev/infiniband/{uverbs}", "")
    port = f"{at}/ports/1"
    for file, text in {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "link_layer": layer,
        "rate": rate,
        "sm_lid": "0x1" if layer == "InfiniBand" else "0x0",
    }.items():
        host.write(f"{port}/{file}", text)
    host.write(f"{at}/fw_ver", firmware)
    if board:
        host.write(f"{at}/board_id", board)
    for counter in fabrics.ERRORS if counters else ():
        host.write(f"{port}/counters/{counter}", "0")
    if counters:
        host.write(f"{port}/hw_counters/local_ack_timeout_err", "0")
    if layer == "InfiniBand":
        host.write(f"{port}/pkeys/0", "0xffff")
        guid = (
            f"{0xB83F + host.node:04x}:d203:0049:{0x1000 + len(uverbs) * 16 + int(uverbs[6:]):04x}"
        )
        gids = {0: (f"fe80:0000:0000:0000:{guid}", "IB/RoCE v1")} if gids is None else gids
    for index, (gid, of) in (gids or {}).items():
        host.write(f"{port}/gids/{index}", gid)
        host.write(f"{port}/gid_attrs/types/{index}", of)
        if netdev:
            host.write(f"{port}/gid_attrs/ndevs/{index}", netdev)


def set_port(host: Host, name: str, state: str, physical: str) -> None:
    """The state of the port of an RDMA device, as sysfs has it."""
    host.write(f"sys/class/infiniband/{name}/ports/1/state", state)
    host.write(f"sys/class/infiniband/{name}/ports/1/phys_state", physical)


def interface(name: str, *addresses: str, mtu: int = 1500) -> Interface:
    return Interface(name, addresses, up=True, running=True, loopback=name == "lo", mtu=mtu)


def unlink(host: Host, path: str) -> None:
    os.unlink(host.root / path)
