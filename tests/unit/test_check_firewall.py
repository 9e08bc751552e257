"""The firewall check: what it judges from made-up facts, and one real call over loopback."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    Cluster,
    Confidence,
    Context,
    Fix,
    Launch,
    On,
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
    Untested,
)
from nccl_doctor.checks.firewall import Firewall, _burst
from nccl_doctor.checks.firewall.culprits import follow_pairs
from nccl_doctor.toolkit.firewall.netfilter import Rules
from nccl_doctor.toolkit.firewall.rulesets import parse_nft
from nccl_doctor.toolkit.net.interfaces import Interface
from nccl_doctor.toolkit.peers.echo import ListeningAddress
from nccl_doctor.toolkit.peers.listeners import Listeners
from nccl_doctor.toolkit.peers.schedule import Schedule
from tests.support.checks import CHECKS
from tests.support.clusters import make_cluster, on_one_machine, outcome, with_round
from tests.support.fixes import prose_with_commands
from tests.support.peers import (
    DROPPED,
    NO_ROUTE,
    OK,
    OWN,
    REFUSED,
    SILENT_PROXY,
    Link,
    World,
    only,
    pairs,
    stuck,
)
from tests.support.rows import each_row

CHECK = Firewall()


# Two hosts


def behind_nat(world: World, name: str, to: list[str], far: str) -> World:
    """This host's calls come from another address, and calls to its own do not arrive."""
    for other in to:
        (call,) = world.facts[name]["peers"][str(world.seat(other))]
        call["attempts"] = [{**OK, "seen": far}]
    return world.fail([(other, name) for other in to], DROPPED)


@pytest.mark.parametrize("count", [2, 4])
def test_a_host_behind_an_address_translation_is_named_with_both_addresses(count: int) -> None:
    world = World(count)
    behind_nat(world, "nd1", [name for name in world.names if name != "nd1"], "10.7.0.9")
    found = only(world.judge(), "peer-one-way")
    assert found.where.hosts == ("nd1",)
    assert found.message.startswith(
        "nd1 tells 192.168.77.2, and others see it call from 10.7.0.9; "
    )
    assert "NAT" in found.kind.title
    bridged, by_vpn, way = found.fix.alternatives
    assert "VBoxManage modifyvm NAME --nic1 bridged" in bridged
    assert "of a VPN" in by_vpn
    assert way.startswith("if they can reach it: open all tcp")
    assert found.confidence is Confidence.LIKELY


def test_a_translation_behind_which_a_host_can_be_called_is_no_finding() -> None:
    world = World(3)
    behind_nat(world, "nd1", ["nd0", "nd2"], "10.7.0.9")
    for other in ("nd0", "nd2"):
        (call,) = world.facts[other]["peers"][str(world.seat("nd1"))]
        call["attempts"] = [OK]
    assert world.judge() == []


@pytest.mark.parametrize(
    ("far", "attempt", "code"),
    [("10.7.0.9", SILENT_PROXY, "peer-intercepted"), ("127.0.0.6", DROPPED, "peer-one-way")],
)
def test_a_proxy_of_a_service_mesh_is_no_translation(
    far: str, attempt: Mapping[str, Any], code: str
) -> None:
    """Istio's calls the program from 127.0.0.6."""
    world = behind_nat(World(2), "nd1", ["nd0"], far).fail([("nd0", "nd1")], attempt)
    found = {each.code: each for each in world.judge() if each.level is Severity.FAIL}
    assert found.keys() == {code}
    assert "NAT" not in found[code].kind.title


REDIRECT = {
    "table": "ip nat",
    "chain": "PREROUTING",
    "rule": "tcp dport 1024-65535 redirect to :15006",
    "verdict": "redirect",
}


def seen_from(world: World, caller: str, listener: str, far: str) -> World:
    """A call that works, and that the listener saw come from elsewhere."""
    (call,) = world.facts[caller]["peers"][str(world.seat(listener))]
    call.update(attempts=[{**OK, "seen": far}], source=world.address(caller))
    return world


@each_row("far", ["127.0.0.6", "::6", "192.168.77.2"])
def test_a_proxy_that_passes_calls_on_is_a_warning_with_both_addresses(far: str) -> None:
    """An echo that comes back proves bytes, and not the road. Istio's proxy calls from 127.0.0.6
    or ::6; others call from the host's own address.
    """
    world = seen_from(World(3), "nd0", "nd1", far)
    found = only(seen_from(world, "nd2", "nd1", far).judge(), "peer-intercepted")
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.CERTAIN)
    assert (found.where.hosts, found.where.links) == (("nd1",), ())
    said = f"nd0 calls nd1 from 192.168.77.1, and is seen there to call from {far} (2 such calls)"
    assert found.message == said
    assert 'sidecar.istio.io/inject: "false"' in found.fix
    assert "passes them on" in found.kind.title


def test_the_rule_that_diverts_calls_to_a_proxy_is_read_and_named() -> None:
    world = seen_from(World(2), "nd0", "nd1", "127.0.0.6")
    rounds = {each.name: each for each in Firewall().plan(world.cluster())}
    assert rounds["rules"].groups == ((0,), (2,))
    (pair,) = rounds["rules"].params["pairs"]
    assert (pair["source"], pair["target"], pair["kind"]) == (
        *("192.168.77.1", "192.168.77.2"),
        "connect",
    )
    found = only(world.hit("nd1", ("nd0", "nd1"), **REDIRECT).judge(), "peer-intercepted")
    assert found.where.hosts == ("nd1",)
    assert found.message.endswith(
        "; redirected by this rule: nft ip nat PREROUTING: tcp dport 1024-65535 redirect to :15006"
    )
    (way,) = found.fix.alternatives
    assert way == "on nd1: nft delete rule ip nat PREROUTING handle 4"


def test_who_calls_from_another_own_address_or_by_a_router_meets_no_proxy() -> None:
    for far in ("192.168.77.1", "10.7.0.9", "fd00::6", "no address"):
        assert seen_from(World(2), "nd0", "nd1", far).judge() == []


def test_a_rule_of_a_firewall_is_named_and_not_the_translation() -> None:
    world = behind_nat(World(2), "nd1", ["nd0"], "10.7.0.9")
    found = only(world.hit("nd1", ("nd0", "nd1")).judge(), "peer-one-way")
    assert "tcp dport 32768-60999 drop" in found.message
    assert "NAT" not in found.kind.title


def test_two_hosts_blocked_both_ways_names_links_alone() -> None:
    world = World(2)
    found = only(world.fail(pairs(world), DROPPED).judge(), "peer-blocked")
    assert found.where.hosts == ()
    assert found.where.links == (("nd0", "nd1"), ("nd1", "nd0"))
    assert found.confidence is Confidence.POSSIBLE
    assert "no answer on a new port, twice" in found.message
    assert "2 of 2" in found.message
    assert "32768-60999" in found.fix


def test_a_local_rule_names_its_host_for_certain() -> None:
    world = World(2).fail([("nd0", "nd1"), ("nd1", "nd0")], DROPPED)
    world.hit("nd1", ("nd0", "nd1")).hit("nd1", ("nd1", "nd0"), packet="reply")
    found = only(world.judge(), "peer-blocked")
    assert found.where.hosts == ("nd1",)
    assert found.confidence is Confidence.CERTAIN
    assert found.evidence["rules"] == ["nd1: nft inet fw input: tcp dport 32768-60999 drop"]
    assert found.cause == "nd1's firewall drops connections from nd0 (nft inet fw input)"
    assert found.fix == "on nd1: nft insert rule inet fw input ip saddr 192.168.77.1 accept"


def test_firewalld_drops_what_would_be_answered_by_another_interface() -> None:
    world = World(3).fail([("nd0", "nd1"), ("nd2", "nd1")], DROPPED)
    rule = "meta nfproto ipv6 fib saddr . mark . iif oif missing drop"
    where = {"table": "inet firewalld", "chain": "filter_PREROUTING", "way_back": True}
    world.hit("nd1", ("nd0", "nd1"), rule=rule, **where)
    world.hit("nd1", ("nd2", "nd1"), rule=rule, **where)
    world.rules["nd1"]["managers"] = ["firewalld"]
    found = only(world.judge(), "peer-one-way")
    assert (found.where.hosts, found.confidence) == (("nd1",), Confidence.CERTAIN)
    assert found.message.endswith(f"{rule} (answers would leave by another interface)")
    assert found.fix.startswith("on nd1: sed -i 's/^IPv6_rpfilter=.*/IPv6_rpfilter=no/' ")


def test_a_rule_that_only_may_match_blames_nobody() -> None:
    world = World(2).fail([("nd0", "nd1"), ("nd1", "nd0")], DROPPED)
    found = only(world.hit("nd1", ("nd0", "nd1"), sure=False).judge(), "peer-blocked")
    assert found.where.hosts == ()
    assert "tcp dport" in str(found.evidence["local rules"]["nd1"])


def test_one_way_is_a_failure_of_its_own() -> None:
    found = only(World(2).fail([("nd0", "nd1")], REFUSED).judge(), "peer-one-way")
    assert found.level is Severity.FAIL
    assert (found.where.hosts, found.where.links) == ((), (("nd0", "nd1"),))


def test_no_route_takes_the_unanswered_calls_back_with_it() -> None:
    world = World(2).fail([("nd0", "nd1")], NO_ROUTE).fail([("nd1", "nd0")], DROPPED)
    found = only(world.judge(), "peer-no-route")
    assert found.where.links == (("nd0", "nd1"), ("nd1", "nd0"))
    assert found.where.hosts == ()


def test_a_route_that_leads_nowhere_is_named_with_the_host_that_has_it() -> None:
    world = World(3).fail([("nd0", "nd1")], NO_ROUTE).fail([("nd1", "nd0")], DROPPED)
    (call,) = world.facts["nd0"]["peers"][str(world.seat("nd1"))]
    call["route"] = "prohibit 192.168.77.2"
    found = only(world.judge(), "peer-no-route")
    assert (found.where.hosts, found.confidence) == (("nd0",), Confidence.CERTAIN)
    assert found.where.links == (("nd0", "nd1"), ("nd1", "nd0"))
    assert found.message.endswith("that leads nowhere: prohibit 192.168.77.2")
    (step,) = found.fix.steps
    assert (step.on, step.command) == (("nd0",), "ip route del prohibit 192.168.77.2")
    assert step.undo == "ip route add prohibit 192.168.77.2"


def test_a_route_that_leads_answers_nowhere_is_named_too() -> None:
    """The job would call nd0 at another interface, to which no host has a route."""
    world = World(3, backend="gloo").fail([("nd0", "nd1")], DROPPED)
    for host in ("nd1", "nd2"):
        world.extra(host, "nd0", "ext0", NO_ROUTE, "nccl-sockets", "gloo")
        world.facts[host]["peers"][str(world.seat("nd0"))][0]["roles"] = ["nccl-sockets"]
    (eth0, _) = world.facts["nd1"]["peers"][str(world.seat("nd0"))]
    eth0 |= {"attempts": [NO_ROUTE] * 2, "route": "unreachable 192.168.77.1"}
    found = only([f for f in world.judge() if f.where.hosts != ("nd0",)], "peer-no-route")
    assert (found.where.hosts, found.confidence) == (("nd1",), Confidence.CERTAIN)
    (step,) = found.fix.steps
    assert (step.on, step.command) == (("nd1",), "ip route del unreachable 192.168.77.1")


@pytest.mark.parametrize(
    ("a_way", "b_way", "links"),
    [
        ("upload", "download", (("nd0", "nd1"),)),
        ("download", "upload", (("nd1", "nd0"),)),
        ("upload", "upload", (("nd0", "nd1"), ("nd1", "nd0"))),
    ],
)
def test_an_mtu_black_hole_has_a_direction(a_way: str, b_way: str, links: tuple[Link, ...]) -> None:
    world = World(2).fail([("nd0", "nd1")], stuck(a_way)).fail([("nd1", "nd0")], stuck(b_way))
    found = only(world.judge(), "mtu-blackhole")
    assert (found.where.hosts, found.where.links) == ((), links)
    assert found.kind.layer.value == "route"


def test_the_fix_of_a_black_hole_finds_the_size_and_says_where_to_set_it() -> None:
    world = World(2).fail([("nd0", "nd1")], stuck("upload"))
    find, put = only(world.judge(), "mtu-blackhole").fix.steps
    assert find.on == ("nd0",)
    assert put.command == "# ip link set dev eth0 mtu SIZE"
    # A path that carries 1400 bytes, of which 28 are headers.
    ping = 'ping() { [ "$9" = 192.168.77.2 ] && [ "$8" -le 1372 ]; }'
    script = f"set +m\n{ping}\n{find.command}\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "MTU 1400\n"


def test_the_fix_of_a_black_hole_sets_the_size_that_passes() -> None:
    world = World(2).fail([("nd0", "nd1"), ("nd1", "nd0")], stuck("upload"))
    world.facts["nd1"]["peers"]["0"][0] |= {"carries": 1400, "mtu": 9000}
    found = only(world.judge(), "mtu-blackhole")
    (step,) = found.fix.steps
    assert step.command == "ip link set dev eth0 mtu 1400"
    assert step.undo == "ip link set dev eth0 mtu 9000"
    assert step.on is On.EVERY
    assert prose_with_commands(found.fix) == []


def test_what_stalls_halfway_is_only_possibly_the_mtu() -> None:
    world = World(2).fail([("nd0", "nd1")], stuck("upload", 65536))
    assert only(world.judge(), "mtu-blackhole").confidence is Confidence.POSSIBLE


def test_a_rule_on_length_is_found() -> None:
    world = World(2).fail([("nd0", "nd1")], stuck("upload"))
    world.hit("nd1", ("nd0", "nd1"), "upload", rule="meta length > 1200 drop")
    found = only(world.judge(), "mtu-blackhole")
    assert found.where.hosts == ("nd1",)
    assert found.fix == "on nd1: nft delete rule inet fw input handle 4"


def test_a_proxy_is_told_from_a_firewall() -> None:
    found = only(World(2).fail([("nd0", "nd1")], SILENT_PROXY).judge(), "peer-intercepted")
    assert (found.where.hosts, found.where.links) == ((), (("nd0", "nd1"),))
    assert "no proof of identity" in found.message


@pytest.mark.parametrize("status", [OutcomeStatus.HUNG, OutcomeStatus.DIED, OutcomeStatus.SILENT])
def test_a_host_that_was_lost_meanwhile_is_not_tested(status: OutcomeStatus) -> None:
    world = World(3).fail([("nd0", "nd2"), ("nd1", "nd2")], SILENT_PROXY)
    world.outcomes["nd2"] = Outcome(status)
    assert world.judge() == []


def test_a_failure_that_was_not_confirmed_is_not_reported() -> None:
    world = World(2)
    world.facts["nd0"]["peers"]["2"][0]["attempts"] = [DROPPED]
    assert world.judge() == []


def test_a_second_attempt_that_works_is_good_enough() -> None:
    world = World(2)
    world.facts["nd0"]["peers"]["2"][0]["attempts"] = [DROPPED, OK]
    assert world.judge() == []


# Interfaces


@pytest.mark.parametrize(("backend", "level"), [("nccl", Severity.FAIL), ("gloo", Severity.INFO)])
def test_docker_on_both_hosts(backend: str, level: Severity) -> None:
    world = World(2, backend)
    world.extra("nd0", "nd1", "docker0", OWN, "nccl-sockets")
    world.extra("nd1", "nd0", "docker0", OWN, "nccl-sockets")
    found = only(world.judge(), "interface-unroutable")
    assert found.level is level
    assert found.where.interfaces == ("docker0",)
    assert found.fix == "on every host: export NCCL_SOCKET_IFNAME='=eth0'"


def test_an_address_that_two_hosts_have_is_no_fault_of_its_interface() -> None:
    """Check `duplicate_address` reports those that peers use, and not those of bridges."""
    world = World(2)
    world.fail(pairs(world), OWN)
    made = world.cluster()
    for likely, reason in ((True, "address-duplicate"), (False, None)):
        hosts = []
        for host in made.hosts:
            mine = [
                "eth0" if likely else "docker0",
                world.address(host.label) if likely else "172.17.0.1",
            ]
            seen = {"duplicate_address": {ALONE: outcome({"likely": mine})}}
            hosts.append(replace(host, facts={**host.facts, **seen}))
        ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
        found = list(CHECK.judge(replace(made, hosts=tuple(hosts), ranks=ranks)))
        assert [(f.code, f.explained_by) for f in found] == [("interface-unroutable", reason)]


def test_node_ranks_of_one_machine_are_no_two_hosts() -> None:
    """Each has the address of the other, and their collectives pass."""
    world = World(2, "gloo")
    world.fail(pairs(world), OWN)
    made = world.cluster()
    assert [f.code for f in CHECK.judge(made)] == ["interface-unroutable"]
    made = on_one_machine(made, "nd0", "nd1")
    assert [*CHECK.judge(made), *CHECKS["interfaces"].judge(made)] == []
    assert list(CHECK.sections(made)) == []
    with pytest.raises(Skip, match="one machine"):
        CHECK.plan(made)


def test_of_three_hosts_on_two_machines_only_the_road_between_machines_is_judged() -> None:
    world = World(3, "gloo").fail([("nd0", "nd1"), ("nd1", "nd0")], OWN)
    made = on_one_machine(world.cluster(), "nd0", "nd1")
    assert list(CHECK.judge(made)) == []
    assert CHECK.plan(made)
    world.fail([("nd2", "nd1"), ("nd2", "nd0"), ("nd0", "nd2"), ("nd1", "nd2")], DROPPED)
    (found,) = CHECK.judge(on_one_machine(world.cluster(), "nd0", "nd1"))
    assert found.code == "peer-blocked"
    assert all("nd2" in link for link in found.where.links)


def test_infiniband_carries_the_data_so_a_second_socket_does_not_matter() -> None:
    world = World(2).extra("nd0", "nd1", "docker0", OWN, "nccl-sockets")
    world.facts["nd1"]["nccl_data"] = "infiniband"
    assert only(world.judge(), "interface-unroutable").level is Severity.INFO


def test_a_second_interface_that_nobody_reaches_is_its_owners_choice() -> None:
    world = World(3)
    world.extra("nd0", "nd2", "tun0", DROPPED, "nccl-sockets")
    world.extra("nd1", "nd2", "tun0", DROPPED, "nccl-sockets")
    found = only(world.judge(), "interface-unroutable")
    assert (found.where.hosts, found.where.interfaces) == (("nd2",), ("tun0",))
    assert found.where.links == (("nd0", "nd2"), ("nd1", "nd2"))


def test_an_interface_that_is_down_is_told_apart_from_one_that_leads_nowhere() -> None:
    world = World(3)
    for host in ("nd1", "nd2"):
        world.extra("nd0", host, "tun0", NO_ROUTE, "nccl-sockets")
    made = world.cluster()
    ranks = []
    for rank in made.ranks:
        is_down = rank.host.label == "nd1"
        nics = [{"name": "tun0", "addresses": [], "up": not is_down, "running": not is_down}]
        ranks.append(
            replace(
                rank, facts={**rank.facts, "interfaces": {ALONE: outcome({"interfaces": nics})}}
            )
        )
    found = list(CHECK.judge(replace(made, ranks=tuple(ranks))))
    assert [(f.code, f.where.hosts, f.explained_by) for f in found] == [
        ("interface-unroutable", ("nd2",), None),
        ("interface-unroutable", ("nd1",), "interface-down"),
    ]


def test_a_second_interface_between_two_hosts_blames_the_link() -> None:
    world = World(2)
    world.extra("nd0", "nd1", "eth1", DROPPED, "nccl-sockets")
    world.extra("nd1", "nd0", "eth1", DROPPED, "nccl-sockets")
    found = only(world.judge(), "interface-unroutable")
    assert (found.where.hosts, found.where.interfaces) == ((), ("eth1",))
    assert found.confidence is Confidence.LIKELY


def test_a_host_outside_the_second_network_is_found() -> None:
    world = World(3)
    world.extra("nd0", "nd1", "eth1", OK, "nccl-sockets")
    world.extra("nd1", "nd0", "eth1", OK, "nccl-sockets")
    world.extra("nd2", "nd0", "eth1", NO_ROUTE, "nccl-sockets")
    world.extra("nd2", "nd1", "eth1", NO_ROUTE, "nccl-sockets")
    found = only(world.judge(), "interface-unroutable")
    assert found.where.hosts == ("nd2",)


# Planning


def test_the_first_round_is_everybody() -> None:
    (matrix,) = CHECK.plan(make_cluster(["nd0", "nd1", "nd2"], absent_nodes=[2]))
    assert (matrix.name, matrix.groups) == ("matrix", ((0, 2),))


def test_no_second_round_where_all_is_well() -> None:
    assert [each.name for each in CHECK.plan(World(3).cluster())] == ["matrix"]


def hung(cluster: Cluster, *names: str) -> Cluster:
    """The same cluster, in which ranks of these hosts hung in a later check."""
    stuck = Outcome(OutcomeStatus.HUNG, reason="no progress")
    by_host = {host.label: stuck if host.label in names else {} for host in cluster.hosts}
    return with_round(cluster, "collectives", "world", by_host)


def test_where_a_group_hung_the_hosts_call_again() -> None:
    cluster = World(3).cluster()
    assert [each.name for each in CHECK.plan(hung(cluster))] == ["matrix"]
    matrix, again = CHECK.plan(hung(cluster, "nd0", "nd1"))
    assert (again.name, again.groups) == ("again", matrix.groups)
    shut = World(3).fail([("nd0", "nd2")], DROPPED).cluster()
    assert [each.name for each in CHECK.plan(hung(shut, "nd0"))] == ["matrix", "rules"]


def test_a_firewall_that_comes_up_during_the_run_is_named() -> None:
    later = World(3).fail([("nd0", "nd1"), ("nd2", "nd1")], DROPPED)
    world = hung(World(3).cluster(), "nd0", "nd1", "nd2")
    cluster = with_round(world, "firewall", "again", later.facts)
    *_, rules = CHECK.plan(cluster)
    assert (rules.name, rules.groups) == ("rules-again", ((0,), (2,), (4,)))
    later.hit("nd1", ("nd0", "nd1")).hit("nd1", ("nd2", "nd1"))
    cluster = with_round(cluster, "firewall", "rules-again", later.rules)
    found = only(list(CHECK.judge(cluster)), "peer-one-way")
    assert (found.where.hosts, found.confidence) == (("nd1",), Confidence.CERTAIN)
    assert "which were good as the run began" in found.message


def test_calls_that_work_again_are_good() -> None:
    cluster = hung(World(3).cluster(), "nd0", "nd1")
    assert list(CHECK.judge(with_round(cluster, "firewall", "again", World(3).facts))) == []


def test_rank_0s_host_looks_up_who_calls_its_store() -> None:
    own = {f"nd{n}": {"source": f"192.168.77.{n}" if n != 2 else ""} for n in range(4)}
    (matrix,) = CHECK.plan(make_cluster(list(own), check="own_name", by_host=own))
    assert matrix.params["store"] == 0
    assert matrix.params["clients"] == ["192.168.77.1", "192.168.77.3"]
    many = {f"nd{n}": {"source": f"192.168.77.{n}"} for n in range(99)}
    (matrix,) = CHECK.plan(make_cluster(list(many), check="own_name", by_host=many))
    assert len(matrix.params["clients"]) == 16


def test_the_second_round_is_for_the_ends_of_failed_pairs() -> None:
    world = World(4).fail([("nd1", "nd3")], DROPPED)
    _, rules = CHECK.plan(world.cluster())
    assert (rules.name, rules.groups) == ("rules", ((2,), (6,)))
    assert rules.params["pairs"] == [
        {
            "caller": 2,
            "listener": 6,
            "source": "192.168.77.2",
            "target": "192.168.77.4",
            "port": 40006,
            "kind": "connect",
        }
    ]


def test_not_every_failed_pair_of_a_large_cluster_is_followed() -> None:
    world = World(20)
    _, rules = CHECK.plan(world.fail(pairs(world), DROPPED).cluster())
    assert len(rules.groups) == 20
    assert len(rules.params["pairs"]) <= 80


# Observing


class OtherHost:
    """A peer whose listeners are at hand: an address of loopback that no interface owns."""

    def __init__(self, posts: Mapping[str, Mapping[int, Any]]) -> None:
        self.posts = posts
        self.posted: dict[str, Any] = {}
        self.asked: dict[str, Any] = {}

    def post(self, tag: str, value: Any) -> None:
        self.posted[tag] = json.loads(json.dumps(value))

    def collect(self, tag: str, timeout_s: float, of: Any = None) -> dict[int, Any]:
        self.asked[tag] = of
        mine = {0: self.posted[tag]} if tag in self.posted else {}
        return {**self.posts.get(tag, {}), **mine}

    def store(self) -> Any:
        raise AssertionError("no process group is needed")


def context(group: tuple[int, ...], peers: OtherHost | None, **params: Any) -> Context:
    # The variable keeps the host's own name, and with it the resolver, out of it.
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_CONF_FILE": "/nonexistent"}
    return Context(
        launch=Launch(), env=env, round="matrix", group=group, seat=0, params=params, peers=peers
    )


def test_observing_calls_the_other_host() -> None:
    with Listeners(["127.0.0.2"]) as listeners:
        entry = {"address": "127.0.0.2", "interface": "eth0", "roles": ["gloo"]}
        doors = [{**entry, **door.to_json()} for door in listeners.doors]
        peers = OtherHost({"listen": {4: doors}, "done": {4: True}})
        facts = CHECK.observe(context((0, 4), peers, store=0, clients=["127.0.0.1"]))
    assert [each["query"] for each in facts["clients"]] == ["127.0.0.1"]
    (result,) = facts["peers"]["4"]
    assert [each["outcome"] for each in result["attempts"]] == ["ok"]
    assert peers.posted["done"] is True
    for door in [*doors, *peers.posted["listen"]]:
        assert door["token"] not in json.dumps(facts)
        assert door["answer"] not in json.dumps(facts)


def test_of_many_hosts_only_partners_are_called() -> None:
    group = tuple(range(0, 140, 2))
    schedule = Schedule(group, "a run", all_pairs=False)
    partners = list(schedule.partners(0))
    first, last = partners[0], partners[-1]
    with Listeners(["127.0.0.2", "127.0.0.3"]) as listeners:
        near, far = (
            [{"interface": "eth0", "roles": ["gloo"], **door.to_json()}] for door in listeners.doors
        )
        peers = OtherHost({"listen": {first: near, last: far}, "done": {}})
        facts = CHECK.observe(context(group, peers, clients=[], **schedule.to_params()))
    assert list(facts["peers"]) == [str(first), str(last)]
    assert [list(peers.asked[tag]) for tag in ("listen", "done")] == [partners, partners]


def test_observing_calls_a_closed_port_twice() -> None:
    with Listeners(["127.0.0.2"]) as listeners:
        entry = {"address": "127.0.0.2", "interface": "eth0", "roles": ["gloo"]}
        doors = [{**entry, **door.to_json()} for door in listeners.doors]
    peers = OtherHost({"listen": {4: doors}, "done": {4: True}})
    facts = CHECK.observe(context((0, 4), peers, store=4, clients=["127.0.0.1"]))
    assert facts["clients"] == []  # the other host serves the store
    (result,) = facts["peers"]["4"]
    assert [each["outcome"] for each in result["attempts"]] == ["refused", "refused"]
    assert result["source"]


def test_what_fails_at_a_host_that_listens_no_more_was_not_tried() -> None:
    """It had waited for these calls for as long as it may."""
    with Listeners(["127.0.0.2"]) as listeners:
        entry = {"address": "127.0.0.2", "interface": "eth0", "roles": ["gloo"]}
        doors = [{**entry, **door.to_json()} for door in listeners.doors]
    peers = OtherHost({"listen": {4: doors}, "done": {4: True}, "gone": {4: True}})
    facts = CHECK.observe(context((0, 4), peers, store=4, clients=[]))
    (result,) = facts["peers"]["4"]
    assert (result["attempts"], peers.posted["gone"]) == ([], True)


@contextmanager
def takes_one(door: ListeningAddress) -> Iterator[ListeningAddress]:
    """The way to a listener that takes one connection, and is closed then."""

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def run() -> None:
        caller, _ = way.accept()
        way.close()
        with caller, socket.create_connection((door.address, door.port)) as listener:
            back = threading.Thread(target=pass_on, args=(listener, caller))
            back.start()
            pass_on(caller, listener)
            back.join(10)

    with socket.create_server((door.address, 0)) as way:
        thread = threading.Thread(target=run)
        thread.start()
        yield replace(door, port=way.getsockname()[1])
        thread.join(10)


@pytest.mark.parametrize("gone", [False, True])
def test_few_connections_at_a_host_that_listens_no_more_say_nothing(gone: bool) -> None:
    with Listeners(["127.0.0.2"]) as listeners, takes_one(listeners.doors[0]) as door:
        entry = {"interface": "eth0", "roles": ["gloo"], **door.to_json()}
        given = {"listen": {4: [entry]}, "done": {4: True}, "gone": {4: True} if gone else {}}
        facts = CHECK.observe(context((0, 4), OtherHost(given), store=4, clients=[]))
    (result,) = facts["peers"]["4"]
    (call,) = result["attempts"]
    assert call["outcome"] == "ok"
    assert ("stood" in call) is not gone


def test_an_address_of_ones_own_is_not_called() -> None:
    door = {"address": "127.0.0.1", "port": 9, "token": "t", "answer": "a"}
    doors = [{**door, "interface": "docker0", "roles": ["nccl-sockets"]}]
    peers = OtherHost({"listen": {4: doors}, "done": {4: True}})
    (result,) = CHECK.observe(context((0, 4), peers))["peers"]["4"]
    assert result["attempts"] == [{"outcome": "own-address"}]


def test_nobody_else_listens() -> None:
    with pytest.raises(Untested, match="no other host was listening"):
        CHECK.observe(context((0, 4), OtherHost({})))


FEW = {**OK, "wanted": 8, "stood": 1}


def test_a_host_that_takes_few_connections_at_once_is_named() -> None:
    world = World(4).fail([("nd0", "nd2"), ("nd1", "nd2"), ("nd3", "nd2")], FEW)
    found = only(world.judge(), "peer-blocked")
    assert (found.where.hosts, found.where.links) == (("nd2",), ())
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert "1 of 8 connections in 2 s, begun at once, twice" in found.message
    assert found.kind.title.startswith("Only some of several connections")
    assert "nft list ruleset" in found.fix


LIMIT = "tcp dport 32768-60999 ct count over 4 drop"


def test_a_rule_that_may_limit_connections_names_its_host_where_comparison_cannot() -> None:
    world = World(3, "gloo").fail([("nd0", "nd1"), ("nd2", "nd1")], FEW)
    world.fail([("nd0", "nd2"), ("nd1", "nd2")], NO_ROUTE)
    found = [each for each in world.judge() if each.code == "peer-blocked"]
    assert {each.where.hosts for each in found} == {()}
    world.hit("nd1", ("nd0", "nd1"), sure=False, rule=LIMIT)
    found = only([each for each in world.judge() if each.code == "peer-blocked"], "peer-blocked")
    assert (found.where.hosts, found.where.links) == (("nd1",), ())
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)
    assert "(2 of 4 ordered pairs)" in found.message
    assert LIMIT in found.message
    assert isinstance(found.fix, Fix)
    first, *_ = found.fix.steps
    assert (first.on, first.command.split()[:3]) == (("nd1",), ["nft", "insert", "rule"])


def test_a_rule_of_the_caller_says_nothing_of_connections_to_another_host() -> None:
    world = World(2).fail([("nd0", "nd1")], FEW)
    world.hit("nd0", ("nd0", "nd1"), sure=False, rule=LIMIT, packet="reply")
    assert only(world.judge(), "peer-blocked").where.links == (("nd0", "nd1"),)


def test_rules_are_read_at_both_ends_of_a_road_with_too_few_connections() -> None:
    world = World(3).fail([("nd0", "nd1")], FEW)
    assert [(each.name, each.groups) for each in CHECK.plan(world.cluster())][1:] == [
        ("rules", ((0,), (2,)))
    ]


def test_where_answers_get_lost_few_connections_at_once_say_nothing_of_their_number() -> None:
    world = World(3).fail([("nd1", "nd0")], FEW)
    only(world.judge(), "peer-blocked")
    world.fail([("nd0", "nd1")], {**OK, "segments": 300, "lost": 60})
    assert world.judge() == []


def test_of_two_hosts_the_link_is_named_that_takes_few_connections_at_once() -> None:
    found = only(World(2).fail([("nd0", "nd1")], FEW).judge(), "peer-blocked")
    assert (found.where.hosts, found.where.links) == ((), (("nd0", "nd1"),))


def test_a_road_that_the_job_does_not_take_may_be_limited() -> None:
    world = World(2).extra("nd0", "nd1", "docker0", FEW, "nccl-bootstrap")
    world.backend = "gloo"
    assert world.judge() == []


def test_connections_for_each_pair_of_ranks() -> None:
    assert [_burst(ranks) for ranks in (1, 2, 4, 8, 16)] == [8, 8, 16, 64, 64]


def test_one_host_has_no_peers() -> None:
    with pytest.raises(Skip, match="one host"):
        CHECK.plan(make_cluster(["nd0"]))


def test_one_host_of_several_has_not_been_tested() -> None:
    with pytest.raises(Untested, match="signed in"):
        CHECK.observe(context((0,), None))


def test_reading_rules_leaves_a_reason_or_rules() -> None:
    ctx = replace(context((0,), None, pairs=[]), round="rules")
    facts = CHECK.observe(ctx)
    assert facts["readable"] or facts["reason"]
    assert facts["hits"] == []


def test_a_host_for_which_nobody_answers_is_no_firewall() -> None:
    nobody = {"outcome": "no-neighbour", "detail": "no answer", "duration_s": 1.3}
    world = World(3).fail([("nd0", "nd1"), ("nd2", "nd1")], nobody)
    found = only(world.judge(), "peer-one-way")
    assert found.where.hosts == ("nd1",)
    assert "no host answers for the address on the local network" in found.message
    assert found.kind.title.startswith("No host on the local network answers")
    assert found.fix.startswith("on nd0: ip neigh show 192.168.77.2 (compare VLAN, cable and")


def test_the_rules_come_with_the_way_of_each_packet() -> None:
    call = {"source": "127.0.0.1", "target": "127.0.0.2", "port": 9, "kind": "connect"}
    pair = {**call, "caller": 0, "listener": 2}
    facts = CHECK.observe(replace(context((0,), None, pairs=[pair]), round="rules"))
    (way,) = json.loads(json.dumps(facts["ways"])) or pytest.skip("netlink is forbidden here")
    ends = {"caller": 0, "listener": 2, "own": "127.0.0.1", "peer": "127.0.0.2", "interface": "lo"}
    assert {key: way[key] for key in ends} == ends
    assert (set(way) - set(ends), way["leaves"]) == ({"taken", "filter", "leaves"}, "lo")


@pytest.mark.parametrize(("seat", "known"), [(0, True), (2, False)])
def test_a_packet_that_is_followed_knows_its_way_back(seat: int, known: bool) -> None:
    """The listener (seat 2) would answer elsewhere; the caller would not."""
    text = "table inet f {\nchain c {\ntype filter hook prerouting priority 0; policy accept;\n"
    chains = parse_nft(f"{text}fib saddr . iif oif missing drop\n}}\n}}\n")
    call = {"source": "fd00::1", "target": "fd01::2", "port": 9, "kind": "connect"}
    nics = [Interface(f"eth{i}", (f"fd0{i}::{i + 1}",), True, True, False, 1500) for i in (0, 1)]
    asked = []

    def leads_back(own: str, peer: str, nic: str) -> bool:
        asked.append((own, peer, nic))
        return known

    pair = {**call, "caller": 0, "listener": 2}
    rules = Rules(True, chains=chains)
    hits = follow_pairs(rules, [pair], seat, nics, (1, 2), leads_back=leads_back)
    ends = {0: ("fd00::1", "fd01::2", "eth0"), 2: ("fd01::2", "fd00::1", "eth1")}
    assert asked == [ends[seat]]
    assert [(hit["packet"], hit["sure"]) for hit in hits] == [("first", True)] * (not known)


def test_an_address_that_alone_gives_no_answer_is_asked_about() -> None:
    world = World(2).extra("nd0", "nd1", "eth1", DROPPED, "nccl-sockets")
    world.facts["nd0"]["peers"][str(world.seat("nd1"))][-1]["source"] = "10.0.9.1"
    _, rules = CHECK.plan(world.cluster())
    assert [(each["source"], each["target"]) for each in rules.params["pairs"]] == [
        ("10.0.9.1", "10.0.0.2")
    ]
