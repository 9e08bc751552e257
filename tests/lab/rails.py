"""Made-up RoCE adapters of lab hosts: their sysfs is invented, their interfaces are real.

Each rail is a network of its own. What is read is the real program's: /sys/class/infiniband,
/dev/infiniband, libibverbs.
"""

from __future__ import annotations

import ipaddress

from tests.lab.hosts import Host
from tests.lab.lab import Lab
from tests.support import fabrics
from tests.support.libraries import compiled

# Folders of sysfs cannot be made, so /sys/class is covered by a copy that has two more; likewise
# /dev, which would be the machine's own.
_COVER = """
mkdir "$1/class" "$1/nodes"
mount -t tmpfs tmpfs "$1/class"
for each in /sys/class/*; do
    mkdir "$1/class/${each##*/}"
    mount --rbind "$each" "$1/class/${each##*/}"
done
for each in infiniband infiniband_verbs; do
    mkdir "$1/class/$each"
    mount --bind "$1/sys/class/$each" "$1/class/$each"
done
mount --rbind "$1/class" /sys/class
mount -t tmpfs tmpfs "$1/nodes"
for each in null zero full random urandom; do
    touch "$1/nodes/$each"
    mount --bind "/dev/$each" "$1/nodes/$each"
done
mkdir "$1/nodes/shm" "$1/nodes/infiniband"
mount --rbind /dev/shm "$1/nodes/shm"
mount --bind "$1/dev/infiniband" "$1/nodes/infiniband"
ln -s /proc/self/fd "$1/nodes/fd"
mount --rbind "$1/nodes" /dev
"""


def address(host: Host, rail: int) -> str:
    return f"10.77.{rail}.{host.index + 1}"


def nic(rail: int) -> str:
    return f"eth_mlx5_{rail}"


def add_rails(lab: Lab, count: int = 2) -> dict[str, str]:
    """Give every host `count` adapters; returns the variables with which NCCL would use them."""
    for rail in range(count):
        lab.in_switch("ip", "link", "add", f"rail{rail}", "type", "bridge")
        lab.in_switch("ip", "link", "set", f"rail{rail}", "up")
        for host in lab.hosts:
            port, name = f"r{rail}p{host.index}", nic(rail)
            ends = ("type", "veth", "peer", "name", name, "netns", str(host.init))
            lab.in_switch("ip", "link", "add", port, *ends)
            lab.in_switch("ip", "link", "set", port, "master", f"rail{rail}", "up")
            host.call("ip", "addr", "add", f"{address(host, rail)}/24", "dev", name)
            host.call("ip", "link", "set", name, "up")
    for host in lab.hosts:
        tree = host.etc / "rdma"
        for rail in range(count):
            number = ipaddress.IPv4Address(address(host, rail)).packed.hex()
            fabrics.add_device(
                tree,
                f"mlx5_{rail}",
                layer="Ethernet",
                rate="200 Gb/sec (4X HDR)",
                pci=f"0000:{0x3A + rail:02x}:00.0",
                gids=fabrics.roce_gids(f"{number[:4]}:{number[4:]}"),
            )
        host.call("sh", "-ec", _COVER, "sh", str(tree))
    folder = lab.folder / "verbs"
    folder.mkdir()
    devices = {f"mlx5_{rail}": 5 for rail in range(count)}
    compiled(folder / "libibverbs.so", fabrics.verbs_source(**devices))
    return {"LD_LIBRARY_PATH": str(folder), "NCCL_CONF_FILE": "/nonexistent"}
