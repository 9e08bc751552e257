"""What hosts lose themselves while the links are measured."""

from __future__ import annotations

from pathlib import Path

from nccl_doctor.api import Finding, Severity
from nccl_doctor.judge.causes import explain
from nccl_doctor.toolkit.peers.drops import grown, read_counts
from tests.support import fabrics
from tests.support.exchanges import World, loud
from tests.support.rows import each_row

SOFTNET = "{:08x} {:08x} 00000000 00000000 00000000 00000000 00000000\n"


def roots(found: list[Finding], world: World) -> dict[str, tuple[str, ...]]:
    """Code of each finding that nothing explains → its hosts."""
    said = explain(found, world.cluster())
    return {each.code: each.where.hosts for each in said if each.explained_by is None}


def test_damaged_packets_name_the_end_of_a_slow_link() -> None:
    world = World(3).slow([("nd0", "nd1")])
    grew = {"eth0": {"rx_crc_errors": 40, "rx_packets": 90000}}
    world.host_facts["nd1"]["drops"] = grew
    found = world.judge()
    assert roots(found, world) == {"nic-errors-rising": ("nd1",)}
    named = next(each for each in found if each.code == "nic-errors-rising")
    assert (named.level, named.where.interfaces) == (Severity.WARN, ("eth0",))
    # Both tries count.
    assert named.message == "eth0: rx_crc_errors +80 while the hosts were examined"
    assert named.fix.startswith("ethtool -S eth0 | grep -i err ")


def test_damaged_packets_alone_are_a_risk() -> None:
    world = World(2)
    world.host_facts["nd1"]["drops"] = {"eth0": {"rx_frame_errors": 3, "rx_packets": 90000}}
    (found,) = world.judge()
    assert (found.code, found.where.hosts) == ("nic-errors-rising", ("nd1",))


@each_row(
    ("grew", "fix"),
    [
        ({"eth0": {"rx_missed_errors": 150, "rx_packets": 90000}}, "ethtool -G eth0 rx 4096"),
        ({"eth0": {"rx_dropped": 150, "rx_packets": 90000}}, "ethtool -S eth0"),
        ({"": {"softnet dropped": 150}, "eth0": {"rx_packets": 90000}}, "netdev_max_backlog"),
    ],
)
def test_a_host_that_drops_what_arrives_explains_its_slow_links(
    grew: dict[str, dict[str, int]], fix: str
) -> None:
    world = World(4)
    world.slow(world.of("nd1", "in"))
    world.host_facts["nd1"]["drops"] = grew
    found = world.judge()
    assert roots(found, world) == {"packets-dropped": ("nd1",)}
    assert fix in next(each.fix for each in found if each.code == "packets-dropped")


@each_row(
    ("end", "grew"),
    [
        ("nd1", {"eth0": {"rx_dropped": 9, "rx_packets": 9000}}),
        ("nd1", {"eth0": {"rx_dropped": 150, "rx_packets": 900_000}}),
        ("nd1", {}),
        # It sends on that link, and receives nothing there.
        ("nd0", {"eth0": {"rx_dropped": 1500, "rx_packets": 9000}}),
    ],
)
def test_little_or_elsewhere_explains_nothing(end: str, grew: dict[str, dict[str, int]]) -> None:
    world = World(4).slow([("nd0", "nd1")])
    world.host_facts[end]["drops"] = grew
    assert {each.code for each in world.judge()} == {"link-slow"}


def test_a_healthy_host_may_drop_packets_of_others() -> None:
    """Protocols that it does not speak (LLDP, spanning tree), a queue that other traffic fills."""
    world = World(3)
    grew = {"eth0": {"rx_dropped": 500, "rx_crc_errors": 1, "rx_packets": 9000}}
    world.host_facts["nd2"]["drops"] = {**grew, "": {"softnet dropped": 900}}
    assert loud(world.judge()) == []


def test_only_the_members_of_a_bond_are_counted(tmp_path: Path) -> None:
    assert read_counts("eth0", tmp_path)[""] == {"softnet dropped": 0}
    nics = "sys/class/net"
    for link in ("bond0.7/lower_bond0", "bond0/lower_ens1", "bond0/lower_ens2"):
        fabrics.write(tmp_path, f"{nics}/{link}", "")
    for nic in ("bond0.7", "bond0", "ens1", "ens2"):
        fabrics.write(tmp_path, f"{nics}/{nic}/statistics/rx_packets", "1000")
        fabrics.write(tmp_path, f"{nics}/{nic}/statistics/rx_crc_errors", "7")
    fabrics.write(tmp_path, "proc/net/softnet_stat", SOFTNET.format(99, 2) * 2)
    before = read_counts("bond0.7", tmp_path)
    fabrics.write(tmp_path, f"{nics}/ens2/statistics/rx_crc_errors", "12")
    fabrics.write(tmp_path, f"{nics}/ens1/statistics/rx_crc_errors", "0")  # it was reset
    fabrics.write(tmp_path, f"{nics}/bond0/statistics/rx_crc_errors", "12")
    fabrics.write(tmp_path, f"{nics}/bond0.7/statistics/rx_packets", "1500")
    fabrics.write(tmp_path, "proc/net/softnet_stat", SOFTNET.format(99, 0x12) * 2)
    assert grown(before, read_counts("bond0.7", tmp_path)) == {
        "bond0.7": {"rx_packets": 500},
        "ens2": {"rx_crc_errors": 5},
        "": {"softnet dropped": 32},
    }
