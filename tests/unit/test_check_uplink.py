"""Hosts that are cut off: the one without a carrier, or that sees no other; of two, either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import (
    AFTER_LOSS,
    Cluster,
    Confidence,
    Context,
    Effect,
    Launch,
    Severity,
    Skip,
    Where,
)
from nccl_doctor.checks.uplink import look as looking
from tests.support.clusters import make_cluster, shut_out
from tests.support.merging import own_view
from tests.support.peers import DROPPED, World
from tests.support.uplinks import CHECK, cables, calls_of, gateway, judged, look, nic, with_looks

TWO, THREE = ("nd0", "nd1"), ("nd0", "nd1", "nd2")
NO_CARRIER = {"running": False}
IS_DOWN = {"up": False, "running": False}
LINK = Where(links=(("nd0", "nd1"), ("nd1", "nd0")))


def only(cluster: Cluster, where: Where, confidence: Confidence) -> Any:
    (found,) = judged(cluster)
    assert (found.code, found.where) == ("host-cut-off", where)
    assert (found.level, found.confidence) == (Severity.FAIL, confidence)
    assert found.fix or found.kind.fix
    assert not found.has(Effect.DRAINS)
    return found


def at(host: str, *nics: str) -> Where:
    return Where(hosts=(host,), interfaces=nics)


# -- carriers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "words"), [(NO_CARRIER, "eth0 has no carrier"), (IS_DOWN, "eth0 is down")]
)
def test_rank_0_without_a_carrier_when_nobody_came(state: dict[str, bool], words: str) -> None:
    first = {"nd0": look("nd0", nic("nd0", **state))}
    made = cables(THREE, first, absent_nodes=[1, 2])
    found = only(made, at("nd0", "eth0"), Confidence.CERTAIN)
    assert found.message == words
    assert found.has(Effect.SHUTS_OUT)


def test_a_host_that_could_not_sign_in_says_so_in_its_own_report() -> None:
    first = {"nd1": look("nd1", nic("nd1", **NO_CARRIER))}
    made = own_view(cables(THREE, first), 1)
    assert not only(made, at("nd1", "eth0"), Confidence.CERTAIN).has(Effect.SHUTS_OUT)


@pytest.mark.parametrize("host", THREE)
def test_merged_the_one_without_a_carrier_is_named_and_no_other(host: str) -> None:
    made = shut_out(cables(THREE, {host: look(host, nic(host, **NO_CARRIER))}), "nd1", "nd2")
    only(made, at(host, "eth0"), Confidence.CERTAIN)


def test_an_interface_that_nobody_needs_may_lack_a_carrier() -> None:
    spare = nic("nd0", "eth1", addresses=["10.0.0.1"], **NO_CARRIER)
    first = {"nd0": look("nd0", nic("nd0"), spare)}
    assert judged(cables(THREE, first, absent_nodes=[1, 2])) == []


def test_a_host_that_met_the_others_needs_no_carrier_there() -> None:
    """It came by another way: the interface to MASTER_ADDR is not what its traffic uses."""
    first = {"nd1": look("nd1", nic("nd1", **NO_CARRIER))}
    assert judged(cables(THREE, first)) == []
    zero = {"nd0": look("nd0", nic("nd0", **NO_CARRIER))}
    assert judged(cables(THREE, zero)) == []


def test_where_the_way_to_the_master_is_not_known_all_interfaces_have_to_be_down() -> None:
    spare = nic("nd1", "eth1", addresses=["10.0.0.1"])
    for second, expected in ((spare, []), ({**spare, **NO_CARRIER}, ["eth0", "eth1"])):
        seen = look("nd1", nic("nd1", **NO_CARRIER), second, towards_master="")
        found = judged(own_view(cables(TWO, {"nd1": seen}), 1))
        assert [name for each in found for name in each.where.interfaces] == expected


def test_a_host_that_lost_its_carrier_later_is_named_by_its_second_look() -> None:
    after = {"nd0": look("nd0", nic("nd0", **NO_CARRIER), calls={"nd1": "unreachable"})}
    found = only(cables(TWO, after=after), at("nd0", "eth0"), Confidence.CERTAIN)
    assert found.has(Effect.SHUTS_OUT)


def test_a_carrier_that_came_late_is_no_fault_and_one_that_came_back_is_likely() -> None:
    came = look("nd1", nic("nd1", changes=3))
    late = {"nd1": look("nd1", nic("nd1", **NO_CARRIER))}
    assert judged(own_view(cables(TWO, late, {"nd1": came}), 1)) == []
    again = {"nd1": look("nd1", nic("nd1", changes=4))}
    made = own_view(cables(TWO, after=again), 1)
    assert "eth0 (2 changes)" in only(made, at("nd1", "eth0"), Confidence.LIKELY).message
    assert only(made, at("nd1", "eth0"), Confidence.LIKELY).kind.title.endswith("for a moment")
    unknown = {"nd1": look("nd1", nic("nd1", changes=None))}
    assert judged(own_view(cables(TWO, after=unknown), 1)) == []


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("caller", TWO)
def test_two_hosts_without_a_witness_cannot_tell_which(caller: str) -> None:
    other = "nd1" if caller == "nd0" else "nd0"
    made = cables(TWO, after=calls_of(caller, **{other: "silent"}))
    assert "cannot be told which end" in only(made, LINK, Confidence.LIKELY).message
    both = calls_of("nd0", nd1="silent") | calls_of("nd1", nd0="no-neighbour")
    only(cables(TWO, after=both), LINK, Confidence.LIKELY)


@pytest.mark.parametrize("lost", ["silent", "no-neighbour", "unreachable"])
def test_with_a_third_host_the_one_that_sees_nobody_is_the_suspect(lost: str) -> None:
    made = cables(THREE, after=calls_of("nd0", nd1=lost, nd2=lost))
    found = only(made, at("nd0"), Confidence.LIKELY)
    assert found.has(Effect.SHUTS_OUT)
    assert "nd1, nd2" in found.message


def test_the_one_that_no_other_sees_is_the_suspect() -> None:
    after = calls_of("nd0", nd1="silent", nd2="answers")
    after |= calls_of("nd2", nd1="silent", nd0="answers")
    found = only(cables(THREE, after=after), at("nd1"), Confidence.LIKELY)
    assert not found.has(Effect.SHUTS_OUT)


def test_one_that_another_host_still_sees_has_lost_a_link() -> None:
    after = calls_of("nd0", nd1="silent", nd2="answers")
    after |= calls_of("nd2", nd1="answers", nd0="answers")
    only(cables(THREE, after=after), LINK, Confidence.LIKELY)


def test_a_host_alone_with_its_view_blames_the_link_and_not_itself() -> None:
    """Seen from nd1: nd2 answers, node 0 does not, and it may be the link between these two."""
    after = {"nd1": look("nd1", calls={"nd0": "silent", "nd2": "answers"})}
    made = own_view(cables(THREE, after=after), 1)
    # It does not know nd2's report, only that it answered.
    assert "nd2 answered" in only(made, LINK, Confidence.LIKELY).message


def test_merged_views_of_the_others_name_the_one_that_is_cut_off() -> None:
    after = calls_of("nd1", nd0="silent", nd2="answers")
    after |= calls_of("nd2", nd0="silent", nd1="answers")
    only(cables(THREE, after=after), at("nd0"), Confidence.LIKELY)
    after |= calls_of("nd0", nd1="silent", nd2="silent")
    only(cables(THREE, after=after), at("nd0"), Confidence.LIKELY)


def test_nobody_sees_anybody() -> None:
    """The switch: no host is to blame."""
    after = {}
    for host in THREE:
        after |= calls_of(host, **{other: "silent" for other in THREE if other != host})
    found = judged(cables(THREE, after=after))
    assert {each.where.hosts for each in found} == {()}
    assert sorted(each.where.links[0] for each in found) == [
        ("nd0", "nd1"),
        ("nd0", "nd2"),
        ("nd1", "nd2"),
    ]


@pytest.mark.parametrize(
    ("before", "now", "where"),
    [
        ("answers", "answers", LINK),  # it sees the gateway: the other end, or the link
        ("answers", "silent", at("nd0")),
        ("answers", "no-neighbour", at("nd0")),
        ("silent", "silent", LINK),  # this gateway never answers: it is no witness
        ("untested", "no-neighbour", LINK),
    ],
)
def test_the_gateway_is_a_witness_if_it_ever_answered(before: str, now: str, where: Where) -> None:
    first = {"nd0": look("nd0", gateway=gateway(before))}
    after = {"nd0": look("nd0", calls={"nd1": "silent"}, gateway=gateway(now))}
    found = only(cables(TWO, first, after), where, Confidence.LIKELY)
    assert ("the gateway answered" in found.message) == (now == "answers")


def test_two_hosts_and_a_gateway_that_only_one_of_them_sees() -> None:
    first = {name: look(name, gateway=gateway("answers")) for name in TWO}
    after = {
        "nd0": look("nd0", calls={"nd1": "silent"}, gateway=gateway("answers")),
        "nd1": look("nd1", calls={"nd0": "silent"}, gateway=gateway("silent")),
    }
    only(cables(TWO, first, after), at("nd1"), Confidence.LIKELY)


def test_a_host_that_answers_is_not_cut_off_whatever_its_processes_do() -> None:
    assert judged(cables(TWO, after=calls_of("nd0", nd1="answers"))) == []
    assert judged(cables(THREE, after=calls_of("nd0", nd1="untested", nd2="untested"))) == []
    assert judged(cables(THREE, after=calls_of("nd0"))) == []
    assert judged(cables(THREE)) == []


def test_one_whose_cable_is_known_to_be_out_explains_who_does_not_see_it() -> None:
    after = calls_of("nd0", nd1="silent", nd2="answers")
    after |= {"nd1": look("nd1", nic("nd1", **NO_CARRIER), calls={"nd0": "unreachable"})}
    only(cables(THREE, after=after), at("nd1", "eth0"), Confidence.CERTAIN)


def test_a_firewall_that_was_there_before_is_no_cut_cable() -> None:
    world = World(2, "gloo").fail([("nd0", "nd1")], DROPPED)
    firsts = {name: look(name) for name in TWO}
    made = with_looks(world.cluster(), firsts, calls_of("nd0", nd1="silent"))
    assert judged(made) == []


def test_hosts_that_are_called_by_names_or_addresses_of_their_own() -> None:
    """A host knows rank 0's by MASTER_ADDR alone: an address of nd0, or a name that no host has."""
    seen = look("nd1", calls={"nd0": "silent"})
    seen["calls"][0]["host"] = "master.example"
    merged = with_looks(make_cluster(TWO), {}, {"nd1": seen})
    only(merged, LINK, Confidence.LIKELY)
    alone = own_view(cables(TWO, after={"nd1": seen}), 1)
    ends = (("master.example", "nd1"), ("nd1", "master.example"))
    only(alone, Where(links=ends), Confidence.LIKELY)


def test_one_host_alone_needs_no_network() -> None:
    first = {"nd0": look("nd0", nic("nd0", **NO_CARRIER))}
    assert judged(cables(("nd0",), first, complete=False, nnodes=1)) == []
    with pytest.raises(Skip):
        CHECK.observe(Context(launch=Launch(nnodes=1), env={}))


# -- looking ---------------------------------------------------------------------------------------


def test_this_machine() -> None:
    launch = Launch(master_addr="127.0.0.1", master_port=1, nnodes=2)
    hosts = {"me": ["127.0.0.1"], "nowhere": ["no-such-host.invalid"]}
    told = Context(launch=launch, env={}, round=AFTER_LOSS, params={"hosts": hosts})
    facts = json.loads(json.dumps(CHECK.observe(told)))
    assert set(facts) == {"interfaces", "towards_master", "gateway", "calls", "roads"}
    assert all(set(each) == set(nic("nd0")) for each in facts["interfaces"])
    assert facts["calls"] == []  # loopback is no way to another host


ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth1\t00000000\t0100000A\t0003\t0\t0\t200\t00000000\t0\t0\t0
eth0\t00000000\tFE4DA8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t004DA8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
short
"""


def test_the_gateway_of_the_lowest_metric(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    assert looking.gateway(tmp_path) is None
    (tmp_path / "proc/net/route").write_text(ROUTES.partition("\n")[0])
    assert looking.gateway(tmp_path) is None
    (tmp_path / "proc/net/route").write_text(ROUTES)
    assert looking.gateway(tmp_path) == gateway("untested")
