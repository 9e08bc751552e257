"""Bonds of made-up hosts, in the words of the kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Finding, Severity, Skip, Where
from nccl_doctor.checks.bonds import Bonds, read_bond
from nccl_doctor.checks.links import HOST_SLOW
from nccl_doctor.judge.causes import explain
from tests.support import fabrics
from tests.support.clusters import make_cluster, outcome, reread
from tests.support.findings import judge, only
from tests.support.observing import observe

CHECK = Bonds()
NAMES = ("nd0", "nd1", "nd2")
LACP = "IEEE 802.3ad Dynamic link aggregation"
HEAD = """Ethernet Channel Bonding Driver: v6.8.0

Bonding Mode: {mode}
{more}MII Status: up
MII Polling Interval (ms): 100
Up Delay (ms): 0
Down Delay (ms): 0
Peer Notification Delay (ms): 0
"""
AD = """
802.3ad info
LACP active: on
LACP rate: fast
Min links: 0
Aggregator selection policy (ad_select): stable
"""
AD_ROOT = """System priority: 65535
System MAC address: 9c:69:b4:00:00:01
Active Aggregator Info:
	Aggregator ID: 1
	Number of ports: 2
	Actor Key: 21
	Partner Key: 32778
	Partner Mac Address: 44:4c:a8:00:00:01
"""
MEMBER = """
Slave Interface: {name}
MII Status: {status}
Speed: {speed}
Duplex: full
Link Failure Count: {failures}
Permanent HW addr: 9c:69:b4:00:00:01
Slave queue ID: 0
"""
AD_MEMBER = """Aggregator ID: {group}
Actor Churn State: none
Partner Churn State: none
Actor Churned Count: 0
Partner Churned Count: 0
"""
AD_MEMBER_ROOT = """details actor lacp pdu:
    system priority: 65535
    system mac address: 9c:69:b4:00:00:01
    port key: 21
    port priority: 255
    port number: 1
    port state: 63
details partner lacp pdu:
    system priority: 127
    system mac address: {switch}
    oper key: 32778
    port priority: 127
    port number: 5
    port state: 63
"""
SWITCH, NOBODY = "44:4c:a8:00:00:01", "00:00:00:00:00:00"


def member(name: str, mbps: int = 25000, group: int = 1, switch: str = "", **fields: Any) -> str:
    """One of an LACP bond; `switch`: what root may read."""
    told = {"status": "up", "speed": f"{mbps} Mbps", "failures": 0, **fields}
    text = (MEMBER + AD_MEMBER).format(name=name, group=group, **told)
    return text + (AD_MEMBER_ROOT.format(switch=switch) if switch else "")


def lacp(*members: str, root: bool = False) -> dict[str, Any]:
    head = HEAD.format(mode=LACP, more="Transmit Hash Policy: layer3+4 (1)\n")
    return {**read_bond(head + AD + (AD_ROOT if root else "") + "".join(members)), "above": []}


def backup(active: str, *speeds: str) -> dict[str, Any]:
    """Members ens1, ens2, …, each with a speed, or `down`."""
    more = f"Primary Slave: None\nCurrently Active Slave: {active}\n"
    text = HEAD.format(mode="fault-tolerance (active-backup)", more=more)
    for number, speed in enumerate(speeds, 1):
        told = {"status": "down", "speed": "Unknown"} if speed == "down" else {"status": "up"}
        told = {"speed": f"{speed} Mbps", "failures": "0", "name": f"ens{number}", **told}
        text += MEMBER.format(**told)
    return {**read_bond(text), "above": []}


DOWN = {"status": "down", "speed": "Unknown", "failures": 1}
WHOLE = lacp(member("ens1"), member("ens2"))
HALF = lacp(member("ens1"), member("ens2", **DOWN))


def cluster(*bonds: dict[str, Any] | None, nic: str = "bond0") -> Cluster:
    """A host for each, whose job uses `nic`; None: it has no bond."""
    made = make_cluster(NAMES[: len(bonds)], nproc=1)
    hosts = []
    for host, bond in zip(made.hosts, bonds, strict=True):
        entry = {"interface": nic, "address": "10.0.0.1"}
        facts = {"interfaces": {ALONE: outcome({"listen": [entry]})}}
        if bond is not None:
            facts[CHECK.name] = {ALONE: outcome({"bonds": {"bond0": bond}})}
        hosts.append(replace(host, facts=reread(facts)))
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    return replace(made, hosts=tuple(hosts), ranks=ranks)


@pytest.mark.parametrize(
    "bond",
    [
        pytest.param(WHOLE, id="lacp"),
        pytest.param(
            lacp(member("ens1", switch=SWITCH), member("ens2", switch=SWITCH), root=True), id="root"
        ),
        pytest.param(lacp(member("ens1")), id="one member"),
        pytest.param(backup("ens1", "25000", "25000"), id="a backup"),
        pytest.param(backup("ens1", "25000", "1000"), id="a slow backup"),
        pytest.param(lacp(member("ens1", **DOWN), member("ens2", **DOWN)), id="down as a whole"),
    ],
)
def test_healthy_bonds(bond: dict[str, Any]) -> None:
    assert judge(CHECK, cluster(bond, bond, bond)) == []


def test_a_member_that_is_down() -> None:
    made = cluster(WHOLE, HALF, None)
    found = only(CHECK, made, "bond-member-down", hosts=["nd1"], interfaces=["ens2"])
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.message == (
        f"bond0 ({LACP}): 1 of 2 members carry data: ens1 25 Gbit/s, ens2 down"
    )
    assert [s.command for s in found.fix.steps] == ["ethtool ens2", "cat /proc/net/bonding/bond0"]


def test_it_explains_a_slow_host() -> None:
    made = cluster(WHOLE, HALF, WHOLE)
    slow = Finding(HOST_SLOW, "12 Gbit/s", Where(hosts=("nd1",)))
    fast = Finding(HOST_SLOW, "12 Gbit/s", Where(hosts=("nd2",)))
    found = {f.where.hosts: f.explained_by for f in explain([slow, fast], made)}
    assert found == {("nd1",): None, ("nd2",): None}
    found = {
        f.where.hosts: f.explained_by
        for f in explain([*judge(CHECK, made), slow, fast], made)
        if f.code == "host-slow"
    }
    assert found == {("nd1",): "bond-member-down", ("nd2",): None}


def test_a_member_that_is_down_everywhere_may_be_so_on_purpose() -> None:
    found = judge(CHECK, cluster(HALF, HALF, HALF))
    assert {(each.code, each.level) for each in found} == {("bond-member-down", Severity.INFO)}


def test_a_switch_that_does_not_aggregate() -> None:
    apart = lacp(member("ens1", switch=SWITCH), member("ens2", group=2, switch=NOBODY), root=True)
    found = only(*(CHECK, cluster(WHOLE, apart), "bond-split"), hosts=["nd1"], interfaces=["ens2"])
    assert found.level is Severity.WARN
    assert found.message.endswith("ens1 in 1, ens2 in 2; no LACP from the switch at ens2")
    mute = lacp(member("ens1"), member("ens2", group=2))  # without root
    found = only(
        *(CHECK, cluster(WHOLE, mute), "bond-split"), hosts=["nd1"], interfaces=["ens1", "ens2"]
    )
    assert found.message.endswith("ens1 in 1, ens2 in 2")
    # A switch that nobody told of the bonds is no purpose of anybody.
    everywhere = judge(CHECK, cluster(mute, mute))
    assert [(f.code, f.level) for f in everywhere] == [("bond-split", Severity.WARN)] * 2


def test_members_of_different_speeds() -> None:
    made = cluster(WHOLE, lacp(member("ens1"), member("ens2", 1000, group=2)))
    found = only(CHECK, made, "bond-speeds-differ", hosts=["nd1"], interfaces=["ens2"])
    assert found.message.endswith("ens1 25 Gbit/s, ens2 1 Gbit/s")


def test_a_backup() -> None:
    slow = backup("ens2", "25000", "1000")
    made = cluster(slow, WHOLE)
    found = only(CHECK, made, "bond-speeds-differ", hosts=["nd0"], interfaces=["ens2"])
    assert found.level is Severity.WARN
    (found,) = judge(CHECK, cluster(backup("ens1", "25000", "down"), WHOLE))
    assert (found.code, found.level) == ("bond-member-down", Severity.INFO)


def test_a_bond_that_the_job_does_not_use_is_worth_a_note() -> None:
    (found,) = judge(CHECK, cluster(WHOLE, HALF, nic="eth9"))
    assert found.level is Severity.INFO


@pytest.mark.parametrize(
    ("above", "nic"), [("bond0.7", "bond0.7"), ("ovs-system", "br-ex"), ("br0", "br0")]
)
def test_what_is_above_a_bond_uses_it(above: str, nic: str) -> None:
    """A VLAN, OpenShift's br-ex, a bridge."""
    (found,) = judge(CHECK, cluster(WHOLE, {**HALF, "above": [above]}, nic=nic))
    assert found.level is Severity.WARN


def test_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="no bonded"):
        observe(Bonds, root=tmp_path)
    text = HEAD.format(mode=LACP, more="Transmit Hash Policy: layer2 (0)\n") + AD
    text += member("ens1", failures=3) + member("ens2", group=2, **DOWN)
    fabrics.write(tmp_path, "proc/net/bonding/bond0", text)
    for path in ("bond0/upper_bond0.7", "bond0.7/upper_br0", "br0/address"):
        fabrics.write(tmp_path, f"sys/class/net/{path}", "")
    (bond,) = observe(Bonds, root=tmp_path)["bonds"].values()
    assert (bond["mode"], bond["hash"], bond["above"]) == (LACP, "layer2", ["bond0.7", "br0"])
    assert bond["members"] == [
        {
            "name": "ens1",
            "up": True,
            "mbps": 25000,
            "failures": 3,
            "aggregate": 1,
            "partner": None,
        },
        {
            "name": "ens2",
            "up": False,
            "mbps": None,
            "failures": 1,
            "aggregate": 2,
            "partner": None,
        },
    ]


def test_a_text_that_no_kernel_writes_gives_no_bond(tmp_path: Path) -> None:
    fabrics.write(tmp_path, "proc/net/bonding/bond0", "\x00: \nSlave Interface: \n")
    facts = observe(Bonds, root=tmp_path)
    assert judge(CHECK, cluster({**facts["bonds"]["bond0"]}, WHOLE)) == []


def test_the_figures_tell_what_a_bond_is_made_of() -> None:
    figures = {f.where.hosts: f.value for f in CHECK.figures(cluster(WHOLE, HALF))}
    assert figures[("nd1",)] == f"{LACP}, layer3+4: ens1 25 Gbit/s, ens2 down"
