"""Default routes, as the kernel writes them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from nccl_doctor.toolkit.firewall.portrules import whom_to_admit
from nccl_doctor.toolkit.hosts import likely_address
from nccl_doctor.toolkit.net.interfaces import is_alone, leads_inside
from nccl_doctor.toolkit.net.routes import (
    Gateway,
    dead_route,
    gateways,
    source_of,
    source_towards,
)
from tests.support.rows import each_row

ROUTE = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
wlan0\t00000000\t0102A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0
ens4\t00000000\t0100800A\t0003\t0\t0\t100\t00000000\t0\t0\t0
ens4\t0100800A\t00000000\t0005\t0\t0\t100\tFFFFFFFF\t0\t0\t0
"""
ZEROS = "0" * 32
ROUTE6 = f"""fd000000000000000000000000000000 40 {ZEROS} 00 {ZEROS} 00000100 1 0 00000001     ens4
{ZEROS} 00 {ZEROS} 00 fe800000000000000000000000000001 00000400 1 0 00450003     ens4
{ZEROS} 00 {ZEROS} 00 {ZEROS} ffffffff 1 0 00200200       lo
"""


def test_gateways_by_family_and_metric(tmp_path: Path) -> None:
    assert gateways(tmp_path) == []
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/route").write_text(ROUTE)
    (tmp_path / "proc/net/ipv6_route").write_text(ROUTE6)
    assert gateways(tmp_path) == [
        Gateway(100, "ens4", "10.128.0.1"),
        Gateway(600, "wlan0", "192.168.2.1"),
        Gateway(0x400, "ens4", "fe80::1"),
    ]


@pytest.mark.parametrize(
    ("network", "alone"),
    [("10.0.0.1/32", True), ("10.0.0.0/31", False), ("fd00::1/128", True), ("fd00::/64", False)],
)
def test_an_address_that_stands_alone(network: str, alone: bool) -> None:
    assert is_alone(network) == alone


DEAD = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
eth0 00000000 FE00000A 0003 0 0 100 00000000 0 0 0
eth0 0000000A 00000000 0001 0 0 100 00FFFFFF 0 0 0
* 0700000A 00000000 0205 0 0 0 FFFFFFFF 0 0 0
* 0001000A 00000000 0201 0 0 0 00FFFFFF 0 0 0
eth1 0901000A 00000000 0005 0 0 0 FFFFFFFF 0 0 0
short
"""


@each_row(
    ("address", "number", "route"),
    [
        ("10.0.0.7", errno.EACCES, "prohibit 10.0.0.7"),
        ("10.0.0.7", errno.EINVAL, "blackhole 10.0.0.7"),
        ("10.0.1.8", errno.EHOSTUNREACH, "unreachable 10.0.1.0/24"),
        ("10.0.1.8", errno.ENETUNREACH, "throw 10.0.1.0/24"),
        ("10.0.1.9", errno.EACCES, ""),  # one that is more exact has an interface
        ("10.0.0.8", errno.EACCES, ""),  # a rule of a firewall
        ("10.0.0.7", None, ""),
        ("fd00::7", errno.EACCES, ""),
    ],
)
def test_a_route_that_leads_nowhere(
    address: str, number: int | None, route: str, tmp_path: Path
) -> None:
    (tmp_path / "proc/net").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc/net/route").write_text(DEAD)
    assert dead_route(address, number, tmp_path) == route
    assert dead_route(address, number, tmp_path / "nowhere") == ""


def test_the_own_address_is_nobody_to_admit() -> None:
    assert whom_to_admit("10.128.0.2", "10.128.0.0/20") == ["10.128.0.0/20"]
    assert whom_to_admit("10.128.0.2", "") == ["NETWORK-OF-THE-HOSTS"]
    assert ":" in whom_to_admit("fd00::2", "")[0]  # nft wants ip6 there


def test_the_own_address_towards_a_peer_needs_no_packet() -> None:
    assert source_of("127.0.0.1") == ("127.0.0.1", None)
    assert source_towards("127.0.0.1", 2.0) == ""  # nobody else can use it
    assert source_towards(None, 2.0) == ""
    assert source_towards("no-such-host.invalid", 2.0) == ""


REAL = ("eth0", ["10.0.0.5"])


@each_row(
    "other",
    [
        *("docker0", "br-0123456789ab", "virbr0", "cni0", "flannel.1", "cali01ab", "cilium_host"),
        *("lxc1f2e", "podman1", "cni-podman0", "wg0", "tailscale0", "nodelocaldns", "kube-ipvs0"),
        *("tmfifo_net0", "vxlan.calico", "tunl0", "tun0", "tap3", "veth1", "ovn-k8s-mp0"),
    ],
)
def test_a_real_interface_comes_before_tunnels_and_those_of_containers(other: str) -> None:
    assert likely_address([(other, ["192.168.100.1"]), REAL]) == ("eth0", "10.0.0.5")


@pytest.mark.parametrize("real", ["br-ex", "br0", "bond0", "ens4", "ib0", "vmbr0", "bridge0"])
def test_a_bridge_that_a_person_named_holds_the_address_of_the_host(real: str) -> None:
    nics = [("cilium_host", ["10.1.0.1"]), (real, ["10.0.0.5"])]
    assert likely_address(nics) == (real, "10.0.0.5")
    assert not leads_inside(real)


def test_the_way_to_the_master_comes_before_every_name() -> None:
    nics = [REAL, ("wg0", ["10.9.0.5"]), ("docker0", ["172.17.0.1"])]
    assert likely_address(nics, "10.9.0.5") == ("wg0", "10.9.0.5")
    assert likely_address(nics, "10.7.0.5") == ("eth0", "10.0.0.5")
    # MASTER_ADDR=172.17.0.1 is a mistake, and no reason to take that bridge for the network.
    assert likely_address(nics, "172.17.0.1") == ("eth0", "10.0.0.5")
