"""The container or virtual machine around this process, and the network that it gives."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nccl_doctor.model.commands import shell
from nccl_doctor.model.fixes import Fix, On, Step
from nccl_doctor.toolkit.host import text_of
from nccl_doctor.toolkit.nccl.use_interface import use_interface
from nccl_doctor.toolkit.net.routes import gateways

USER_NAT = "user-nat"
"""What stands for QEMU, VirtualBox and slirp, which put a machine alone into a network and NAT."""
_USER_NETWORK, _USER_GATEWAY = "10.0.2.0/24", "10.0.2.2"


def container_of(root: Path, env: Mapping[str, str]) -> str:
    """`kubernetes`, `podman` or `docker`.

    Empty outside a container, and in one that leaves no such mark (Enroot, Apptainer, LXC).
    """
    if "KUBERNETES_SERVICE_HOST" in env:
        return "kubernetes"
    if os.path.exists(root / "run/.containerenv"):
        return "podman"
    return "docker" if os.path.exists(root / ".dockerenv") else ""


def network_for(runtime: str) -> Fix:
    """The fix by which the containers of several machines reach each other; of virtual
    machines, if it is `USER_NAT` or not known.
    """
    if runtime in ("", USER_NAT):
        line = shell("# VBoxManage modifyvm NAME --nic1 bridged --bridgeadapter1 NIC")
        return Fix(
            text="give the virtual machine an interface in the network of the machines, in libvirt "
            "<interface type='direct'><source dev='NIC' mode='bridge'/></interface>",
            alternatives=[
                Fix(Step(line, note="VirtualBox, on the machine itself", persists=True)),
                Fix(replace(use_interface(), note="of a VPN that joins all hosts")),
            ],
        )
    if runtime == "kubernetes":
        return Fix(
            text="hostNetwork: true in the spec of every pod, or a network plug-in (CNI) that "
            "spans the nodes"
        )
    spans = shell("# docker network create -d overlay --attachable NAME")
    return Fix(
        Step(shell("# {} run --network=host", runtime), On.EVERY, note="on the machine itself"),
        alternatives=[Fix(Step(spans, note="in a swarm: a network that spans the machines"))],
    )


_BRIDGED = {
    "docker": (("172.16.0.0/12", 16), ("192.168.0.0/16", 20)),
    "podman": (("10.88.0.0/16", 16), ("10.89.0.0/16", 24), (_USER_NETWORK, 24)),
    USER_NAT: ((_USER_NETWORK, 24),),
}
"""Runtime → networks that it gives to bridges of one machine by itself, and their lengths: docker's
default-address-pools, podman's default_subnet and default_subnet_pools (containers.conf).
"""


def given_by(runtime: str) -> str:
    """Words for a host with an address that this runtime chose."""
    if runtime == USER_NAT:
        return f"a virtual machine behind an address translation (NAT), {_USER_GATEWAY}"
    return "a container behind a bridge of its own machine"


def alike(runtime: str) -> str:
    """Words for hosts that have the same addresses, as this runtime chose them."""
    return "virtual machines behind NAT" if runtime == USER_NAT else "containers behind bridges"


def has_user_nat(address: str, root: Path) -> bool:
    """True if an address is one that QEMU and VirtualBox give to every virtual machine behind NAT.

    VirtualBox' "NAT network", in which machines do reach each other, has another gateway.
    """
    try:
        inside = ipaddress.ip_address(address) in ipaddress.ip_network(_USER_NETWORK)
    except ValueError:
        return False
    return inside and any(each.address == _USER_GATEWAY for each in gateways(root))


def is_bridged(runtime: str, network: str) -> bool:
    """True if a runtime gives containers this network (`172.17.0.0/16`) behind a bridge of one
    machine, unless somebody has chosen networks of their own; or a virtual machine its own.
    """
    try:
        net = ipaddress.ip_network(network)
    except ValueError:
        return False
    return isinstance(net, ipaddress.IPv4Network) and any(
        net.prefixlen == length and net.subnet_of(ipaddress.IPv4Network(pool))
        for pool, length in _BRIDGED.get(runtime, ())
    )


def is_handed_in(interface: str, root: Path) -> bool:
    """True if an interface is one end of a pair (veth) or a tap, as runtimes make for a container.

    The address there is the runtime's choice. An interface of the machine has a device; MACVLAN,
    IPVLAN and VLAN name their type.
    """
    folder = root / "sys/class/net" / interface
    if os.path.exists(folder / "device") or "DEVTYPE=" in text_of(folder / "uevent"):
        return False
    pair = text_of(folder / "iflink"), text_of(folder / "ifindex")
    return os.path.exists(folder / "tun_flags") or (all(pair) and pair[0] != pair[1])
