"""The kernel's counters of TCP, at the start and at the end, on made-up hosts and on this one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Context, Launch, Severity, Skip, Untested
from nccl_doctor.checks.loss import Loss
from nccl_doctor.checks.retransmissions import Retransmissions
from nccl_doctor.toolkit.net.tcp_counters import read_tcp_counters, tcp_rises
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.losses import LossyWorld

CHECK = Retransmissions()
START = {"OutSegs": 900_000, "RetransSegs": 4_000, "TCPTimeouts": 70, "TCPLostRetransmit": 3}
SNMP = """\
Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm MaxConn OutSegs RetransSegs InErrs
Tcp: 1 -1 5120 87 0
"""
NETSTAT = """\
TcpExt: SyncookiesSent TCPTimeouts TCPLostRetransmit TCPSynRetrans
TcpExt: 0 12 3 2
IpExt: InNoRoutes
IpExt: 0
"""


def after(sent: int = 5_000, again: int = 2, timeouts: int = 0) -> dict[str, int]:
    risen = {"OutSegs": sent, "RetransSegs": again, "TCPTimeouts": timeouts}
    return {name: value + risen.get(name, 0) for name, value in START.items()}


def counted(made: Cluster, *late: Any) -> Cluster:
    """The same hosts, whose counters were those of `START` and at the end these."""
    hosts = tuple(
        replace(
            host,
            facts={
                **host.facts,
                "kernel_limits": {ALONE: outcome({"tcp": START})},
                "retransmissions": {"late": outcome({"tcp": counters})},
            },
        )
        for host, counters in zip(made.hosts, late, strict=True)
    )
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    return replace(made, hosts=hosts, ranks=ranks)


def cluster(*late: dict[str, int]) -> Cluster:
    return counted(make_cluster([f"nd{number}" for number in range(len(late))], 1), *late)


@pytest.mark.parametrize("count", [2, 3])
def test_the_host_that_stands_out_is_told_and_no_more(count: int) -> None:
    late = [after(), after(again=87, timeouts=12), after()][:count]
    found = only(CHECK, cluster(*late), "retransmissions-high", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.INFO, Confidence.POSSIBLE)
    assert found.message.startswith("87 of 5000 TCP segments sent again")
    assert found.evidence["risen"]["TCPTimeouts"] == 12


@pytest.mark.parametrize(
    "late",
    [
        [after(), after(), after()],
        [after(), after(again=49), after()],  # a few
        [after(), after(again=87, sent=100_000), after()],  # of very many
        [after(again=30), after(again=87), after(again=30)],  # as it is on all of them
        [after(), {}, after()],  # a report of an earlier version
        [after(), dict.fromkeys(START, 0), after()],  # the machine has started again
    ],
)
def test_what_stands_out_nowhere_is_silent(late: list[dict[str, int]]) -> None:
    assert judge(CHECK, cluster(*late)) == []


def test_the_counters_of_a_host_that_loses_stand_in_the_evidence_of_that() -> None:
    world = LossyWorld(3)
    made = world.lose(world.of("nd1", "in")).cluster()
    made = counted(made, after(), after(again=400, timeouts=40), after())
    assert judge(CHECK, made) == []
    (found,) = judge(Loss(), made)
    assert (found.code, found.where.hosts) == ("link-lossy", ("nd1",))
    assert found.evidence["counters"]["nd1"]["RetransSegs"] == 400
    assert set(found.evidence["counters"]) == {"nd1"}


def test_one_host_has_nobody_to_be_compared_with() -> None:
    with pytest.raises(Skip, match="one host"):
        CHECK.plan(make_cluster(["nd0"]))


def test_reading(tmp_path: Path) -> None:
    context = Context(launch=Launch(), env={}, root=tmp_path)
    with pytest.raises(Untested):
        CHECK.observe(context)
    net = tmp_path / "proc/net"
    net.mkdir(parents=True)
    (net / "snmp").write_text(SNMP)
    assert CHECK.observe(context) == {"tcp": {"OutSegs": 5120, "RetransSegs": 87}}
    (net / "netstat").write_text(NETSTAT)
    assert read_tcp_counters(tmp_path) == {
        "OutSegs": 5120,
        "RetransSegs": 87,
        "TCPTimeouts": 12,
        "TCPLostRetransmit": 3,
        "TCPSynRetrans": 2,
    }
    (net / "snmp").write_text("Tcp: OutSegs\nTcp: many\n")
    (net / "netstat").write_text("TcpExt: TCPTimeouts\n")
    assert read_tcp_counters(tmp_path) == {}


def test_this_machine() -> None:
    assert {"OutSegs", "RetransSegs", "TCPTimeouts"} <= set(read_tcp_counters(Path("/")))


def test_hosts_that_were_read_once_have_no_rise() -> None:
    assert tcp_rises(make_cluster()) == {}
