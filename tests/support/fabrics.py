"""Made-up trees of sysfs and procfs: hosts with RDMA devices and GPUs, below another root."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

NDR = "400 Gb/sec (4X NDR)"
ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards")
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n"
ACS_ON = 0x1D
"""Source validation, P2P request and completion redirect, upstream forwarding."""


def write(root: Path, path: str, text: str) -> None:
    file = f"{root}/{path}"  # thousands of them: a `Path` costs more than the file
    data = (text if text.endswith("\n") else f"{text}\n").encode()
    how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        handle = os.open(file, how, 0o644)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        handle = os.open(file, how, 0o644)
    os.write(handle, data)
    os.close(handle)


def link(root: Path, path: str, target: str) -> None:
    """A link as sysfs has them; the target is below the root too, and is made."""
    (root / target).mkdir(parents=True, exist_ok=True)
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).symlink_to(root / target)


def add_device(
    root: Path,
    name: str,
    *,
    state: str = "4: ACTIVE",
    layer: str = "InfiniBand",
    rate: str = NDR,
    firmware: str = "28.39.1002",
    pci: str = "0000:1a:00.0",
    speed: str = "32.0 GT/s PCIe",
    width: str = "16",
    group: str = "",
    gids: Mapping[int, tuple[str, str]] | None = None,
    mtu: int = 4200,
    counters: bool = True,
    numa: int = 0,
    opens: bool = True,
    network: str = "",
) -> None:
    """One device with one port, as mlx5 shows a ConnectX-7.

    `opens`: whether its file is in /dev. `network`: of RoCE, `10.0.1.0/24` by the routing table.

    `gids`: index → (GID, type); the table has 4 entries, the others are empty. `group`: type of its
    IOMMU group.
    """
    at, function = f"sys/class/infiniband/{name}", f"sys/devices/pci0000:00/{_below(pci)}"
    link(root, f"{at}/device", function)
    link(root, f"{function}/driver", "sys/bus/pci/drivers/mlx5_core")
    for file, text in {
        "current_link_speed": speed,
        "max_link_speed": "32.0 GT/s PCIe",
        "current_link_width": width,
        "max_link_width": "16",
    }.items():
        write(root, f"{function}/{file}", text)
    if group:
        write(root, f"{function}/iommu_group/type", group)
    write(root, f"{function}/numa_node", str(numa))
    uverbs = f"uverbs{len(list(root.glob('sys/class/infiniband_verbs/*')))}"
    write(root, f"sys/class/infiniband_verbs/{uverbs}/ibdev", name)
    if opens:
        write(root, f"dev/infiniband/{uverbs}", "")
    port = f"{at}/ports/1"
    for file, text in {
        "state": state,
        "phys_state": "5: LinkUp" if "ACTIVE" in state else "3: Disabled",
        "link_layer": layer,
        "rate": rate,
        "sm_lid": "0x1" if layer == "InfiniBand" else "0x0",
    }.items():
        write(root, f"{port}/{file}", text)
    write(root, f"{at}/fw_ver", firmware)
    write(root, f"{at}/board_id", "MT_0000000838")
    if counters:
        for counter in ERRORS:
            write(root, f"{port}/counters/{counter}", "7")
        write(root, f"{port}/hw_counters/local_ack_timeout_err", "0")
    if gids is None:
        gids = {0: ("fe80:0000:0000:0000:b83f:d203:0049:c1a2", "IB/RoCE v1")}
    for index in range(4):
        gid, kind = gids.get(index, ("0000:0000:0000:0000:0000:0000:0000:0000", ""))
        write(root, f"{port}/gids/{index}", gid)
        if kind:
            write(root, f"{port}/gid_attrs/types/{index}", kind)
    if layer == "Ethernet":
        nic = f"eth_{name}"
        write(root, f"{port}/gid_attrs/ndevs/0", nic)
        write(root, f"sys/class/net/{nic}/mtu", str(mtu))
        if network:
            add_route(root, nic, network)


def add_route(root: Path, nic: str, network: str) -> None:
    """A network on the link of an interface, and a default route, in /proc/net/route."""
    file = root / "proc/net/route"
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
    before = file.read_text() if file.exists() else f"{head}\n"
    net = ipaddress.IPv4Network(network)
    for to, mask, gateway in (
        (net.network_address, net.netmask, "00000000"),
        (ipaddress.IPv4Address(0), ipaddress.IPv4Address(0), "0100000A"),
    ):
        words = [each.packed[::-1].hex().upper() for each in (to, mask)]
        before += f"{nic}\t{words[0]}\t{gateway}\t0001\t0\t0\t0\t{words[1]}\t0\t0\t0\n"
    write(root, "proc/net/route", before)


VERBS = """
#include <stdlib.h>
struct device { const char *name; int mtu; };
struct attributes { int state, max_mtu, active_mtu, gid_tbl_len; };
static struct device all[] = { %s };
#define COUNT ((int)(sizeof all / sizeof *all))
struct device **ibv_get_device_list(int *count) {
    struct device **list = calloc(COUNT + 1, sizeof *list);
    for (int i = 0; i < COUNT; i++) list[i] = all + i;
    *count = COUNT;
    return list;
}
void ibv_free_device_list(struct device **list) { free(list); }
const char *ibv_get_device_name(struct device *device) { return device->name; }
struct device *ibv_open_device(struct device *device) { return device->mtu ? device : NULL; }
int ibv_query_port(struct device *device, unsigned char port, struct attributes *said) {
    if (port != 1) return 22;
    *said = (struct attributes){ 4, 5, device->mtu, 256 };
    return 0;
}
int ibv_close_device(struct device *device) { return 0; }
"""
"""Source of a stand-in for libibverbs: devices with one port each; the MTU is 5 for 4096."""


def verbs_source(**mtus: int) -> str:
    """Device → code of its MTU; 0: it cannot be opened."""
    return VERBS % ", ".join(f'{{"{name}", {code}}}' for name, code in mtus.items())


LOCAL = "fe80:0000:0000:0000:0ac0:ebff:fe01:0203"


def roce_gids(address: str = "0a00:0001") -> dict[int, tuple[str, str]]:
    """The table as the kernel fills it for an interface with a link-local and an IPv4 address."""
    mapped = f"0000:0000:0000:0000:0000:ffff:{address}"
    return {
        0: (LOCAL, "IB/RoCE v1"),
        1: (LOCAL, "RoCE v2"),
        2: (mapped, "IB/RoCE v1"),
        3: (mapped, "RoCE v2"),
    }


def connectx7(root: Path, ports: int = 8) -> Path:
    """A host with NDR ports, each on an adapter of its own."""
    for number in range(ports):
        add_device(root, f"mlx5_{number}", pci=f"0000:{0x1A + number:02x}:00.0")
    return root


def roce(root: Path, ports: int = 2) -> Path:
    """A host with RoCE ports."""
    for number in range(ports):
        add_device(
            root,
            f"mlx5_{number}",
            layer="Ethernet",
            rate="200 Gb/sec (4X HDR)",
            pci=f"0000:{0x3A + number:02x}:00.0",
            gids=roce_gids(),
        )
    return root


def efa(root: Path, ports: int = 4) -> Path:
    """A host with EFA: a link layer that NCCL does not know, and no error counters."""
    for number in range(ports):
        add_device(
            root,
            f"rdmap{number}s0",
            layer="Unknown",
            rate="100 Gb/sec (4X EDR)",
            firmware="0.0.0.0",
            pci=f"0000:{0x5A + number:02x}:00.0",
            gids={},
            counters=False,
        )
    return root


def add_gpus(
    root: Path,
    count: int = 2,
    *,
    driver: str = CLOSED_DRIVER,
    model: str = "NVIDIA H100 80GB HBM3",
    group: str = "",
    acs: int | None = None,
    kernel: str = "6.8.0-45-generic",
    modules: tuple[str, ...] = (),
    cmdline: str = "quiet",
) -> Path:
    """GPUs below one PCIe bridge each; `acs` is its ACS Control, None where it cannot be read."""
    for number in range(count):
        pci = f"0000:{0x8A + number:02x}:00.0"
        function = f"sys/devices/pci0000:00/{_below(pci)}"
        write(root, f"{function}/vendor", "0x10de")
        write(root, f"{function}/class", "0x030200")
        if group:
            write(root, f"{function}/iommu_group/type", group)
        bridge = (root / function).parent
        write(bridge, "class", "0x060400")
        (bridge / "config").write_bytes(config_space(acs))
        link(root, f"sys/bus/pci/devices/{pci}", function)
        write(root, f"proc/driver/nvidia/gpus/{pci}/information", f"Model: \t\t {model}\n")
        write(root, f"dev/nvidia{number}", "")
    write(root, "proc/driver/nvidia/version", driver)
    write(root, "proc/sys/kernel/osrelease", kernel)
    write(root, "proc/cmdline", cmdline)
    write(root, "proc/modules", "".join(f"{m} 16384 0 - Live 0x0\n" for m in ("nvidia", *modules)))
    for module in modules:
        write(root, f"sys/module/{module}/version", "1.0")
    return root


def config_space(acs: int | None) -> bytes:
    """A configuration space whose second extended capability is ACS; only 64 bytes without root."""
    if acs is None:
        return bytes(64)
    space = bytearray(4096)
    space[0x100:0x104] = (0x140 << 20 | 1 << 16 | 0x01).to_bytes(4, "little")
    space[0x140:0x144] = (1 << 16 | 0x0D).to_bytes(4, "little")
    space[0x146:0x148] = acs.to_bytes(2, "little")
    return bytes(space)


def _below(pci: str) -> str:
    """A device below a bridge of its own."""
    return f"0000:00:{pci.split(':')[1][1]}.{pci.split(':')[1][0]}/{pci}"
