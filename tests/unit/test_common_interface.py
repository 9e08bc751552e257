"""The interface that fixes name: one by which every pair of hosts was reached, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nccl_doctor.api import ALONE, Cluster, Finding, Step
from nccl_doctor.checks.firewall import Firewall
from nccl_doctor.checks.interfaces import Interfaces
from nccl_doctor.checks.own_name import OwnName
from nccl_doctor.toolkit.peers.common_interface import NONE_FOUND, common_interface, interface_fix
from tests.support.clusters import with_round
from tests.support.findings import judge
from tests.support.peers import DROPPED, OK, World, choice, nic

ROLES = ["nccl-sockets"]
Cards = Mapping[str, Mapping[str, str]]
"""Host → interface → its address, in a network of /24."""


def cabled(cards: Cards, *, silent: Sequence[str] = (), backend: str = "nccl") -> World:
    """Hosts whose addresses are reached from where the caller has one in the same network.

    `silent`: addresses that nobody reaches.
    """
    world = World(len(cards), backend)
    for name, own in cards.items():
        facts = world.facts[name]
        facts["interfaces"] = [nic(each, address) for each, address in own.items()]
        facts["listen"] = [
            {"interface": each, "address": address, "roles": ROLES} for each, address in own.items()
        ]
        nets = {address.rpartition(".")[0] for address in own.values()}
        for other, theirs in cards.items():
            if other != name:
                facts["peers"][str(world.seat(other))] = [
                    {
                        "interface": each,
                        "address": address,
                        "roles": ROLES,
                        "port": 40000,
                        "source": next(iter(own.values())),
                        "attempts": [OK]
                        if address.rpartition(".")[0] in nets and address not in silent
                        else [DROPPED] * 2,
                    }
                    for each, address in theirs.items()
                ]
    return world


def with_sources(made: Cluster, sources: Mapping[str, str]) -> Cluster:
    """The own address of hosts on the way to MASTER_ADDR, as check `own_name` says it."""
    told = {host: {"source": address} for host, address in sources.items()}
    return with_round(made, "own_name", ALONE, told)


def both_names(count: int = 3) -> dict[str, dict[str, str]]:
    return {
        f"nd{i}": {"eth0": f"192.168.77.{i + 1}", "ib0": f"10.0.0.{i + 1}"} for i in range(count)
    }


RING = {
    "nd0": {"eth1": "10.0.1.1", "eth2": "10.0.3.1"},
    "nd1": {"eth1": "10.0.2.1", "eth2": "10.0.1.2"},
    "nd2": {"eth1": "10.0.3.2", "eth2": "10.0.2.2"},
}
"""A cable from each host to each other one, and no network for all."""


def steps_of(found: Finding) -> list[Step]:
    fix = found.fix or found.kind.fix
    ways = [fix, *getattr(fix, "alternatives", ())]
    return [step for way in ways for step in getattr(way, "steps", ())]


def test_on_a_ring_of_cables_no_interface_is_proposed() -> None:
    world = cabled(RING)
    assert common_interface(world.cluster()) == {}
    found = world.judge()
    assert found
    assert {each.code for each in found} <= {"interface-unroutable", "interface-differs"}
    for each in found:
        assert (each.fix or each.kind.fix) == NONE_FOUND
        assert steps_of(each) == []


def test_the_network_of_the_master_comes_first_and_then_the_fastest() -> None:
    world = cabled(both_names())
    made = world.cluster()
    assert set(common_interface(made).values()) == {"eth0"}, "the first of two that are alike"
    for host in made.hosts:
        host.facts["interfaces"][ALONE].facts["interfaces"][1]["mbps"] = 200_000
    made.forget()
    assert set(common_interface(made).values()) == {"ib0"}
    made = with_sources(made, {f"nd{i}": f"192.168.77.{i + 1}" for i in range(3)})
    assert set(common_interface(made).values()) == {"eth0"}
    assert interface_fix(made, gloo=False) == "on every host: export NCCL_SOCKET_IFNAME='=eth0'"


def test_one_pair_that_does_not_reach_it_rules_an_interface_out() -> None:
    cards = both_names()
    world = cabled(cards, silent=["192.168.77.2"])
    made = with_sources(world.cluster(), {f"nd{i}": f"192.168.77.{i + 1}" for i in range(3)})
    assert set(common_interface(made).values()) == {"ib0"}
    (found,) = judge(Firewall(), made)
    assert (found.code, found.where.hosts, found.where.interfaces) == (
        *("interface-unroutable", ("nd1",)),
        ("eth0",),
    )
    assert found.fix == "on every host: export NCCL_SOCKET_IFNAME='=ib0'"


def test_a_network_in_which_names_differ_is_proposed_host_by_host() -> None:
    cards = both_names(2)
    cards["nd1"] = {"ens3": "192.168.77.2", "ib0": "10.9.9.1"}
    made = cabled(cards).cluster()
    assert common_interface(made) == {0: "eth0", 2: "ens3"}
    fix = interface_fix(made, nccl=False)
    assert [(step.command, step.on) for step in fix.steps] == [
        ("export GLOO_SOCKET_IFNAME=eth0", ("nd0",)),
        ("export GLOO_SOCKET_IFNAME=ens3", ("nd1",)),
    ]


def test_the_fix_for_two_families_names_an_interface_with_ipv4_on_every_host() -> None:
    cards = {
        "nd0": {"eth0": "192.168.77.1", "ib0": "10.0.0.1"},
        "nd1": {"ens3": "192.168.77.2", "ib0": "10.0.0.2"},
    }
    world = cabled(cards, backend="gloo")
    world.facts["nd0"]["choices"]["gloo"] = choice([("eth0", "192.168.77.1")])
    world.facts["nd1"]["choices"]["gloo"] = choice([("ens3", "fd00::2")])

    def fix() -> str:
        (found,) = judge(OwnName(), world.cluster())
        assert found.code == "gloo-families-differ"
        return found.fix or found.kind.fix

    assert fix().startswith("on every host: export GLOO_SOCKET_IFNAME=ib0")
    for name in cards:
        world.facts[name]["interfaces"][0]["mbps"] = 200_000
    assert fix().startswith(
        "on nd0: export GLOO_SOCKET_IFNAME=eth0; on nd1: export GLOO_SOCKET_IFNAME=ens3"
    )
    world.facts["nd1"]["interfaces"][0]["addresses"] = ["fd00::2"]
    assert "GLOO_SOCKET_IFNAME=NIC" in fix(), "it would take IPv6 there still"


def test_a_bad_choice_gets_the_same_interface_on_every_host_and_for_every_finding() -> None:
    """Never two values of one variable, though hosts were reached by different interfaces too."""
    cards = {name: {**own, "docker0": "172.17.0.1"} for name, own in both_names().items()}
    world = cabled(cards, silent=["172.17.0.1", "10.0.0.3"])
    wrong = choice(
        [], variable="NCCL_SOCKET_IFNAME", value="eth7", problem="missing", names=["eth7"]
    )
    for name in ("nd0", "nd2"):
        world.facts[name]["choices"]["nccl-sockets"] = wrong
    found = world.judge()
    assert {each.code for each in found} == {"interface-missing", "interface-unroutable"}
    assert {step.command for each in found for step in steps_of(each)} == {
        "export NCCL_SOCKET_IFNAME='=eth0'"
    }


def alone(facts: dict[str, Any], source: str = "") -> Finding:
    world = World(1)
    wrong = choice(
        [], variable="NCCL_SOCKET_IFNAME", value="eth7", problem="missing", names=["eth7"]
    )
    world.facts["nd0"]["choices"]["nccl-sockets"] = wrong
    world.facts["nd0"]["interfaces"] = facts["interfaces"]
    (found,) = judge(Interfaces(), with_sources(world.cluster(), {"nd0": source}))
    return found


def test_without_calls_only_what_is_known_is_proposed() -> None:
    one, other = nic("eth0", "192.168.77.1"), nic("eth1", "10.0.0.1")
    assert "'=eth0'" in alone({"interfaces": [one]}).fix
    assert "'=eth1'" in alone({"interfaces": [one, other]}, "10.0.0.1").fix
    (step,) = alone({"interfaces": [one, other]}).fix.steps
    assert step.command == "# export NCCL_SOCKET_IFNAME='=NIC'", "which of two is not known"
