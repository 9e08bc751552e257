"""Ports of the job's services: rules on made-up hosts, and a real port of this one."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Context, Finding, Job, Launch, Severity, Skip
from nccl_doctor.checks.endpoints import CALLS, RULES, EndpointsCheck
from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.toolkit.net.endpoints import endpoint_words, read_endpoint
from tests.support.clusters import make_cluster, outcome, reread
from tests.support.findings import judge, only
from tests.support.rows import each_row

CHECK = EndpointsCheck()
TEXT = "nd0:8265"
PORT = {"bind_errno": None, "bind_error": "", "may_bind": True, "ephemeral": None, "reserved": ""}
TAKEN = {"bind_errno": errno.EADDRINUSE, "bind_error": "Address already in use"}
HELD = {"pid": 77, "command": "python old.py", "uid": 1000, "state": "listening"}


class World:
    """Hosts that all reach the port of nd0, to be spoilt by a test; of nobody's with `owner=""`."""

    def __init__(self, count: int, owner: str = "nd0") -> None:
        self.names = [f"nd{i}" for i in range(count)]
        self.owner = owner
        common = {"endpoint": TEXT, "port": 8265, "answers": ["10.0.0.1"], "error": ""}
        called = {"mine": False, "address": "10.0.0.1", "outcome": "ok", "detail": ""}
        self.facts: dict[str, dict[str, Any]] = {
            name: {**common, **({"mine": True, **PORT} if name == owner else called)}
            for name in self.names
        }
        self.rules: dict[str, dict[str, Any]] = {}

    def change(self, *names: str, **fields: Any) -> World:
        for name in names:
            self.facts[name] = {**self.facts[name], **fields}
        return self

    def fail(self, *names: str, outcome: str = "dropped") -> World:
        return self.change(*names, outcome=outcome, detail="why")

    def rule(self, name: str, *, incoming: bool) -> World:
        hit = {
            "tool": "nft",
            "table": "inet fw",
            "chain": "input" if incoming else "output",
            "rule": "tcp dport 8265 drop",
            "handle": "4",
            "verdict": "drop",
            "sure": True,
            "incoming": incoming,
            "packet": "first",
        }
        facts = {"readable": True, "reason": "", "managers": [], "peers": ["10.0.0.0/24"]}
        self.rules[name] = {**facts, "hits": [hit]}
        return self

    def cluster(self, **fields: Any) -> Cluster:
        made = make_cluster(self.names, job=Job(endpoints=(TEXT,)), **fields)
        hosts = []
        for host in made.hosts:
            name = host.name or ""
            rounds = {CALLS: outcome({"endpoints": [self.facts[name]]})}
            if name in self.rules:
                rounds[RULES] = outcome({"rules": {TEXT: self.rules[name]}})
            hosts.append(replace(host, facts=reread({CHECK.name: rounds})))
        ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
        return replace(made, hosts=tuple(hosts), ranks=ranks)


def found(world: World, code: str, *hosts: str, **where: Any) -> Finding:
    return only(CHECK, world.cluster(), code, hosts=hosts, **where)


@each_row("world", [
    World(3),
    World(1),
    World(3, owner=""),
    # The service is up, on the loopback interface only, under Ray.
    World(2).change("nd0", **TAKEN, holder=HELD, known=True).fail("nd1", outcome="refused"),
    # A host of the job that could not look the name up, and has called the address all the same.
    World(2).change("nd1", answers=[], error="Name or service not known"),
])  # fmt: skip
def test_what_is_healthy_is_silent(world: World) -> None:
    assert [each for each in judge(CHECK, world.cluster()) if each.level is not Severity.INFO] == []


# The port


def test_a_port_that_is_held() -> None:
    one = found(World(2).change("nd0", **TAKEN, holder=HELD), "endpoint-in-use", "nd0")
    assert one.message == "nd0:8265 is held by process 77 (python old.py, user id 1000)"
    assert one.fix.startswith("give the service another port")
    assert [step.command for step in one.fix.alternatives[0].steps] == [
        "ps -o user,pid,lstart,args -p 77",
        "kill 77",
    ]
    assert one.level is Severity.WARN
    hidden = {**HELD, "pid": None}
    one = found(World(2).change("nd0", **TAKEN, holder=hidden), "endpoint-in-use", "nd0")
    assert "may not see (user id 1000)" in one.message
    assert "sudo ss -ltnp 'sport = :8265'" in one.fix.alternatives[0]
    found(World(2).change("nd0", **TAKEN, holder=None), "endpoint-in-use", "nd0")


def test_the_port_of_the_store_is_taken_for_certain() -> None:
    one = found(World(2).change("nd0", **TAKEN, is_master=True), "endpoint-in-use", "nd0")
    assert (one.message, one.level) == ("nd0:8265 is MASTER_PORT as well", Severity.FAIL)


def test_a_port_that_only_root_may_bind() -> None:
    denied = {"bind_errno": errno.EACCES, "bind_error": "Permission denied"}
    one = found(World(2).change("nd0", **denied), "endpoint-privileged", "nd0")
    assert one.message == "nd0:8265: Permission denied"


def test_a_port_that_the_kernel_may_give_to_a_client() -> None:
    world = World(2).change("nd0", ephemeral=[8000, 60999], reserved="29500")
    one = found(world, "endpoint-ephemeral", "nd0")
    assert one.message == "nd0:8265 is in ip_local_port_range 8000–60999"
    assert "sysctl -w net.ipv4.ip_local_reserved_ports=29500,8265" in one.fix


# The way to it


def test_a_port_that_nobody_reaches() -> None:
    links = [("nd1", "nd0"), ("nd2", "nd0")]
    one = found(World(3).fail("nd1", "nd2"), "endpoint-blocked", "nd0", links=links)
    assert one.message == "nd0:8265: no answer (2 of 2 hosts)"
    assert "on nd0: open tcp port 8265" in one.fix
    assert one.confidence is Confidence.LIKELY


def test_a_port_that_one_host_does_not_reach() -> None:
    one = found(World(3).fail("nd2"), "endpoint-blocked", links=[("nd2", "nd0")])
    assert one.message == "nd0:8265: no answer (1 of 2 hosts)"
    assert one.confidence is Confidence.POSSIBLE, "it may be a rule of nd2: they were not read"
    read = World(3).fail("nd2").rule("nd2", incoming=False)
    read.rules["nd2"]["hits"] = []
    one = found(read, "endpoint-blocked", links=[("nd2", "nd0")])
    assert one.confidence is Confidence.LIKELY
    found(World(2).fail("nd1"), "endpoint-blocked", links=[("nd1", "nd0")])


def test_the_rule_of_the_host_of_the_service() -> None:
    world = World(3).fail("nd2").rule("nd0", incoming=True)
    one = found(world, "endpoint-blocked", "nd0", links=[("nd2", "nd0")])
    assert "; dropped by this rule: nft inet fw input: tcp dport 8265 drop" in one.message
    assert one.fix.startswith("on nd0: nft insert rule inet fw input")
    assert one.confidence is Confidence.CERTAIN


def test_the_rule_of_a_host_that_calls() -> None:
    world = World(4).fail("nd2").rule("nd2", incoming=False)
    one = found(world, "endpoint-blocked", "nd2", links=[("nd2", "nd0")])
    assert one.fix.startswith("on nd2: nft insert rule")
    # It drops, and the call was refused: the rule is none of this.
    world.fail("nd2", outcome="refused")
    found(world, "endpoint-blocked", links=[("nd2", "nd0")])


def late(world: World, *names: str) -> World:
    """These hosts called nd0 in vain, which read late what they said."""
    world.fail(*names, outcome="intercepted")
    for name in names:
        world.change(name, source=f"10.0.1.{name[2:]}")
    return world.change("nd0", late={f"10.0.1.{name[2:]}": 3.2 for name in names})


def test_a_host_that_reads_late_shuts_nobody_out() -> None:
    one = found(late(World(3), "nd1", "nd2"), "host-answers-late", "nd0")
    assert one.level is Severity.INFO
    assert one.message == (
        "nd0:8265: on new connections, data lay unread for up to 3.2 s: 2 of 2 calls could not be "
        "judged"
    )


def test_a_host_that_reads_late_explains_no_other_call() -> None:
    world = late(World(4), "nd1").fail("nd2", outcome="intercepted")
    by_code = {each.code: each for each in judge(CHECK, world.cluster())}
    assert by_code.keys() == {"endpoint-blocked", "host-answers-late"}
    assert by_code["endpoint-blocked"].where.links == (("nd2", "nd0"),)
    assert "(1 of 2 hosts)" in by_code["endpoint-blocked"].message


def test_a_name_that_leads_to_another_machine() -> None:
    world = World(3).fail("nd1", outcome="refused").change("nd1", address="10.9.9.9", foreign=True)
    one = found(world, "endpoint-blocked", links=[("nd1", "nd0")])
    assert "connection refused at 10.9.9.9, which is no address of nd0" in one.message


def test_what_does_not_resolve() -> None:
    gone = {"answers": [], "error": "Name or service not known"}
    world = World(3, owner="").change("nd1", **gone)
    del world.facts["nd1"]["outcome"]
    one = found(world, "endpoint-unreachable", "nd1")
    assert one.message == f"{TEXT}: the name does not resolve: Name or service not known"
    assert "getent hosts nd0" in one.fix


def test_a_host_of_nobody_that_one_or_all_cannot_reach() -> None:
    one = found(World(3, owner="").fail("nd2"), "endpoint-unreachable", "nd2")
    assert one.message == f"{TEXT}: no answer; 2 other hosts reach it"
    all_ = World(3, owner="").fail("nd0", "nd1", "nd2")
    one = found(all_, "endpoint-unreachable", "nd0", "nd1", "nd2")
    assert one.level is Severity.FAIL
    one = found(all_.fail("nd0", "nd1", "nd2", outcome="refused"), one.code, "nd0", "nd1", "nd2")
    assert one.level is Severity.INFO


def test_a_rule_of_its_own_keeps_one_host_from_it() -> None:
    world = World(3, owner="").fail("nd2").rule("nd2", incoming=False)
    one = found(world, "endpoint-unreachable", "nd2")
    assert one.confidence is Confidence.CERTAIN
    assert one.fix.startswith("on nd2: nft insert rule")


def test_a_node_rank_that_the_job_does_not_have() -> None:
    world = World(2, owner="").change("nd0", "nd1", endpoint="5:80", answers=[])
    for facts in world.facts.values():
        del facts["outcome"]
    one = found(world, "endpoint-unreachable", nodes=[5])
    assert "the job has no node rank 5, only 0 to 1" in one.message
    # That of a host which did not come is not known.
    assert judge(CHECK, world.change("nd0", "nd1", endpoint="1:80").cluster()) == []


def test_a_host_of_the_job_that_says_nothing_is_none_outside_of_it() -> None:
    world = World(2, owner="").change("nd0", "nd1", planned=4).fail("nd0", outcome="refused")
    assert judge(CHECK, world.cluster()) == []


# The check


def test_without_the_option_it_is_skipped() -> None:
    with pytest.raises(Skip, match="--endpoint HOST:PORT was not given"):
        CHECK.plan(make_cluster())


@each_row("text seat", [
    ("nd1:80", 2),
    ("ND1:80", 2),
    ("1:80", 2),
    ("192.168.77.2:80", 2),
    ("nd9:80", None),
    ("7:80", None),
    ("nd1.corp:80", 2),
    ("nd11:80", None),
])  # fmt: skip
def test_whose_endpoint_it_is(text: str, seat: int | None) -> None:
    (first,) = CHECK.plan(make_cluster(job=Job(endpoints=(text,))))
    assert first.params["endpoints"] == [{"endpoint": text, "owner": seat}]


def test_rules_are_read_at_both_ends_of_what_failed() -> None:
    assert [each.name for each in CHECK.plan(World(3).cluster())] == [CALLS]
    _, second = CHECK.plan(World(9).fail("nd2", "nd3", "nd4").cluster())
    assert second.groups == ((0,), (4,), (6,))
    assert [(look["seat"], look["in"]) for look in second.params["looks"]] == [
        (4, False),
        (6, False),
        (0, True),
    ]
    (here,) = CHECK.observe(
        Context(launch=Launch(), env={}, round=RULES, seat=0, params=second.params)
    )["rules"].values()
    assert here["peers"]


def test_a_port_of_this_host_that_is_free_and_then_held() -> None:
    def look(port: int) -> dict[str, Any]:
        given = {"endpoint": f"0:{port}", "owner": 0}
        context = Context(launch=Launch(), env={}, params={"endpoints": [given]}, seat=0)
        (facts,) = CHECK.observe(context)["endpoints"]
        return dict(facts)

    with socket.create_server(("", 0)) as held:
        port = held.getsockname()[1]
        facts = look(port)
        assert (facts["mine"], facts["bind_errno"]) == (True, errno.EADDRINUSE)
        assert facts["holder"]["state"] == "listening"
    facts = look(port)
    assert facts["bind_errno"] is None
    assert look(port) == facts  # nothing is left of it
    twice = {"endpoints": [{"endpoint": f"{name}:{port}", "owner": 0} for name in ("0", "me")]}
    context = Context(launch=Launch(), env={}, params=twice, seat=0)
    assert [each["bind_errno"] for each in CHECK.observe(context)["endpoints"]] == [None, None]


def test_a_record_of_a_job_keeps_them() -> None:
    job = Job(endpoints=("a:1", "b:2"))
    assert decode(Job, Node("job", encode(job))) == job


@each_row("text host port", [
    ("head:8265", "head", 8265),
    ("[fd00::1]:80", "fd00::1", 80),
    (" 10.0.0.1:65535 ", "10.0.0.1", 65535),
])  # fmt: skip
def test_an_endpoint_is_read(text: str, host: str, port: int) -> None:
    assert read_endpoint(text) == (host, port)
    assert endpoint_words(host, port) == text.strip()


@each_row("text", ["", "head", ":80", "head:", "head:0", "head:65536", "head:8e1", "fd00::1:80",
                   "http://head:80", "a b:80"])  # fmt: skip
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|whole number|brackets"):
        read_endpoint(text)
