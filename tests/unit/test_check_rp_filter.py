"""Two interfaces in one network, with a strict filter and without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Launch, Severity
from nccl_doctor.checks.firewall import Firewall
from nccl_doctor.checks.rp_filter import RpFilter
from nccl_doctor.judge.causes import explain
from nccl_doctor.toolkit.net.routes import reverse_path_filter
from tests.support import fabrics
from tests.support.clusters import outcome, reread
from tests.support.findings import judge, only
from tests.support.peers import DROPPED, REFUSED, World
from tests.support.rows import each_row

CHECK = RpFilter()
NET = "192.168.77.0/24"


def shared(strict: int, second: str = "192.168.77.2") -> dict[str, Any]:
    nics = [["eth0", "192.168.77.102", strict], ["eth1", second, strict]]
    return {"shared": {NET: nics}}


def cluster(world: World, **by_host: Any) -> Cluster:
    made = world.cluster()
    hosts = {}
    for host in made.hosts:
        seen = by_host.get(host.name or "", {"shared": {}})
        facts = {**host.facts, "rp_filter": {"alone": outcome(seen)}}
        hosts[host.id] = replace(host, facts=reread(facts))
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    return replace(made, hosts=tuple(hosts.values()), ranks=ranks)


@pytest.mark.parametrize("value", [0, 2])
def test_a_filter_that_is_off_or_loose_is_fine(value: int) -> None:
    assert judge(CHECK, cluster(World(2), nd1=shared(value))) == []
    assert judge(CHECK, cluster(World(2))) == []


def test_a_strict_filter_is_a_risk() -> None:
    found = only(
        CHECK,
        cluster(World(2), nd1=shared(1)),
        "rp-filter-strict",
        hosts=["nd1"],
        interfaces=["eth0", "eth1"],
    )
    assert found.level is Severity.WARN
    assert "eth1 192.168.77.2" in found.message
    assert "rp_filter=2" in found.fix


def test_and_a_failure_where_the_address_gives_no_answer() -> None:
    world = World(3).fail([("nd0", "nd1"), ("nd2", "nd1")], DROPPED)
    found = only(
        CHECK,
        cluster(world, nd1=shared(1)),
        "rp-filter-strict",
        hosts=["nd1"],
        interfaces=["eth0", "eth1"],
    )
    assert found.level is Severity.FAIL
    assert "no answer at 192.168.77.2" in found.message


def test_a_refusal_is_none_of_its_doing() -> None:
    world = World(2).fail([("nd0", "nd1")], REFUSED)
    (found,) = judge(CHECK, cluster(world, nd1=shared(1)))
    assert found.level is Severity.WARN


def test_the_filter_is_read_and_the_greater_one_counts(tmp_path: Path) -> None:
    for nic, value in {"all": "0", "eth0": "1"}.items():
        fabrics.write(tmp_path, f"proc/sys/net/ipv4/conf/{nic}/rp_filter", f"{value}\n")
    assert reverse_path_filter("eth0", tmp_path) == 1
    assert reverse_path_filter("eth7", tmp_path) == 0
    json.dumps(CHECK.observe(Context(launch=Launch(), env={}, root=tmp_path)))


def test_the_kernel_says_which_of_the_two_would_drop() -> None:
    seen = {
        "shared": {NET: [["eth0", "192.168.77.2", 1, True], ["eth1", "192.168.77.9", 1, False]]}
    }
    found = only(
        *(CHECK, cluster(World(2), nd1=seen), "rp-filter-strict"),
        hosts=["nd1"],
        interfaces=["eth1"],
    )
    assert found.level is Severity.WARN
    assert found.fix.endswith("export NCCL_SOCKET_IFNAME='=eth0'")


def test_routes_by_source_address_make_both_work() -> None:
    """As images for several NICs have them (ec2-net-utils, Azure, OCI)."""
    seen = {"shared": {NET: [["eth0", "192.168.77.2", 1, True], ["eth1", "192.168.77.9", 1, True]]}}
    assert judge(CHECK, cluster(World(2), nd1=seen)) == []


# Calls without an answer --------------------------------------------------------------------------


def way(own: str, peer: str, **fields: Any) -> dict[str, Any]:
    """What nd1 says of a call from nd0; by default, that it drops it."""
    seats = {"caller": World(2).seat("nd0"), "listener": World(2).seat("nd1")}
    seen = {"interface": "eth0", "taken": False, "filter": 1, "leaves": "eth9"}
    return {**seats, "own": own, "peer": peer, **seen, **fields}


def asked(world: World, host: str, *ways: dict[str, Any]) -> World:
    rules = {"readable": False, "reason": "", "managers": [], "drops": [], "hits": []}
    world.rules[host] = {**rules, "ways": list(ways)}
    return world


def causes(made: Cluster) -> dict[str, str | None]:
    found = [*judge(CHECK, made), *judge(Firewall(), made)]
    return {each.code: each.explained_by for each in explain(found, made)}


def test_the_kernel_that_drops_a_call_is_named_and_no_firewall() -> None:
    world = World(3).fail([("nd0", "nd1"), ("nd2", "nd1")], DROPPED)
    made = cluster(asked(world, "nd1", way("192.168.77.2", "192.168.77.1")))
    found = only(CHECK, made, "rp-filter-strict", hosts=["nd1"], interfaces=["eth0"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.CERTAIN)
    assert found.message == (
        "eth0 192.168.77.2, rp_filter=1: packets from 192.168.77.1 are dropped on arrival, "
        "as answers to it leave by eth9"
    )
    assert [(step.on, step.command, step.undo) for step in found.fix.steps] == [
        (
            ("nd1",),
            "sysctl -w net/ipv4/conf/eth0/rp_filter=2",
            "sysctl -w net/ipv4/conf/eth0/rp_filter=1",
        ),
        (("nd0",), "sysctl -w net/ipv4/conf/all/rp_filter=2", ""),
    ]
    assert found.fix.alternatives == (), "nobody was called on eth9"
    assert causes(made) == {"rp-filter-strict": None, "peer-one-way": "rp-filter-strict"}


def test_a_second_interface_whose_calls_are_dropped() -> None:
    world = World(2).extra("nd0", "nd1", "eth1", DROPPED, "nccl-sockets")
    made = cluster(asked(world, "nd1", way("10.0.0.2", "10.0.9.1", interface="eth1")))
    only(CHECK, made, "rp-filter-strict", hosts=["nd1"], interfaces=["eth1"])
    assert causes(made) == {"rp-filter-strict": None, "interface-unroutable": "rp-filter-strict"}


def test_an_answer_that_is_dropped_names_the_caller() -> None:
    world = World(2).fail([("nd0", "nd1")], DROPPED)
    made = cluster(asked(world, "nd0", way("192.168.77.1", "192.168.77.2")))
    only(CHECK, made, "rp-filter-strict", hosts=["nd0"], interfaces=["eth0"])


@each_row(
    "said",
    [
        way("192.168.77.2", "192.168.77.1", taken=True),
        way("192.168.77.2", "192.168.77.1", filter=2, leaves=""),  # no way back: another fault
        way("192.168.77.2", "192.168.77.1", leaves=""),
        way("192.168.77.2", "192.168.77.1", leaves="eth0"),
        way("192.168.77.2", "192.168.77.1", filter=0),
        way("10.7.7.7", "192.168.77.1"),  # that address was not called
    ],
)
def test_else_a_call_without_an_answer_is_none_of_its_doing(said: dict[str, Any]) -> None:
    world = World(2).fail([("nd0", "nd1")], DROPPED)
    assert judge(CHECK, cluster(asked(world, "nd1", said))) == []


def test_one_finding_for_one_address() -> None:
    world = World(3).fail([("nd0", "nd1"), ("nd2", "nd1")], DROPPED)
    made = cluster(asked(world, "nd1", way("192.168.77.2", "192.168.77.1")), nd1=shared(1))
    first, second = judge(CHECK, made)
    assert (first.level, second.level) == (Severity.FAIL, Severity.WARN)
    assert second.where.interfaces == ("eth0",)
    assert "no answer" not in second.message


@pytest.mark.parametrize(("caller", "level"), [("nd0", Severity.WARN), ("nd1", Severity.FAIL)])
def test_what_gloo_does_not_call_is_no_failure(caller: str, level: Severity) -> None:
    called = {"nd0": "nd1", "nd1": "nd0"}[caller]
    world = World(2, "gloo").fail([(caller, called)], DROPPED)
    own, peer = world.address(called), world.address(caller)
    ends = {"caller": world.seat(caller), "listener": world.seat(called)}
    made = cluster(asked(world, called, {**way(own, peer), **ends}))
    found = only(CHECK, made, "rp-filter-strict", hosts=[called], interfaces=["eth0"])
    assert found.level is level
