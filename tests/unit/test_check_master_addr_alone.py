"""What one host says of MASTER_ADDR that met nobody: it does not speak for node 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Cluster, Confidence, Finding, Severity
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster, with_round
from tests.support.findings import judge
from tests.support.rows import each_row
from tests.unit.test_check_master_addr import ND0, ND1, facts

CHECK = CHECKS["master_addr"]
OWN = {"launcher": "nccl-doctor", "sources": {"node_rank": "--node-rank"}}
NO_RANK = {"launcher": "nccl-doctor", "sources": {"node_rank": "default"}}
C10D = {"node_rank": "default", "master_addr": "--rdzv-endpoint"}
SLURM = {"SLURM_JOB_NODELIST": "nd[0-1]"}


def lone(
    name: str,
    seen: Mapping[str, Any],
    *,
    node: int,
    env: Mapping[str, str] | None = None,
    store: str = "",
    **launch: Any,
) -> Cluster:
    """The first process of one host, which takes itself for this node; `store`: the address at
    which a store answers it.
    """
    hosts = ("nd0", "nd1")
    made = make_cluster(
        hosts,
        1,
        check="master_addr",
        by_host={name: seen},
        absent_nodes=(1 - hosts.index(name),),
        complete=False,
        env={hosts.index(name): env or {}},
    )
    host = replace(made.present_hosts[0], node_rank=node)
    (rank,) = made.present
    made = replace(made, hosts=(host,), ranks=(replace(rank, host=host, rank=node),))
    mine = {"rank": node, "node_rank": node, "master_addr": seen["master_addr"]}
    made = change_rank(made, rank.seat, launch={**OWN, **mine, **launch})
    if store:
        last = {"address": store, "answer": "store"}
        name_of = {"answers": [store], "error": "", "came_s": 0.0}
        knock = {"last": last, "name": name_of, "passed": []}
        made = with_round(made, "port", "alone", {name: {"knock": knock, "server": "self"}})
    return made


def only(cluster: Cluster, code: str) -> Finding:
    (found,) = judge(CHECK, cluster)
    assert (found.code, found.level) == (code, Severity.FAIL), found.message
    assert found.where.hosts == (cluster.hosts[0].name,)
    return found


def test_a_second_node_0_does_not_propose_its_own_address() -> None:
    seen = facts("nd1", name="nd0")
    for told in (OWN, NO_RANK):
        found = only(lone("nd1", seen, node=0, store=ND0, **told), "addr-not-on-master")
        assert found.confidence is Confidence.POSSIBLE
        assert "where a store answers: another host is node 0 too" in found.message
        assert found.message.endswith("see node 0's report")
        assert ND1 not in found.fix
        assert "NUMBER" in found.fix
        assert found.explained_by == "node-rank-duplicate"
    found = only(lone("nd1", seen, node=0), "addr-not-on-master")  # nobody answers there
    assert f"--master-addr {ND1}" in found.fix


def test_slurm_knows_that_a_node_0_is_another_node() -> None:
    seen = facts("nd1", name="nd0")
    env = {**SLURM, "SLURM_NODEID": "1"}
    for store, sure in ((ND0, Confidence.CERTAIN), ("", Confidence.LIKELY)):
        found = only(lone("nd1", seen, node=0, env=env, store=store), "addr-not-on-master")
        assert found.confidence is sure
        assert "and this host has node rank 0; by Slurm it is node 1" in found.message
        assert found.fix.startswith("on nd1: # --node-rank 1 ")
    copied = {**SLURM, "SLURM_NODEID": "0"}  # of the host that ran ssh
    found = only(lone("nd1", seen, node=0, env=copied, store=ND0), "addr-not-on-master")
    assert "Slurm" not in found.message


def bridged(made: Cluster, address: str) -> Cluster:
    bridge = {"likely": ["eth0", address], "others": [], "container": "docker"}
    return with_round(made, "duplicate_address", "alone", {"nd1": bridge})


SECOND = {**SLURM, "SLURM_NODEID": "1"}
FIRST, UNKNOWN = "# --master-addr nd0", "# --master-addr ADDRESS (of the host that runs rank 0)"
SURE, LIKELY, MAYBE = Confidence.CERTAIN, Confidence.LIKELY, Confidence.POSSIBLE


@each_row(
    "env, fix, sure",
    [
        (SECOND, FIRST, SURE),
        (
            {**SECOND, "SLURM_JOB_NODELIST": "nd[0-7]", "SLURM_STEP_NODELIST": "nd[0-1]"},
            FIRST,
            SURE,
        ),
        # The first one, which was told another node rank.
        ({"SLURM_JOB_NODELIST": "nd1,nd0", "SLURM_NODEID": "0"}, "# --node-rank 0 ", LIKELY),
        ({**SLURM, "SLURM_NODEID": "0"}, UNKNOWN, MAYBE),  # variables of another host
        ({**SLURM, "SLURM_NODEID": "x"}, UNKNOWN, MAYBE),
        ({**SLURM, "SLURM_NODEID": "7"}, UNKNOWN, MAYBE),
        ({"SLURM_NODEID": "1"}, UNKNOWN, MAYBE),
        ({}, UNKNOWN, MAYBE),
    ],
)
def test_the_host_of_master_addr_that_is_not_the_first_of_slurm(
    env: Mapping[str, str], fix: str, sure: Confidence
) -> None:
    made = lone("nd1", facts("nd1", ND1, name="nd1"), node=1, env=env)
    found = only(made, "addr-not-on-master")
    assert (found.confidence, fix in found.fix) == (sure, True)
    assert found.message.endswith("see node 0's report") is (sure is MAYBE)
    if sure is SURE:  # then no container is to blame
        assert "docker" not in only(bridged(made, ND1), "addr-not-on-master").fix


def test_where_a_store_answers_here_node_0_is_on_this_machine() -> None:
    made = lone("nd1", facts("nd1", ND1, name="nd1"), node=1, store=ND1)
    assert judge(CHECK, made) == []


def test_an_endpoint_of_localhost_leads_no_two_hosts_to_two_addresses() -> None:
    for host, own in (("nd0", ND0), ("nd1", ND1)):
        seen = facts(host, "127.0.0.1", name="localhost")
        found = only(lone(host, seen, node=0, sources=C10D), "addr-loopback")
        assert found.message.startswith("--rdzv-endpoint=localhost:29500 resolves to 127.0.0.1")
        assert found.fix.startswith("on every host: # --rdzv-endpoint ADDRESS:29500 (")
        assert f"the same on all, of one of the hosts, {own} for example" in found.fix
        env = {**SLURM, "SLURM_NODEID": host[-1]}
        found = only(lone(host, seen, node=0, env=env, sources=C10D), "addr-loopback")
        assert found.fix.startswith("on every host: # --rdzv-endpoint nd0:29500 (")
    sure = lone("nd0", facts("nd0", "127.0.0.1", name="localhost"), node=0)  # it is node 0
    assert f"--master-addr {ND0}" in only(sure, "addr-loopback").fix
