"""Containers, by the marks of their runtimes and by their interfaces."""

from __future__ import annotations

from pathlib import Path

from nccl_doctor.toolkit.containers import container_of, is_handed_in
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
