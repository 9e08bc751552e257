from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Launch, Severity
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster

CHECK = CHECKS["meeting_point"]
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)


def apart(
    ports: Mapping[str, int | None], joined: tuple[str, ...] = ("nd0",), **fields: object
) -> Cluster:
    """Hosts with two ranks each, of which only those in `joined` met."""
    cluster = make_cluster(tuple(ports))
    hosts = [replace(host, joined=host.name in joined) for host in cluster.hosts]
    cluster = replace(cluster, hosts=tuple(hosts), **fields)  # type: ignore[arg-type]
    for rank in cluster.ranks:
        port = ports[str(rank.host.name)]
        cluster = change_rank(
            cluster, rank.seat, host=hosts[rank.host.id], launch={"master_port": port}
        )
    return cluster


@pytest.mark.parametrize("joined", [(), ("nd0",), ("nd0", "nd1")])
def test_one_port(joined: tuple[str, ...]) -> None:
    assert judge(apart({"nd0": 29500, "nd1": 29500}, joined)) == []


def test_of_two_hosts_rank_0_is_right() -> None:
    finding = only(apart({"nd0": 29500, "nd1": 29511}), "master-port-differs", hosts=["nd1"])
    assert finding.message == "MASTER_PORT=29511, but rank 0 serves 29500"
    assert finding.fix.startswith("on nd1: # --master-port 29500")
    assert finding.level is Severity.FAIL
    assert finding.confidence is Confidence.CERTAIN
    assert finding.evidence == {"values": {"nd0": 29500, "nd1": 29511}}


def test_without_a_coordinator_rank_0_is_right_as_well() -> None:
    cluster = apart({"nd0": 29500, "nd1": 29511}, (), complete=False)
    only(cluster, "master-port-differs", hosts=["nd1"])


def test_every_host_chose_a_port_of_its_own() -> None:
    cluster = apart({"nd0": 29500, "nd1": 29511, "nd2": 29522})
    finding = only(cluster, "master-port-differs", hosts=["nd1", "nd2"])
    assert finding.message == "MASTER_PORT=29511, MASTER_PORT=29522, but rank 0 serves 29500"


def test_rank_0_alone_against_several() -> None:
    cluster = apart({"nd0": 29511, "nd1": 29500, "nd2": 29500})
    finding = only(cluster, "master-port-differs", hosts=["nd0"])
    assert finding.message == "MASTER_PORT=29511, but 2 other hosts look for rank 0 at 29500"
    assert "29500" in finding.fix


def test_rank_0_that_others_found_is_right_even_if_most_did_not() -> None:
    ports = {"nd0": 29511, "nd1": 29511, "nd2": 29500, "nd3": 29500, "nd4": 29500}
    cluster = apart(ports, ("nd0", "nd1"))
    only(cluster, "master-port-differs", hosts=["nd2", "nd3", "nd4"])


def test_who_came_in_by_another_port_is_left_alone() -> None:
    assert judge(apart({"nd0": 29500, "nd1": 30000}, ("nd0", "nd1"))) == []


def test_without_rank_0_the_odd_one_is_blamed() -> None:
    cluster = apart({"nd0": 29500, "nd1": 29500, "nd2": 29500, "nd3": 29511}, (), complete=False)
    ranks = tuple(rank for rank in cluster.ranks if rank.host.name != "nd0")
    cluster = replace(cluster, ranks=ranks, hosts=cluster.hosts[1:])
    finding = only(cluster, "master-port-differs", hosts=["nd3"])
    assert finding.message == "MASTER_PORT=29511, elsewhere 29500"


def test_a_tie_without_rank_0_is_said_to_be_a_tie() -> None:
    cluster = apart({"nd0": 29500, "nd1": 29500, "nd2": 29511}, (), complete=False)
    ranks = tuple(rank for rank in cluster.ranks if rank.host.name != "nd0")
    cluster = replace(cluster, ranks=ranks, hosts=cluster.hosts[1:])
    finding = only(cluster, "master-port-differs", hosts=["nd1", "nd2"])
    assert finding.confidence is Confidence.POSSIBLE
    assert "equally divided" in finding.message


def test_a_host_that_was_told_no_port_says_nothing() -> None:
    assert judge(apart({"nd0": 29500, "nd1": None})) == []


def test_observe_says_what_the_host_was_told() -> None:
    launch = Launch(master_addr="nd0", master_port=29500, sources={"master_port": "derived from X"})
    facts = CHECK.observe(Context(launch=launch, env={}))
    assert facts == {"master_addr": "nd0", "master_port": None}
    json.dumps(facts)
