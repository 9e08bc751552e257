"""Containers, by the marks of their runtimes and by their interfaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from nccl_doctor.toolkit.containers import (
    USER_NAT,
    container_of,
    has_user_nat,
    is_bridged,
    is_handed_in,
)
from tests.support import fabrics


def test_the_marks_of_runtimes(tmp_path: Path) -> None:
    assert container_of(tmp_path, {}) == ""
    fabrics.write(tmp_path, ".dockerenv", "")
    assert container_of(tmp_path, {}) == "docker"
    fabrics.write(tmp_path, "run/.containerenv", "")
    assert container_of(tmp_path, {}) == "podman"
    assert container_of(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "kubernetes"


def nic(root: Path, name: str, **files: str) -> bool:
    for file, text in {
        "ifindex": "5",
        "iflink": "5",
        "uevent": f"INTERFACE={name}",
        **files,
    }.items():
        fabrics.write(root, f"sys/class/net/{name}/{file}", text)
    return is_handed_in(name, root)


def test_the_interfaces_that_a_runtime_makes(tmp_path: Path) -> None:
    assert nic(tmp_path, "eth0", iflink="6")
    assert nic(tmp_path, "tap0", tun_flags="0x1002")


def test_other_interfaces_and_those_that_are_not_there(tmp_path: Path) -> None:
    assert not nic(tmp_path, "eth0")
    assert not nic(tmp_path, "eth1", iflink="6", uevent="DEVTYPE=macvlan\nINTERFACE=eth1")
    fabrics.write(tmp_path, "sys/class/net/eth2/device/vendor", "0x15b3")
    assert not nic(tmp_path, "eth2", iflink="6")
    assert not is_handed_in("eth9", tmp_path)


@pytest.mark.parametrize(
    ("runtime", "network", "bridged"),
    [
        ("docker", "172.17.0.0/16", True),
        ("docker", "172.31.0.0/16", True),
        ("docker", "192.168.16.0/20", True),
        ("docker", "192.168.77.0/24", False),
        ("docker", "10.88.0.0/16", False),
        ("podman", "10.88.0.0/16", True),
        ("podman", "10.89.3.0/24", True),
        ("podman", "172.17.0.0/16", False),
        ("kubernetes", "172.17.0.0/16", False),
        ("docker", "fd00::/64", False),
        ("docker", "", False),
    ],
)
def test_networks_that_runtimes_give_to_bridges(runtime: str, network: str, bridged: bool) -> None:
    assert is_bridged(runtime, network) is bridged


def test_a_virtual_machine_behind_the_nat_of_qemu_is_known_by_its_gateway(tmp_path: Path) -> None:
    routes = tmp_path / "proc/net/route"
    routes.parent.mkdir(parents=True)
    for gateway, has in (("0202000A", True), ("0102000A", False)):  # .2 and, of a NAT network, .1
        routes.write_text(f"Iface\nenp0s3 00000000 {gateway} 0003 0 0 100 00000000 0 0 0\n")
        assert has_user_nat("10.0.2.15", tmp_path) is has
        assert not has_user_nat("10.0.3.15", tmp_path)
        assert not has_user_nat("fe80::1", tmp_path)
    assert is_bridged(USER_NAT, "10.0.2.0/24")
