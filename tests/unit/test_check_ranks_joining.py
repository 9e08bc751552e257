"""Hosts that were slow to reach a store that was up: told only where nothing explains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Severity
from nccl_doctor.checks.ranks import Ranks
from nccl_doctor.gather.context import Joining
from nccl_doctor.model.cluster import JOINING
from nccl_doctor.toolkit.net.names import LookUp
from tests.support.clusters import change_rank, make_cluster, with_round
from tests.support.findings import judge, only
from tests.support.losses import LossyWorld

CHECK = Ranks()
QUICK = {"torch_s": 2.0, "examined_s": 3.0, "look_up_s": 0.002, "connect_s": 0.01,
         "cpu_waited_s": 0.0, "load": 0.3, "opened_s": 9.0, "seat_s": 0.001}  # fmt: skip
SLOW = {**QUICK, "connect_s": 8.2}


def with_facts(cluster: Cluster, name: str, round_name: str = ALONE, **by_host: Any) -> Cluster:
    """The same cluster with facts of one more check."""
    return with_round(cluster, name, round_name, by_host)


def knock(answer: str = "store") -> dict[str, Any]:
    return {"server": "other", "knock": {"last": {"answer": answer}}}


def joined(*phases: Mapping[str, float], count: int = 3, answer: str = "store") -> Cluster:
    """Hosts with two ranks; `phases` of the ranks of nd1, all others were quick."""
    made = make_cluster([f"nd{number}" for number in range(count)])
    for rank in made.ranks:
        mine = phases[rank.seat - 2] if rank.host.id == 1 else QUICK
        made = change_rank(made, rank.seat, joining=dict(mine))
    doors = {host.name: knock(answer if host.name == "nd1" else "store") for host in made.hosts}
    return with_facts(made, "port", **{"nd0": {"server": "self"}, **doors})


def test_the_host_is_named_with_its_phases() -> None:
    found = only(CHECK, joined(SLOW, SLOW), "joining-slow", hosts=["nd1"])
    assert (found.level, found.confidence) == (Severity.INFO, Confidence.POSSIBLE)
    assert found.message.startswith("8.2 s to connect to a store that was up")
    assert found.evidence["phases"]["examined_s"] == 3.0


@pytest.mark.parametrize(
    "phases",
    [
        (QUICK, QUICK),
        (SLOW, QUICK),  # one of its ranks was quick: it is not the host
        ({**SLOW, "cpu_waited_s": 7.9},) * 2,
        ({**SLOW, "load": 4.0},) * 2,
        ({**QUICK, "torch_s": 60.0, "examined_s": 40.0, "opened_s": 90.0},) * 2,  # others were late
        ({}, {}),  # a report of an earlier version
    ],
)
def test_what_explains_itself_is_silent(phases: tuple[Mapping[str, float], ...]) -> None:
    assert judge(CHECK, joined(*phases)) == []


def test_who_waited_for_rank_0_is_not_slow() -> None:
    assert judge(CHECK, joined(SLOW, SLOW, answer="silent")) == []


def look(query: str, *, slow: bool) -> dict[str, Any]:
    took = (2.5, 2.5) if slow else (0.001,)
    return LookUp(query, ("192.168.77.1",), "", took, slow=slow).to_json()


@pytest.mark.parametrize("host", ["nd0", "nd1", "nd2"])
def test_slow_names_of_the_host_or_of_the_store_explain_it(host: str) -> None:
    names = {
        name: {"master": look("nd0", slow=name == host), "reverse": [], "ipv6": None}
        for name in ("nd0", "nd1", "nd2")
    }
    made = with_facts(joined(SLOW, SLOW), "master_addr", **names)
    codes = [found.code for found in judge(CHECK, made)]
    assert codes == (["joining-slow"] if host == "nd2" else [])


def test_a_busy_host_of_the_store_explains_it() -> None:
    made = joined(SLOW, SLOW)
    assert judge(CHECK, change_rank(made, 0, joining={**QUICK, "load": 3.0})) == []


def test_lost_segments_explain_it() -> None:
    world = LossyWorld(3)
    world.lose(world.of("nd1", "in"))
    made = world.cluster()
    for rank in made.ranks:
        slow = SLOW if rank.host.name == "nd1" else QUICK
        made = change_rank(made, rank.seat, joining=slow)
    made = with_facts(made, "port", **{name: knock() for name in ("nd0", "nd1", "nd2")})
    assert judge(CHECK, made) == []


def test_the_stopwatch_knows_only_the_phases_of_the_record() -> None:
    taken = Joining()
    with taken.phase("torch_s"), taken.watched("connect_s"):
        pass
    with taken.phase("torch_s"):
        pass
    assert set(taken.seconds) <= set(JOINING)
    assert 0 <= taken.seconds["torch_s"] < 5
    assert taken.seconds["load"] >= 0


def test_the_commands_name_the_address_and_the_port_of_the_job() -> None:
    (found,) = judge(CHECK, joined(SLOW, SLOW))
    launch = joined(SLOW, SLOW).ranks[2].launch
    assert launch is not None
    assert f"getent ahostsv6 {launch.master_addr}" in found.fix
    assert f"dport = :{launch.master_port}" in found.fix
