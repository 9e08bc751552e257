"""What shuts every host out explains that they never came, and nothing else does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Effect, Finding, Severity, Where
from nccl_doctor.checks.interfaces import INTERFACE_MISSING
from nccl_doctor.checks.port import PORT_IN_USE
from nccl_doctor.checks.ranks import HOST_ABSENT, RANK_ABSENT
from nccl_doctor.judge.causes import explain, fold, root_causes
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.toolkit.shared_kinds import ADDR_UNRESOLVABLE, PORT_BLOCKED
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster, shut_out
from tests.support.reports import RUN

THREE = ("nd0", "nd1", "nd2")
NOBODY = make_cluster(THREE, 1, absent_nodes=[1, 2])
GONE = Finding(HOST_ABSENT, "2 of 3 hosts", Where(nodes=(1, 2), ranks=(1, 2)))


def taken(host: str = "nd0", **more: Any) -> Finding:
    return Finding(PORT_IN_USE, "MASTER_PORT=29500 is held", Where(hosts=(host,)), **more)


def roots(cluster: Cluster, *findings: Finding) -> list[str]:
    return [finding.code for finding in root_causes(explain(findings, cluster))]


def test_nobody_can_come_in() -> None:
    assert roots(NOBODY, GONE, taken(effects=(Effect.SHUTS_OUT,))) == ["port-in-use"]


def test_a_rank_of_a_host_that_nobody_knows() -> None:
    gone = Finding(RANK_ABSENT, "1 of 2 ranks", Where(ranks=(2,)))
    assert roots(NOBODY, gone, taken(effects=(Effect.SHUTS_OUT,))) == ["port-in-use"]


def test_any_other_failure_of_rank_0s_host_hides_no_absent_host() -> None:
    missing = Finding(INTERFACE_MISSING, "NCCL_SOCKET_IFNAME=eth9", Where(hosts=("nd0",)))
    assert roots(NOBODY, GONE, missing) == ["interface-missing", "host-absent"]


def test_who_came_in_shows_that_the_door_is_open() -> None:
    some = make_cluster(THREE, 1, absent_nodes=[2])
    gone = Finding(HOST_ABSENT, "1 of 3 hosts", Where(nodes=(2,), ranks=(2,)))
    assert roots(some, gone, taken(effects=(Effect.SHUTS_OUT,))) == ["port-in-use", "host-absent"]
    # One that wrote its own view has not come in.
    assert roots(shut_out(some, "nd1"), gone, taken(effects=(Effect.SHUTS_OUT,))) == ["port-in-use"]


def test_a_warning_keeps_nobody_out() -> None:
    warned = taken(effects=(Effect.SHUTS_OUT,), severity=Severity.WARN)
    assert roots(NOBODY, GONE, warned) == ["host-absent"]


def test_another_host_keeps_nobody_out() -> None:
    some = make_cluster(THREE, 1, absent_nodes=[2])
    gone = Finding(HOST_ABSENT, "1 of 3 hosts", Where(nodes=(2,), ranks=(2,)))
    there = taken("nd1", effects=(Effect.SHUTS_OUT,))
    assert roots(shut_out(some, "nd1"), gone, there) == ["port-in-use", "host-absent"]


def test_a_host_that_shows_a_fault_of_its_own_keeps_it() -> None:
    some = shut_out(make_cluster(THREE, 1), "nd1", "nd2")
    own = Finding(PORT_BLOCKED, "a rule of this host", Where(hosts=("nd1",)))
    name = Finding(
        ADDR_UNRESOLVABLE, "does not resolve", Where(hosts=("nd0",)), effects=(Effect.SHUTS_OUT,)
    )
    assert roots(some, own, name) == ["addr-unresolvable", "port-blocked"]


def test_the_same_fault_of_two_hosts_is_still_one_finding() -> None:
    both = fold([taken("nd0", effects=(Effect.SHUTS_OUT,)), taken("nd1")])
    assert [(f.where.hosts, f.has(Effect.SHUTS_OUT)) for f in both] == [(("nd0", "nd1"), True)]


LOOK_UP = {"query": "x", "answers": [], "error": "", "took_s": [0.01], "timed_out": False}
MASTER = {"reverse": [], "no_route": [], "interfaces": [["eth0", ["192.168.77.1"]]]}
PORT = {"master_addr": "nd0", "port": 29500, "server": "self", "bind_error": "", "may_bind": True}


def facts_of(name: str, answers: Sequence[str], error: str = "") -> Mapping[str, Any]:
    found = {**LOOK_UP, "query": name, "answers": list(answers), "error": error}
    return {**MASTER, "master_addr": name, "master": found}


@pytest.mark.parametrize(
    ("check", "facts", "code"),
    [
        ("master_addr", facts_of("nd9", [], "Name or service not known"), "addr-unresolvable"),
        ("master_addr", facts_of("localhost", ["127.0.0.1"]), "addr-loopback"),
        ("master_addr", facts_of("nd9", ["192.168.77.9"]), "addr-not-on-master"),
        ("master_addr", facts_of("6841231", ["0.104.99.143"]), "addr-digits-only"),
        ("port", {**PORT, "bind_errno": 98, "ephemeral": None, "holder": None}, "port-in-use"),
        ("port", {**PORT, "bind_errno": 13, "ephemeral": None}, "port-privileged"),
    ],
)
def test_what_keeps_rank_0_from_serving_is_the_one_cause(
    check: str, facts: Mapping[str, Any], code: str
) -> None:
    cluster = make_cluster(("nd0", "nd1"), 1, absent_nodes=[1], check=check, by_host={"nd0": facts})
    report = conclude(cluster, [CHECKS[check], CHECKS["ranks"]], run=RUN)
    assert [(f.code, f.where.hosts) for f in report.root_causes] == [(code, ("nd0",))]
    explained = {f.code: f.explained_by for f in report.findings if f.explained_by}
    assert explained["host-absent"] == code
