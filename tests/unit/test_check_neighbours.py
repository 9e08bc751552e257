"""Neighbours of made-up hosts: room for them, and who answers for whom."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Context, Launch, Severity
from nccl_doctor.checks.firewall import Firewall
from nccl_doctor.checks.neighbours import Neighbours
from nccl_doctor.judge.causes import explain
from tests.support import fabrics
from tests.support.clusters import outcome, reread
from tests.support.findings import judge, only
from tests.support.peers import DROPPED, OK, REFUSED, World, nic
from tests.support.rows import each_row

CHECK = Neighbours()
STAT = "entries  allocs  table_fulls\n{0:08x} 00000001 {1:08x}\n{0:08x} 00000002 {1:08x}\n"


def mac(host: int, number: int = 0) -> str:
    return f"9c:69:b4:00:{number:02x}:{host:02x}"


STRANGER = "52:54:00:12:34:56"


def table(limit: int | None = 1024, entries: int | None = 40, overflows: int = 0) -> dict[str, Any]:
    return {"limit": limit, "entries": entries, "overflows": overflows}


def facts(index: int, *, ipv4: Any = None, ipv6: Any = None, **nics: Any) -> dict[str, Any]:
    return {
        "tables": {"ipv4": ipv4 or table(), "ipv6": ipv6 or table()},
        "nics": {"eth0": {"mac": mac(index), "above": []}, **nics},
        "arp": {"arp_ignore": 0, "arp_announce": 0},
    }


def cluster(world: World, **by_host: Any) -> Cluster:
    made = world.cluster()
    hosts = {}
    for index, host in enumerate(made.hosts):
        seen = by_host.get(host.name or "", facts(index))
        hosts[host.id] = replace(
            host, facts=reread({**host.facts, CHECK.name: {ALONE: outcome(seen)}})
        )
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    return replace(made, hosts=tuple(hosts.values()), ranks=ranks)


def answered(world: World, caller: str, listener: str, by: str) -> World:
    (entry,) = world.facts[caller]["peers"][str(world.seat(listener))]
    entry["answers"] = by
    return world


# Room ---------------------------------------------------------------------------------------------


def rails(world: World, count: int, prefix: int = 16) -> World:
    """Every host gets so many interfaces more, rail by rail in one network."""
    for index, name in enumerate(world.names):
        for rail in range(count):
            more = nic(f"eth{rail + 1}", f"10.{rail}.0.{index + 1}")
            more["subnets"] = [
                f"10.{rail}.0.0/{prefix}" if prefix < 32 else f"10.{rail}.0.{index}/32"
            ]
            world.facts[name]["interfaces"].append(more)
    return world


def test_more_neighbours_than_the_kernel_remembers() -> None:
    small = {f"nd{n}": facts(n, ipv4=table(32)) for n in range(8)}
    found = only(
        CHECK, cluster(rails(World(8), 4), nd3=small["nd3"]), "neighbour-table-small", hosts=["nd3"]
    )
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.message == (
        "room for 32 IPv4 neighbours (gc_thresh3); the job has 35 other addresses in its networks"
    )
    assert found.fix == (
        "sysctl -w net.ipv4.neigh.default.gc_thresh3=256 net.ipv4.neigh.default.gc_thresh2=128 "
        "net.ipv4.neigh.default.gc_thresh1=32"
    )


def test_hosts_that_did_not_come_count_too() -> None:
    made = cluster(World(4), nd0=facts(0, ipv4=table(64)))
    assert judge(CHECK, made) == []
    only(CHECK, replace(made, nnodes=100), "neighbour-table-small", hosts=["nd0"])


@each_row(
    ("world", "seen"),
    [
        (rails(World(8), 4), table(1024)),
        (rails(World(8), 4), table(None, None)),  # a container
        (rails(World(8), 4, prefix=32), table(16)),  # /32 addresses: one neighbour, the gateway
        (World(2), table(1024, 1000, 0)),  # permanent entries of an overlay have no limit
        (World(2), table(1024, 60, 7)),  # long ago
    ],
)
def test_room_enough(world: World, seen: dict[str, Any]) -> None:
    assert judge(CHECK, cluster(world, nd1=facts(1, ipv4=seen))) == []


def test_a_table_that_is_full_now_and_has_overflowed() -> None:
    full = facts(1, ipv6=table(1024, 1010, 7))
    found = only(CHECK, cluster(World(2), nd1=full), "neighbour-table-small", hosts=["nd1"])
    assert found.message.startswith("room for 1024 IPv6 neighbours")
    assert "net.ipv6.neigh.default.gc_thresh3=4096" in found.fix


def test_one_host_has_no_neighbours() -> None:
    full = facts(0, ipv4=table(1024, 1010, 7))
    assert judge(CHECK, cluster(World(1), nd0=full)) == []


# Entries made by hand ---------------------------------------------------------------------------


def entered(world: World, caller: str, listener: str, by: str) -> World:
    (entry,) = world.facts[caller]["peers"][str(world.seat(listener))]
    entry["fixed"] = [by, "eth0"]
    return world.fail([(caller, listener), (listener, caller)], DROPPED)


def test_an_entry_that_leads_to_another_machine_is_the_fault_of_the_host_that_has_it() -> None:
    for by, others in ((STRANGER, 3), (mac(2), 3), (STRANGER, 2)):
        made = cluster(entered(World(others), "nd1", "nd0", by))
        where = {"hosts": ["nd1"], "links": [("nd1", "nd0")], "interfaces": ["eth0"]}
        found = only(CHECK, made, "address-answered-by-another", **where)
        assert f"192.168.77.1 is at {by}" in found.message
        assert found.confidence is (Confidence.CERTAIN if others > 2 else Confidence.LIKELY)
        (step,) = found.fix.steps
        assert (step.on, step.command) == (("nd1",), "ip neigh del 192.168.77.1 dev eth0")
        assert step.undo == (f"ip neigh replace 192.168.77.1 dev eth0 lladdr {by} nud permanent")


def test_an_entry_for_another_interface_of_the_right_host_is_good() -> None:
    nics = {"eth0": {"mac": mac(0), "above": []}, "eth1": {"mac": STRANGER, "above": []}}
    made = cluster(entered(World(3), "nd1", "nd0", STRANGER), nd0=facts(0, **nics))
    assert judge(CHECK, made) == []


def test_an_entry_through_which_calls_pass_is_good() -> None:
    world = entered(World(3), "nd1", "nd0", STRANGER)
    world.fail([("nd1", "nd0"), ("nd0", "nd1")], OK)
    assert judge(CHECK, cluster(world)) == []


# Who answers --------------------------------------------------------------------------------------


def test_the_other_interface_of_a_host_answers() -> None:
    world = answered(World(3), "nd0", "nd1", mac(1, 1))
    seen = facts(1, eth1={"mac": mac(1, 1), "above": []})
    found = only(
        *(CHECK, cluster(world, nd1=seen), "arp-answered-by-other-nic"),
        hosts=["nd1"],
        interfaces=["eth0"],
    )
    # NCCL would send data to both of them.
    assert found.level is Severity.WARN
    assert found.message == "eth1 answers for 192.168.77.2 of eth0"
    assert found.fix == (
        "sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2; "
        "on the other hosts: ip neigh flush to 192.168.77.2; "
        "or for the next boot: the same in /etc/sysctl.d/90-arp.conf"
    )
    assert found.evidence["arp_ignore"] == 0


def test_which_is_worth_a_note_where_that_interface_carries_no_data() -> None:
    world = answered(World(3, backend="gloo"), "nd0", "nd1", mac(1, 1))
    seen = facts(1, eth1={"mac": mac(1, 1), "above": []})
    (found,) = judge(CHECK, cluster(world, nd1=seen))
    assert found.level is Severity.INFO


def test_another_machine_has_the_address() -> None:
    world = answered(World(3).fail([("nd0", "nd1")], REFUSED), "nd0", "nd1", STRANGER)
    made = cluster(world)
    found = only(*(CHECK, made, "address-answered-by-another"), hosts=["nd1"], interfaces=["eth0"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert found.message == (f"{STRANGER} answers for 192.168.77.2, which no host of the job has")
    assert found.fix.startswith("on nd0: ip neigh show 192.168.77.2 ")
    every = explain([*judge(CHECK, made), *judge(Firewall(), made)], made)
    assert {each.code for each in every if each.explained_by is None} == {found.code}


def test_another_host_of_the_job_has_the_address() -> None:
    world = answered(World(3).fail([("nd0", "nd1")], DROPPED), "nd0", "nd1", mac(2))
    found = only(
        *(CHECK, cluster(world), "address-answered-by-another"),
        hosts=["nd1", "nd2"],
        interfaces=["eth0"],
    )
    assert found.message.endswith("which is nd2")


def bond(*members: str) -> dict[str, Any]:
    """Members of bond0 that have hardware addresses of their own (balance-alb)."""
    nics = {name: {"mac": mac(1, n), "above": ["bond0"]} for n, name in enumerate(members, 1)}
    return {"bond0": {"mac": mac(1), "above": []}, **nics}


def cloud(count: int, *failed: tuple[str, str]) -> World:
    """Azure answers with one hardware address for all hosts."""
    world = World(count).fail(failed, DROPPED)
    for a in world.names:
        for b in world.names:
            if a != b:
                answered(world, a, b, "12:34:56:78:9a:bc")
    return world


def test_members_of_a_bond_answer_for_it() -> None:
    world = answered(World(3), "nd0", "nd1", mac(1, 1))
    (entry,) = world.facts["nd0"]["peers"][str(world.seat("nd1"))]
    entry["interface"] = "bond0"
    assert judge(CHECK, cluster(world, nd1=facts(1, **bond("ens1", "ens2")))) == []


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(World(3), id="all answer for themselves"),
        pytest.param(cloud(3), id="cloud"),
        pytest.param(cloud(3, ("nd0", "nd1")), id="cloud and firewall"),
        pytest.param(cloud(2, ("nd0", "nd1")), id="two hosts in a cloud"),
        pytest.param(answered(World(3), "nd0", "nd1", STRANGER), id="a gateway that works"),
    ],
)
def test_nobody_else_answers(world: World) -> None:
    assert judge(CHECK, cluster(world)) == []


# Reading ------------------------------------------------------------------------------------------


def test_what_is_read(tmp_path: Path) -> None:
    fabrics.write(tmp_path, "proc/sys/net/ipv4/neigh/default/gc_thresh3", "2048\n")
    fabrics.write(tmp_path, "proc/sys/net/ipv4/conf/all/arp_ignore", "1\n")
    fabrics.write(tmp_path, "proc/net/stat/arp_cache", STAT.format(300, 2))
    fabrics.write(tmp_path, "proc/net/stat/ndisc_cache", "entries allocs\n")
    fabrics.write(tmp_path, "sys/class/net/lo/address", "9c:69:b4:00:00:01\n")
    fabrics.write(tmp_path, "sys/class/net/lo/upper_bond0", "")
    context = Context(launch=Launch(), env={}, root=tmp_path)
    assert json.loads(json.dumps(CHECK.observe(context))) == {
        "tables": {
            "ipv4": {"limit": 2048, "entries": 300, "overflows": 4},
            "ipv6": {"limit": None, "entries": None, "overflows": None},
        },
        "nics": {"lo": {"mac": "9c:69:b4:00:00:01", "above": ["bond0"]}},
        "arp": {"arp_ignore": 1, "arp_announce": None},
    }


# Two rails in one network -------------------------------------------------------------------------

NET = "10.0.0.0/16"


def together(
    *, back: bool | None = False, ignore: int = 0, sockets: bool = True, backend: str = "nccl"
) -> Cluster:
    """nd1 has two NICs in one network, over which NCCL sends, as the values say."""
    world = World(2, backend)
    world.facts["nd1"]["nccl_data"] = "sockets" if sockets else "verbs"
    picks = [("eth1", "10.0.0.1"), ("eth2", "10.0.0.2")]
    world.facts["nd1"]["choices"]["nccl-sockets"]["picks"] = [list(pick) for pick in picks]
    entries = [
        ["eth1", "10.0.0.1", 0, None, True, ignore, 0],
        ["eth2", "10.0.0.2", 0, None, back, ignore, 0],
    ]
    made = cluster(world)
    host = made.hosts[1]
    seen = {"rp_filter": {ALONE: outcome({"shared": {NET: entries}})}}
    host = replace(host, facts=reread({**host.facts, **seen}))
    ranks = tuple(
        replace(rank, host=host) if rank.host.id == host.id else rank for rank in made.ranks
    )
    return replace(made, hosts=(made.hosts[0], host), ranks=ranks)


def test_two_data_interfaces_in_one_network_that_nothing_keeps_apart() -> None:
    found = only(CHECK, together(), "arp-flux", hosts=["nd1"], interfaces=["eth1", "eth2"])
    assert found.level is Severity.WARN
    assert "what is sent from 10.0.0.2 does not leave by eth2" in found.message
    assert found.fix.startswith("sysctl -w net.ipv4.conf.all.arp_ignore=1 ")
    assert "/etc/sysctl.d/" in found.fix
    assert "ip rule add from 10.0.0.2 table 101" in found.fix


def test_rails_of_roce_in_one_network_count_and_others_do_not() -> None:
    made = together(sockets=False)
    assert judge(CHECK, made) == []
    rails = [{"nic": nic, "address": "10.0.0.9"} for nic in ("eth1", "eth2")]
    facts = {**made.hosts[1].facts, "rails": {ALONE: outcome({"rails": rails})}}
    host = replace(made.hosts[1], facts=facts)
    ranks = tuple(replace(r, host=host) if r.host.id == 1 else r for r in made.ranks)
    made = replace(made, hosts=(made.hosts[0], host), ranks=ranks)
    only(CHECK, made, "arp-flux", hosts=["nd1"], interfaces=["eth1", "eth2"])


@pytest.mark.parametrize(
    "well", [{"back": True}, {"back": None}, {"ignore": 1}, {"backend": "gloo"}]
)
def test_rails_in_one_network_that_are_kept_apart_are_well(well: dict[str, Any]) -> None:
    assert judge(CHECK, together(**well)) == []
