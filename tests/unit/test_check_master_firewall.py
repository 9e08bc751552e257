"""The rules of rank 0's own host: blamed only where somebody could not get in."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import AFTER_LOSS, ALONE, Cluster, Confidence, Context, Launch, Severity, Skip
from nccl_doctor.checks.master_firewall import MasterFirewall
from nccl_doctor.checks.port import Port
from nccl_doctor.checks.ranks import Ranks
from nccl_doctor.judge.causes import explain, root_causes
from tests.support.clusters import make_cluster, outcome, reread, shut_out
from tests.support.findings import judge, only
from tests.support.knocks import facts, tried

CHECK = MasterFirewall()


def hit(rule: str = "tcp dport 29500 drop", verdict: str = "drop", **more: Any) -> dict[str, Any]:
    return {
        "tool": "nft",
        "table": "inet filter",
        "chain": "input",
        "rule": rule,
        "handle": "7",
        "verdict": verdict,
        "sure": True,
        "packet": "first",
        "incoming": True,
        "anyone": True,
        **more,
    }


def rules(*hits: dict[str, Any], managers: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "readable": True,
        "reason": "",
        "managers": list(managers),
        "peers": ["192.168.77.0/24"],
        "hits": list(hits),
    }


def knocked(became: str, server: str = "other") -> dict[str, Any]:
    return facts(tried(became, "store" if became == "connected" else ""), server)


def world(
    served: dict[str, Any], *, out: tuple[str, ...] = (), became: str = "dropped", **fields: Any
) -> Cluster:
    """Three hosts; `out` never got in and knocked in vain. nd0 serves, with these rules."""
    names = ("nd0", "nd1", "nd2")
    made = make_cluster(names, 1, **fields)
    hosts = {}
    for host in made.hosts:
        if not host.reported:
            hosts[host.id] = host
            continue
        road = knocked(became if host.name in out else "connected")
        found = {"port": {"alone": outcome(road)}}
        if host.name == "nd0":
            found["port"] = {"alone": outcome(knocked("connected", "self"))}
            seen = {"address": "192.168.77.1", "port": 29500, "rules": served}
            found["master_firewall"] = {"alone": outcome(seen)}
        hosts[host.id] = replace(host, facts=reread(found))
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    return shut_out(replace(made, hosts=tuple(hosts.values()), ranks=ranks), *out)


def test_a_rule_that_kept_a_host_out_is_one_cause_on_the_host_that_has_it() -> None:
    cluster = world(rules(hit()), out=("nd1", "nd2"))
    found = only(CHECK, cluster, "port-blocked", hosts=["nd0"])
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.CERTAIN)
    assert "nft inet filter input: tcp dport 29500 drop" in found.message
    assert found.fix == (
        "on nd0: nft insert rule inet filter input ip saddr 192.168.77.0/24 accept"
    )
    assert found.evidence["could not get in"] == ["nd1", "nd2"]
    assert judge(Port(), cluster) == []


@pytest.mark.parametrize("became", ["rejected", "refused"])
def test_a_rule_that_rejects_explains_what_the_others_saw(became: str) -> None:
    cluster = world(rules(hit("tcp dport 29500 reject", "reject")), out=("nd1",), became=became)
    only(CHECK, cluster, "port-blocked", hosts=["nd0"])
    assert judge(Port(), cluster) == []


def test_who_is_missing_and_left_no_word_is_enough() -> None:
    found = only(CHECK, world(rules(hit()), absent_nodes=(2,)), "port-blocked", hosts=["nd0"])
    assert found.evidence["could not get in"] == []


def test_a_rule_that_takes_one_network_only_is_likely() -> None:
    cluster = world(rules(hit(anyone=False)), absent_nodes=(2,))
    found = only(CHECK, cluster, "port-blocked", hosts=["nd0"])
    assert found.confidence is Confidence.LIKELY


def test_while_everybody_came_in_no_rule_is_blamed() -> None:
    assert judge(CHECK, world(rules(hit()))) == []


def look_again(cluster: Cluster, served: dict[str, Any]) -> Cluster:
    """The same cluster, in which nd0 has looked at its rules again after a loss."""
    first, *others = cluster.hosts
    rounds = first.facts[CHECK.name]
    seen = {**rounds[ALONE].facts, "rules": served}
    again = reread({CHECK.name: {AFTER_LOSS: outcome(seen)}})[CHECK.name]
    facts = {**first.facts, CHECK.name: {**rounds, **again}}
    changed = replace(first, facts=facts)
    ranks = [replace(r, host=changed) if r.host.id == first.id else r for r in cluster.ranks]
    return replace(cluster, hosts=(changed, *others), ranks=tuple(ranks))


def roots(cluster: Cluster) -> list[tuple[str, tuple[str, ...]]]:
    found = explain([*judge(CHECK, cluster), *judge(Ranks(), cluster)], cluster)
    return [(each.code, each.where.hosts) for each in root_causes(found)]


def test_a_rule_that_came_later_keeps_out_who_was_not_in_yet() -> None:
    came_later = look_again(world(rules(), absent_nodes=(2,)), rules(hit()))
    found = only(CHECK, came_later, "port-blocked", hosts=["nd0"])
    assert "the rule came during the run" in found.message
    for cluster in (came_later, world(rules(hit()), absent_nodes=(2,))):
        assert roots(cluster) == [("port-blocked", ("nd0",))]


def lost_the_store(cluster: Cluster, name: str) -> Cluster:
    """The same cluster, in which a host looked again, alone, as it had lost the store."""
    (host,) = (each for each in cluster.hosts if each.name == name)
    again = reread({"uplink": {AFTER_LOSS: outcome({"calls": []})}})
    changed = replace(host, facts={**host.facts, **again})
    hosts = tuple(changed if each.id == host.id else each for each in cluster.hosts)
    ranks = [replace(r, host=changed) if r.host.id == host.id else r for r in cluster.ranks]
    return replace(cluster, hosts=hosts, ranks=tuple(ranks))


def test_a_rule_that_came_later_explains_who_had_got_an_answer_before() -> None:
    reached = world(rules(), out=("nd2",), became="connected")
    for before in (reached, lost_the_store(reached, "nd2")):
        cluster = look_again(before, rules(hit()))
        found = only(CHECK, cluster, "port-blocked", hosts=["nd0"])
        assert found.evidence["could not get in"] == ["nd2"]
        assert roots(cluster) == [("port-blocked", ("nd0",))]


def test_a_rule_explains_a_host_that_was_still_trying_when_it_was_counted() -> None:
    began = world(rules(), out=("nd2",))
    (host,) = (each for each in began.hosts if each.name == "nd2")
    empty = replace(host, facts={})
    hosts = tuple(empty if each is host else each for each in began.hosts)
    ranks = tuple(replace(r, host=empty) if r.host is host else r for r in began.ranks)
    began = replace(began, hosts=hosts, ranks=ranks)
    assert roots(began) == [("host-absent", ("nd2",))]
    assert roots(look_again(began, rules(hit()))) == [("port-blocked", ("nd0",))]


def test_a_host_that_lost_the_store_before_it_was_signed_in_is_not_the_place() -> None:
    reached = world(rules(), out=("nd2",), became="connected")
    (found,) = judge(Ranks(), lost_the_store(reached, "nd2"))
    assert (found.code, found.where.hosts) == ("host-absent", ())
    assert found.where.links == (("nd2", "nd0"),)
    assert "then lost the connection" in found.message
    (found,) = judge(Ranks(), reached)
    assert (found.where.hosts, found.where.links) == (("nd2",), ()), "it came too late, or left"


def test_hosts_that_reached_the_store_and_none_of_which_was_signed_in_share_the_road() -> None:
    """Both ends of the cut road were seen to work: what they have in common is rank 0's host."""
    (one, two) = judge(Ranks(), world(rules(), out=("nd1", "nd2"), became="connected"))
    assert (one.code, two.code) == ("host-absent", "host-absent")
    assert [each.where.hosts for each in (one, two)] == [(), ()]
    assert [each.where.links for each in (one, two)] == [(("nd1", "nd0"),), (("nd2", "nd0"),)]


def test_a_rule_that_is_gone_again_is_still_the_cause() -> None:
    gone = look_again(world(rules(hit()), absent_nodes=(2,)), rules())
    assert "came during the run" not in only(CHECK, gone, "port-blocked", hosts=["nd0"]).message
    assert roots(gone) == [("port-blocked", ("nd0",))]


def test_a_rule_against_some_explains_nobody_while_others_came_in() -> None:
    cluster = world(rules(hit(anyone=False)), absent_nodes=(2,))
    assert [code for code, _ in roots(cluster)] == ["port-blocked", "host-absent"]


@pytest.mark.parametrize(
    "one", [hit(sure=False), hit("redirect to :15001", "redirect"), hit("x", "accept")]
)
def test_a_rule_that_may_or_may_not_take_the_call_is_never_blamed(one: dict[str, Any]) -> None:
    cluster = world(rules(one), out=("nd1",))
    assert judge(CHECK, cluster) == []
    only(Port(), cluster, "port-blocked", links=[("nd1", "nd0")])


def test_a_rule_that_drops_does_not_explain_a_refusal() -> None:
    cluster = world(rules(hit()), out=("nd1",), became="refused")
    assert judge(CHECK, cluster) == []
    only(Port(), cluster, "port-refused", links=[("nd1", "nd0")])


@pytest.mark.parametrize(
    ("manager", "command"),
    [
        ("firewalld", "firewall-cmd --permanent --zone=trusted --add-source=192.168.77.0/24"),
        ("ufw", "ufw prepend allow proto tcp from 192.168.77.0/24"),
    ],
)
def test_the_fix_speaks_the_language_of_the_host(manager: str, command: str) -> None:
    cluster = world(rules(hit(table=f"inet {manager}"), managers=(manager,)), out=("nd1",))
    assert command in only(CHECK, cluster, "port-blocked", hosts=["nd0"]).fix


@pytest.mark.parametrize(
    ("door", "launch"),
    [
        ({"server": "other"}, Launch("env", rank=1, nnodes=2, master_port=29500)),
        ({"server": "agent"}, Launch("torchrun", rank=4, nnodes=2, master_port=29500)),
        ({"server": "self"}, Launch("env", rank=0, nnodes=1, master_port=29500)),
        ({"server": "self"}, Launch("env", rank=0, nnodes=2)),
        ({"server": "self", "bind_errno": 98}, Launch("env", rank=0, nnodes=2, master_port=29500)),
    ],
)
def test_only_the_host_that_serves_others_is_asked(door: dict[str, Any], launch: Launch) -> None:
    with pytest.raises(Skip):
        CHECK.observe(Context(launch=launch, env={}, door=door))


def test_the_rules_of_this_host() -> None:
    launch = Launch("env", rank=0, nnodes=2, master_addr="localhost", master_port=29500)
    try:
        found = CHECK.observe(Context(launch=launch, env={}, door={"server": "self"}))
    except Skip as reason:
        pytest.skip(str(reason))
    assert found["rules"]["readable"]
    assert found["port"] == 29500
    json.dumps(found)
