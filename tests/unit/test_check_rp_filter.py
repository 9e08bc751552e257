"""Two interfaces in one network, with a strict filter and without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Severity
from nccl_doctor.checks.rp_filter import RpFilter, _filter
from tests.support import fabrics
from tests.support.clusters import outcome, reread
from tests.support.findings import judge, only
from tests.support.peers import DROPPED, REFUSED, World

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
    assert _filter("eth0", tmp_path) == 1
    assert _filter("eth7", tmp_path) == 0
    json.dumps(CHECK.observe(Context(launch=Launch(), env={}, root=tmp_path)))
