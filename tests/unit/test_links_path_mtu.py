"""Paths between made-up hosts whose packets are smaller than their interfaces could have them."""

from __future__ import annotations

from nccl_doctor.api import Severity
from tests.support.exchanges import World, both, only, record
from tests.support.rows import each_row

JUMBO, USUAL = 9000, 1500


def world(count: int, mtu: int = JUMBO, carried: int = 0) -> World:
    """Hosts with one MTU; `carried`: bytes of the largest packet on every path, if it is less."""
    made = World(count)
    for name in made.names:
        made.host_facts[name] = {"mtu": mtu}
    return carry(made, made.pairs, carried or mtu)


def carry(made: World, links: list[tuple[str, str]], size: int) -> World:
    return made.change(links, tcp={**record()["tcp"], "mss": size - 52})


def test_a_path_whose_packets_are_smaller_than_those_of_the_others() -> None:
    found = only(carry(world(4), both("nd0", "nd2"), USUAL).judge(), "path-mtu-low")
    assert found.level is Severity.WARN
    assert (found.where.hosts, found.where.links) == ((), tuple(both("nd0", "nd2")))
    assert found.message == "packets of at most 1500 bytes; the interfaces have an MTU of 9000"
    assert ": tracepath -n 192.168.77." in found.fix


def test_a_host_behind_a_smaller_mtu() -> None:
    made = world(4)
    found = only(carry(made, made.of("nd1"), USUAL).judge(), "path-mtu-low")
    assert (found.where.hosts, found.where.links) == (("nd1",), ())


def test_the_network_as_a_whole_may_be_meant_so() -> None:
    found = only(world(3, carried=USUAL).judge(), "path-mtu-low")
    assert found.level is Severity.INFO
    assert found.where.hosts == ("nd0", "nd1", "nd2")


@each_row(
    ("mtu", "carried"),
    [
        (9000, 9000),
        (9001, 8500),  # a transit gateway of AWS
        (1500, 1420),  # WireGuard, and pods in VXLAN, Geneve or MACsec
        (1500, 1350),
        (1460, 1460),  # GCE
        (65520, 65520),  # IPoIB, connected
        (0, 1500),  # not known, as in older reports
    ],
)
def test_healthy_paths(mtu: int, carried: int) -> None:
    assert world(3, mtu, carried).judge() == []


def test_hosts_of_different_mtu_send_what_both_can_take() -> None:
    made = world(3, carried=USUAL)
    made.host_facts["nd1"]["mtu"] = USUAL
    carry(made, both("nd0", "nd2"), JUMBO)
    assert made.judge() == []


def test_ipv6_has_longer_headers() -> None:
    made = world(2, USUAL)
    for number, name in enumerate(made.names):
        made.host_facts[name]["address"] = f"fd00::{number}"
    tcp = {**record()["tcp"], "mss": 1280 - 72}
    found = only(made.change(made.pairs, tcp=tcp).judge(), "path-mtu-low")
    assert found.message.startswith("packets of at most 1280 bytes")
