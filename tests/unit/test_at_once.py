"""What is said at once, before anybody else was heard: it stands in the report, whoever comes."""

from __future__ import annotations

import errno
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import Cluster, Finding, LaunchProblem
from nccl_doctor.judge.causes import certain_at_once
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.toolkit.net.names import LookUp
from tests.support.checks import CHECKS, REGISTRY
from tests.support.clusters import change_rank, make_cluster, shut_out
from tests.support.knocks import facts as port_facts
from tests.support.knocks import tried
from tests.support.merging import with_facts
from tests.support.peers import World, choice
from tests.support.reports import RUN

HOSTS = ("nd0", "nd1", "nd2")
LOOKED_AT = [check for check in REGISTRY.checks if check.at_once]
TAKEN = {
    "server": "self",
    "bind_errno": errno.EADDRINUSE,
    "bind_error": "Address already in use",
    "holder": {"pid": 812, "command": "python", "state": "", "uid": 0},
}
CODES = {
    "name": "addr-unresolvable",
    "port": "port-in-use",
    "nic": "interface-missing",
    "launch": "launch-bad-value",
}
FAULTS = sorted(CODES)


def no_name(name: str) -> dict[str, Any]:
    return LookUp(name, (), "Name or service not known", (0.001,)).to_json()


def cluster_of(faults: dict[str, Collection[str]], backend: str = "gloo", **fields: Any) -> Cluster:
    """Three hosts with these faults, as their first looks and the coordinator see them."""
    world = World(len(HOSTS), backend)
    port, names = {}, {}
    for node, host in enumerate(HOSTS):
        mine, bad = f"192.168.77.{node + 1}", faults.get(host, ())
        unknown = "name" in bad
        names[host] = {
            "master_addr": "nd0",
            "master": no_name("nd0")
            if unknown
            else LookUp("nd0", ("192.168.77.1",), "", (0.001,)).to_json(),
            "reverse": [],
            "no_route": [],
            "source": mine,
            "interfaces": [["eth0", [mine]]],
        }
        port[host] = port_facts(server="self" if host == "nd0" else "other")
        if "port" in bad and host == "nd0":
            del port[host]["knock"]
            port[host] |= TAKEN
        elif "name" in bad:
            del port[host]["knock"]
        if "nic" in bad:
            for library in ("gloo", "nccl-sockets", "nccl-bootstrap"):
                variable = "GLOO_SOCKET_IFNAME" if library == "gloo" else "NCCL_SOCKET_IFNAME"
                world.facts[host]["choices"][library] = choice(
                    [], variable=variable, value="ib7", problem="missing", names=["ib7"]
                )
    made = make_cluster(HOSTS, 1, backend=backend, **fields)
    for check, facts in (("master_addr", names), ("port", port), ("interfaces", world.facts)):
        made = with_facts(made, check, facts)
    for node, host in enumerate(HOSTS):
        if "launch" in faults.get(host, ()):
            problem = LaunchProblem("launch-bad-value", "LOCAL_RANK=x", {"LOCAL_RANK": "x"})
            made = change_rank(made, node, launch={"problems": (problem,)})
    return made


def first_look(cluster: Cluster, host: str) -> list[Finding]:
    """What is said at once on one host, which has heard of nobody."""
    alone = tuple(rank for rank in cluster.ranks if rank.host.name == host)
    mine = replace(cluster, hosts=(alone[0].host,), ranks=alone, complete=False)
    return certain_at_once(mine, LOOKED_AT, REGISTRY.wanted)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(
    ("host", "fault"),
    [("nd1", "name"), ("nd0", "port"), ("nd1", "nic"), ("nd2", "launch")],
)
def test_what_a_host_sees_by_itself_is_said_of_it_and_of_nobody_else(
    host: str, fault: str, backend: str
) -> None:
    cluster = cluster_of({host: [fault]}, backend)
    (found,) = first_look(cluster, host)
    assert (found.code, found.where.hosts) == (CODES[fault], (host,))
    for other in {*HOSTS} - {host}:
        assert first_look(cluster, other) == []


def test_a_healthy_host_says_nothing() -> None:
    for backend in ("gloo", "nccl"):
        for host in HOSTS:
            assert first_look(cluster_of({}, backend), host) == []


def test_nothing_that_may_pass_is_said() -> None:
    """No answer from a name server is not certain; a port that the program chose is excused."""
    cluster = cluster_of({"nd1": ["name"]})
    facts = dict(cluster.hosts[1].facts["master_addr"]["alone"].facts or {})
    facts["master"] = LookUp("nd0", (), "no answer from the resolver", (1.0,), True).to_json()
    assert first_look(with_facts(cluster, "master_addr", {"nd1": facts}), "nd1") == []

    taken = cluster_of({"nd0": ["port"]})
    launch = taken.ranks[0].launch
    assert launch is not None
    guessed = {"master_port": "derived from SLURM_JOB_ID", "master_addr": "derived from SLURM"}
    chosen = change_rank(taken, 0, launch={"launcher": "srun", "sources": guessed})
    assert first_look(chosen, "nd0") == []


def test_what_is_ignored_or_not_selected_is_not_said() -> None:
    cluster = cluster_of({"nd0": ["port"]})
    assert certain_at_once(cluster, LOOKED_AT, lambda code: code != "port-in-use") == []


@given(
    st.dictionaries(st.sampled_from(HOSTS), st.sets(st.sampled_from(FAULTS), min_size=1)),
    st.sampled_from(["gloo", "nccl"]),
    st.sets(st.sampled_from(HOSTS)),
    st.booleans(),
    st.booleans(),
)
def test_what_is_said_at_once_stands_in_the_report(
    faults: dict[str, set[str]], backend: str, stay_out: set[str], complete: bool, comes: bool
) -> None:
    """Draw who gets in, what the others have, and whether a name comes at last."""
    cluster = cluster_of(faults, backend)
    end = replace(shut_out(cluster, *stay_out), complete=complete)
    if comes:
        late = {"answers": ["192.168.77.1"], "error": "", "came_s": 9.0}
        for host in (host for host, bad in faults.items() if "name" in bad and host != "nd0"):
            knock = {**port_facts(tried("connected", "store"))["knock"], "name": late}
            end = with_facts(end, "port", {host: {**port_facts(), "knock": knock}})
    report = conclude(end, REGISTRY.checks, run=RUN, wanted=REGISTRY.wanted)
    for host in HOSTS:
        for said in first_look(cluster, host):
            assert any(
                found.code == said.code and host in found.where.hosts for found in report.findings
            ), (said, report.findings)


def test_every_kind_that_is_said_at_once_is_one_of_its_check() -> None:
    assert {"launch_record", "master_addr", "port", "interfaces"} <= {c.name for c in LOOKED_AT}
    for check in LOOKED_AT:
        assert {kind.code for kind in check.at_once} <= {kind.code for kind in check.kinds}
        assert not check.together, f"{check.name} observes with others: they come later"
    assert CHECKS["torch_import"].at_once == (), "the first look comes before torch"
