"""The rules of the check `master_network`, on made-up clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Context,
    Job,
    Launch,
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
)
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.job import Rendezvous
from nccl_doctor.toolkit.containers import USER_NAT
from tests.support import findings
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster, outcome, shut_out
from tests.support.fixes import in_full
from tests.support.merging import with_facts
from tests.support.reports import RUN

CHECK = CHECKS["master_network"]
RANKS = CHECKS["ranks"]
judge = partial(findings.judge, CHECK)
only = partial(findings.only, CHECK)

ETH = ("eth0", "192.168.77.{n}", "192.168.77.0/24")
DOCKER = ("docker0", "172.17.0.1", "172.17.0.0/16")
MGMT = ("eno1", "10.1.{n}.5", "10.1.{n}.0/24")


def facts_of(master: str, n: int, *nets: Sequence[str]) -> dict[str, Any]:
    networks = [[part.format(n=n) for part in net] for net in nets]
    return {"master_addr": master, "answers": [master], "networks": networks}


def cluster_of(by_host: Mapping[str, Any], **more: Any) -> Cluster:
    hosts = [f"nd{node}" for node in range(3)]
    return make_cluster(hosts, 1, check=CHECK.name, by_host=by_host, **more)


def knocked(cluster: Cluster, ways: Mapping[str, str]) -> Cluster:
    """Hosts that got so far on their way to the master."""
    hosts = {}
    for host in cluster.hosts:
        last = {"outcome": ways.get(host.name or ""), "answer": ""}
        if last["outcome"]:
            port = outcome(Outcome(OutcomeStatus.OK, facts={"knock": {"last": last}}))
            host = replace(host, facts={**host.facts, "port": {"alone": port}})
        hosts[host.id] = host
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    return replace(cluster, hosts=tuple(hosts.values()), ranks=ranks)


def views(master: str, *nets: Sequence[str]) -> dict[str, Any]:
    return {f"nd{n}": facts_of(master, n, *nets) for n in range(3)}


DOCKER_MASTER = views("172.17.0.1", DOCKER, ETH)
MGMT_MASTER = views("10.1.0.5", MGMT, ETH)
ALONE = {"nd0": DOCKER_MASTER["nd0"]}


def in_container(
    runtime: str,
    *others: str,
    master: str = "172.17.0.2",
    net: str = "172.17.0.0/16",
    own: str = "172.17.0.2",
    **more: Any,
) -> Cluster:
    """What rank 0's host sees alone, in a container with this address on eth0."""
    facts = facts_of(own, 0, ("eth0", own, net))
    cluster = cluster_of({"nd0": {**facts, "master_addr": master}}, absent_nodes=[1, 2], **more)
    made = {"likely": ["eth0", own], "others": list(others), "container": runtime}
    return with_facts(cluster, "duplicate_address", {"nd0": made})


class TestContainersBehindBridges:
    """Docker gives 172.17.0.2 to the first container of every machine."""

    @pytest.mark.parametrize(
        ("job", "said"),
        [
            (Job(), "MASTER_ADDR=head: 172.17.0.2 on eth0 is the address of a container"),
            (
                Job(rendezvous=Rendezvous("c10d", "head:29400")),
                "--rdzv-endpoint=head:29400: 172.17.0.2 on eth0 is the address of a container",
            ),
        ],
        ids=["static", "c10d"],
    )
    def test_rank_0_waits_where_nobody_can_come(self, job: Job, said: str) -> None:
        cluster = in_container("docker", master="head", job=job)
        report = conclude(cluster, [CHECK, RANKS], run=RUN)
        (root,) = report.root_causes
        assert (root.code, root.where.hosts) == ("addr-not-shared", ("nd0",))
        assert root.message.startswith(said)
        assert root.fix.startswith("on every host: # docker run --network=host")
        takes = "takes itself for the endpoint" in root.message
        assert takes is (job.rendezvous.backend == "c10d")

    @pytest.mark.parametrize(
        ("endpoint", "port"), [("h:29501", "29501"), ("h", "29400"), ("[fe80::1]", "29400")]
    )
    def test_the_endpoint_of_c10d_is_what_to_change(self, endpoint: str, port: str) -> None:
        job = Job(rendezvous=Rendezvous("c10d", endpoint))
        cluster = cluster_of(ALONE, absent_nodes=[1, 2], job=job)
        found = only(cluster, "addr-not-shared", hosts=["nd0"], interfaces=["docker0"])
        assert (
            found.fix
            == f"on every host: # --rdzv-endpoint 192.168.77.0:{port} (in the line of torchrun)"
        )

    def test_an_elastic_job_that_nobody_can_join_goes_on_alone(self) -> None:
        job = Job(rendezvous=Rendezvous("c10d", "head:29400"), elastic=(1, 3))
        cluster = in_container("docker", master="head", job=job)
        alone = cluster.present
        cluster = replace(cluster, hosts=cluster.present_hosts, ranks=alone, nnodes=1, world_size=1)
        found = only(cluster, "addr-not-shared", hosts=["nd0"], interfaces=["eth0"])
        assert found.level is Severity.WARN
        assert judge(replace(cluster, job=Job())) == []

    def test_a_virtual_machine_behind_the_nat_of_its_own_machine(self) -> None:
        """VirtualBox gives 10.0.2.15 to each: where c10d meets there, each one waits alone."""
        job = Job(rendezvous=Rendezvous("c10d", "head:29400"))
        cluster = in_container(USER_NAT, master="head", net="10.0.2.0/24", own="10.0.2.15", job=job)
        report = conclude(cluster, [CHECK, RANKS], run=RUN)
        (root,) = report.root_causes
        assert (root.code, root.where.hosts) == ("addr-not-shared", ("nd0",))
        said = "10.0.2.15 on eth0 is the address of a virtual machine behind an address translation"
        assert root.message.startswith(f"--rdzv-endpoint=head:29400: {said} (NAT), 10.0.2.2, which")
        assert "VBoxManage modifyvm NAME --nic1 bridged" in in_full(root.fix)

    def test_who_may_be_reached_is_not_blamed(self) -> None:
        assert judge(in_container("kubernetes")) == []  # pods of several nodes share a network
        assert judge(in_container("docker", "10.0.1.5")) == []  # an overlay, and docker_gwbridge
        assert judge(in_container("")) == []
        assert judge(in_container("docker", net="172.17.0.0/24")) == []  # MACVLAN on the hosts' net


class TestBridgeOfContainers:
    def test_nobody_came(self) -> None:
        cluster = cluster_of(ALONE, absent_nodes=[1, 2])
        finding = only(cluster, "addr-not-shared", hosts=["nd0"], interfaces=["docker0"])
        assert finding.confidence is Confidence.LIKELY
        assert finding.fix.startswith("on every host: # --master-addr 192.168.77.0 ")

    def test_it_is_the_one_cause(self) -> None:
        cluster = cluster_of(ALONE, absent_nodes=[1, 2])
        report = conclude(cluster, [CHECK, RANKS], run=RUN)
        assert [found.code for found in report.root_causes] == ["addr-not-shared"]

    def test_own_views(self) -> None:
        cluster = shut_out(cluster_of(DOCKER_MASTER), "nd1", "nd2")
        only(cluster, "addr-not-shared", hosts=["nd0"], interfaces=["docker0"])

    @pytest.mark.parametrize(
        "nic", ["docker0", "docker_gwbridge", "br-0123456789ab", "virbr0", "lxcbr0", "podman1"]
    )
    def test_names(self, nic: str) -> None:
        facts = facts_of("172.17.0.1", 0, (nic, *DOCKER[1:]))
        cluster = cluster_of({"nd0": facts}, absent_nodes=[1, 2])
        only(cluster, "addr-not-shared", hosts=["nd0"], interfaces=[nic])

    @pytest.mark.parametrize("nic", ["br-ex", "br0", "bond0", "flannel.1", "eth0", "dockerlan"])
    def test_names_of_networks(self, nic: str) -> None:
        facts = facts_of("172.17.0.1", 0, (nic, *DOCKER[1:]))
        assert judge(cluster_of({"nd0": facts}, absent_nodes=[1, 2])) == []

    def test_somebody_came_in_through_it(self) -> None:
        assert judge(cluster_of(DOCKER_MASTER, absent_nodes=[2])) == []


class TestNetworkOfOneHost:
    @pytest.mark.parametrize("way", ["no-neighbour", "turned-back"])
    def test_nobody_has_a_way(self, way: str) -> None:
        cluster = shut_out(cluster_of(MGMT_MASTER), "nd1", "nd2")
        cluster = knocked(cluster, {"nd1": "unreachable", "nd2": way})
        finding = only(cluster, "addr-not-shared", hosts=["nd0"], interfaces=["eno1"])
        assert finding.fix.startswith("on every host: # --master-addr 192.168.77.0 ")

    @pytest.mark.parametrize("way", ["dropped", "refused", "rejected"])
    def test_there_is_a_way_and_something_else_is_wrong(self, way: str) -> None:
        cluster = shut_out(cluster_of(MGMT_MASTER), "nd1", "nd2")
        assert judge(knocked(cluster, {"nd1": "unreachable", "nd2": way})) == []

    def test_hosts_in_networks_of_their_own_that_share_no_other(self) -> None:
        cluster = shut_out(cluster_of(views("10.1.0.5", MGMT)), "nd1", "nd2")
        cluster = knocked(cluster, {"nd1": "unreachable", "nd2": "unreachable"})
        assert judge(cluster) == []

    def test_nobody_else_is_heard(self) -> None:
        alone = {"nd0": MGMT_MASTER["nd0"]}
        assert judge(cluster_of(alone, absent_nodes=[1, 2])) == []

    def test_somebody_is_beside(self) -> None:
        flat = ("eno1", "10.1.0.{n}", "10.1.0.0/24")
        cluster = shut_out(cluster_of(views("10.1.0.0", flat, ETH)), "nd1", "nd2")
        cluster = knocked(cluster, {"nd1": "no-neighbour", "nd2": "no-neighbour"})
        assert judge(cluster) == []


@pytest.mark.parametrize("facts", [DOCKER_MASTER, MGMT_MASTER, views("192.168.77.0", ETH, DOCKER)])
def test_where_everybody_came_in_nothing_is_wrong(facts: Mapping[str, Any]) -> None:
    assert judge(cluster_of(facts)) == []


def test_an_address_of_nobody() -> None:
    facts = facts_of("10.9.9.9", 0, DOCKER, ETH)
    assert judge(cluster_of({"nd0": facts}, absent_nodes=[1, 2])) == []


def test_observe_on_this_machine() -> None:
    facts = CHECK.observe(Context(Launch(master_addr="127.0.0.1", nnodes=2), {}))
    assert facts["answers"] == ["127.0.0.1"]
    assert all(len(entry) == 3 for entry in facts["networks"])
    with pytest.raises(Skip):
        CHECK.observe(Context(Launch(), {}))
    with pytest.raises(Skip):
        CHECK.observe(Context(Launch(master_addr="127.0.0.1", nnodes=1), {}))
