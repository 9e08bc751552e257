"""Two faults at the same time, on different places: both are root causes, and nothing else is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from nccl_doctor.api import Check, Confidence, Effect, Finding, Kind, Layer, Where
from nccl_doctor.checks.firewall import (
    MTU_BLACKHOLE,
    PEER_BLOCKED,
    PEER_NO_ROUTE,
    PEER_ONE_WAY,
    Firewall,
)
from nccl_doctor.checks.interfaces import INTERFACE_MISSING, Interfaces
from nccl_doctor.checks.interfaces.comparison import MTU_DIFFERS
from nccl_doctor.checks.links import HOST_SLOW, LINK_SLOW
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.report import Report
from nccl_doctor.toolkit.groups.kinds import CRASHED, FROZEN, HANG, KILLED
from nccl_doctor.toolkit.shared_kinds import ADDR_UNRESOLVABLE, PORT_BLOCKED
from tests.support.clusters import make_cluster
from tests.support.peers import DROPPED, NO_ROUTE, World, stuck
from tests.support.reports import RUN, kind, made_check, through_json

HOSTS = ("nd0", "nd1", "nd2", "nd3")
ENV = kind("env-broken", Layer.ENV)
LOW = kind("low-host", Layer.HOST)
BETWEEN = replace(kind("differs", Layer.ENV), effects=(Effect.DIFFERENCE,))

Link = tuple[str, str]


def at(*hosts: str, ranks: Sequence[int] = (), links: Sequence[Link] = ()) -> Where:
    return Where(hosts=hosts, ranks=tuple(ranks), links=tuple(links))


def to_and_from(host: str) -> list[Link]:
    return [pair for pair in permutations(HOSTS, 2) if host in pair]


def into(host: str) -> list[Link]:
    return [pair for pair in permutations(HOSTS, 2) if pair[1] == host]


def report_of(
    *findings: Finding, cluster: Cluster | None = None, more: Sequence[Check] = ()
) -> Report:
    """The verdict where checks of these layers find this, and `more` what they find themselves."""
    checks = [made_check(f"check_{i}", f.kind.layer, finds=[f]) for i, f in enumerate(findings)]
    return through_json(conclude(cluster or make_cluster(HOSTS), [*checks, *more], run=RUN))


def roots(report: Report) -> set[tuple[str, tuple[str, ...], tuple[Link, ...]]]:
    return {(f.code, f.where.hosts, f.where.links) for f in report.root_causes}


HANGS = Finding(HANG, "no progress in all_reduce", at(*HOSTS, ranks=range(8)))
PAIRS = [
    pytest.param(
        (PORT_BLOCKED, at(links=[("nd1", "nd0")])),
        (MTU_BLACKHOLE, at(links=[("nd2", "nd3"), ("nd3", "nd2")])),
        id="one host's road, and large packets of another pair",
    ),
    pytest.param(
        (PORT_BLOCKED, at(links=[("nd1", "nd0")])),
        (MTU_BLACKHOLE, at(links=[("nd0", "nd2")])),
        id="two links of one host",
    ),
    pytest.param(
        (ADDR_UNRESOLVABLE, at("nd1")), (INTERFACE_MISSING, at("nd2")), id="two hosts, two layers"
    ),
    pytest.param(
        (ENV, at("nd1")), (PEER_ONE_WAY, at("nd2", links=into("nd2"))), id="env, firewall"
    ),
    pytest.param(
        (MTU_BLACKHOLE, at(links=[("nd0", "nd1")])),
        (PEER_ONE_WAY, at("nd1", links=into("nd1"))),
        id="a link, and the host at its end",
    ),
    pytest.param(
        (PEER_NO_ROUTE, at("nd1", links=to_and_from("nd1"))),
        (PEER_BLOCKED, at("nd2", links=to_and_from("nd2"))),
        id="two hosts that share a link",
    ),
    pytest.param(
        (LOW, at("nd1", ranks=(2,))),
        (INTERFACE_MISSING, at("nd1")),
        id="a rank, and its whole host",
    ),
    pytest.param(
        (PEER_BLOCKED, at(links=[("nd0", "nd1")])),
        (FROZEN, at("nd3", ranks=(6,))),
        id="a link, and a process elsewhere",
    ),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("symptoms", [[], [HANGS]], ids=["alone", "with a symptom of both"])
def test_both_are_root_causes(
    one: tuple[Kind, Where], other: tuple[Kind, Where], symptoms: list[Finding]
) -> None:
    report = report_of(Finding(one[0], "a", one[1]), Finding(other[0], "b", other[1]), *symptoms)
    assert roots(report) == {(what.code, place.hosts, place.links) for what, place in (one, other)}


def test_the_same_fault_has_a_cause_on_one_host_and_is_one_on_the_other() -> None:
    missing = [Finding(INTERFACE_MISSING, "eth9", at(host)) for host in ("nd1", "nd2")]
    report = report_of(Finding(ENV, "", at("nd1")), more=[made_check("nics", finds=missing)])
    assert roots(report) == {(ENV.code, ("nd1",), ()), (INTERFACE_MISSING.code, ("nd2",), ())}
    explained = [f for f in report.findings if f.explained_by]
    assert [(f.code, f.where.hosts, f.explained_by) for f in explained] == [
        (INTERFACE_MISSING.code, ("nd1",), ENV.code)
    ]


def test_each_of_two_causes_explains_its_own_half_of_the_same_fault() -> None:
    missing = [Finding(INTERFACE_MISSING, "eth9", at(host)) for host in ("nd1", "nd2")]
    report = report_of(
        Finding(ENV, "", at("nd1")),
        Finding(LOW, "", at("nd2")),
        more=[made_check("nics", finds=missing)],
    )
    assert roots(report) == {(ENV.code, ("nd1",), ()), (LOW.code, ("nd2",), ())}


def test_a_link_explains_no_frozen_process_of_another_host_that_looks_the_same() -> None:
    frozen = [Finding(FROZEN, "T", at(f"nd{i // 2}", ranks=(i,))) for i in (2, 6)]
    blocked = Finding(PEER_BLOCKED, "", at(links=[("nd0", "nd1"), ("nd1", "nd0")]))
    report = report_of(blocked, more=[made_check("groups", Layer.COLLECTIVE, finds=frozen)])
    assert roots(report) == {
        (PEER_BLOCKED.code, (), (("nd0", "nd1"), ("nd1", "nd0"))),
        (FROZEN.code, ("nd3",), ()),
    }


def test_the_interface_of_one_host_is_not_that_of_another() -> None:
    """Both are called eth0: a wrong MTU on nd0 makes no switch port of nd3 slow."""
    mtu = Finding(MTU_DIFFERS, "", replace(at("nd0"), interfaces=("eth0",)))
    slow = Finding(HOST_SLOW, "", replace(at("nd3"), interfaces=("eth0",)))
    assert roots(report_of(mtu, slow)) == {
        (MTU_DIFFERS.code, ("nd0",), ()),
        (HOST_SLOW.code, ("nd3",), ()),
    }
    same = Finding(HOST_SLOW, "", replace(at("nd0"), interfaces=("eth0",)))
    assert roots(report_of(mtu, same)) == {(MTU_DIFFERS.code, ("nd0",), ())}


def test_a_variable_that_differs_makes_no_link_of_other_hosts_slow() -> None:
    differs = Finding(BETWEEN, "", at("nd1"))
    slow = Finding(LINK_SLOW, "", at(links=[("nd0", "nd2"), ("nd2", "nd0")]))
    assert roots(report_of(differs, slow, HANGS)) == {(BETWEEN.code, ("nd1",), ())}
    report = report_of(differs, slow)
    assert [f.explained_by for f in report.findings if f.code == LINK_SLOW.code] == [None]


@pytest.mark.parametrize("code", [FROZEN, KILLED])
def test_a_variable_that_differs_stops_no_process_of_another_host(code: Kind) -> None:
    differs = Finding(BETWEEN, "", at("nd1"))
    done = Finding(code, "", at("nd2", ranks=[4]))
    assert roots(report_of(differs, done)) == {
        ("differs", ("nd1",), ()),
        (code.code, ("nd2",), ()),
    }
    crashed = done.replaced(kind=CRASHED)  # it may do so by itself, by what the others do not have
    assert roots(report_of(differs, crashed)) == {("differs", ("nd1",), ())}
    perhaps = done.replaced(confidence=Confidence.LIKELY)
    assert roots(report_of(differs, perhaps)) == {("differs", ("nd1",), ())}


def test_faults_of_all_ranks_of_a_host_are_a_fault_of_the_host() -> None:
    low = [Finding(LOW, "", at("nd1", ranks=(rank,))) for rank in (2, 3)]
    missing = Finding(INTERFACE_MISSING, "eth9", at("nd1"))
    report = report_of(missing, more=[made_check("limits", finds=low)])
    assert roots(report) == {(LOW.code, ("nd1",), ())}


# The same from what was observed: both checks of the road between hosts judge the calls.


def judged(world: World, *findings: Finding) -> Report:
    return report_of(*findings, cluster=world.cluster(), more=[Interfaces(), Firewall()])


def test_a_deaf_host_and_a_host_without_a_route() -> None:
    # Who has no route cannot answer either: the calls to it get no answer.
    world = World(4).fail([*into("nd1"), *into("nd3")], DROPPED)
    report = judged(world.fail([(b, a) for a, b in into("nd3")], NO_ROUTE))
    assert {(f.code, f.where.hosts) for f in report.root_causes} == {
        (PEER_ONE_WAY.code, ("nd1",)),
        (PEER_NO_ROUTE.code, ("nd3",)),
    }


def test_a_blocked_pair_and_large_packets_lost_between_another_one() -> None:
    world = World(4).fail([("nd0", "nd1"), ("nd1", "nd0")], DROPPED)
    world.fail([("nd2", "nd3")], stuck("upload")).fail([("nd3", "nd2")], stuck("download"))
    assert roots(judged(world)) == {
        (PEER_BLOCKED.code, (), (("nd0", "nd1"), ("nd1", "nd0"))),
        (MTU_BLACKHOLE.code, (), (("nd2", "nd3"),)),
    }


def test_a_wrong_variable_on_one_host_and_a_firewall_on_another() -> None:
    world = (
        World(4).fail(into("nd2"), DROPPED).hit("nd2", ("nd0", "nd2")).hit("nd2", ("nd1", "nd2"))
    )
    report = judged(world, Finding(ENV, "", at("nd1")))
    assert roots(report) == {
        (ENV.code, ("nd1",), ()),
        (PEER_ONE_WAY.code, ("nd2",), tuple(into("nd2"))),
    }


def test_a_missing_interface_on_one_host_and_a_deaf_one() -> None:
    world = World(4).fail(into("nd2"), DROPPED)
    choice = world.facts["nd1"]["choices"]["nccl-sockets"]
    choice |= {"picks": [], "problem": "missing", "variable": "NCCL_SOCKET_IFNAME", "value": "ib9"}
    assert roots(judged(world)) == {
        (INTERFACE_MISSING.code, ("nd1",), ()),
        (PEER_ONE_WAY.code, ("nd2",), tuple(into("nd2"))),
    }
