"""The firewall check on three hosts and more: which host, which direction, which link."""

from __future__ import annotations

from nccl_doctor.api import Confidence
from nccl_doctor.judge.causes import fold
from tests.support.peers import DROPPED, NO_ROUTE, REFUSED, SILENT_PROXY, World, only, pairs, stuck


def test_a_host_that_nobody_reaches_and_that_reaches_nobody() -> None:
    world = World(4)
    links = [pair for pair in pairs(world) if "nd2" in pair]
    found = only(world.fail(links, DROPPED).judge(), "peer-blocked")
    assert found.where.hosts == ("nd2",)
    assert found.where.links == tuple(sorted(links))


def test_a_host_that_lets_nobody_in() -> None:
    links = [("nd0", "nd2"), ("nd1", "nd2")]
    found = only(World(3).fail(links, DROPPED).judge(), "peer-one-way")
    assert (found.where.hosts, found.where.links) == (("nd2",), tuple(links))
    assert found.message.startswith("nothing gets into the host: no answer")
    assert found.message.endswith("(2 of 2 tried)")
    assert found.confidence is Confidence.CERTAIN


def test_a_host_that_gets_out_to_nobody() -> None:
    links = [("nd2", "nd0"), ("nd2", "nd1")]
    found = only(World(3).fail(links, REFUSED).judge(), "peer-one-way")
    assert (found.where.hosts, found.where.links) == (("nd2",), tuple(links))
    assert found.message.startswith("nothing gets out of the host: connection refused")


def test_a_router_that_cannot_deliver_is_a_missing_route_of_the_link() -> None:
    links = [("nd0", "nd1"), ("nd1", "nd0")]
    turned_back = {**NO_ROUTE, "outcome": "turned-back"}
    found = only(World(3).fail(links, turned_back).judge(), "peer-no-route")
    assert (found.where.hosts, found.where.links) == ((), tuple(links))
    assert "a router on the way answers that it cannot deliver" in found.message


def test_one_broken_pair_among_three_blames_no_host() -> None:
    links = [("nd0", "nd1"), ("nd1", "nd0")]
    found = only(World(3).fail(links, DROPPED).judge(), "peer-blocked")
    assert (found.where.hosts, found.where.links) == ((), tuple(links))
    assert found.confidence is Confidence.CERTAIN


def test_a_proxy_in_front_of_one_host_of_three() -> None:
    links = [("nd0", "nd1"), ("nd2", "nd1")]
    found = only(World(3).fail(links, SILENT_PROXY).judge(), "peer-intercepted")
    assert (found.where.hosts, found.where.links) == (("nd1",), tuple(links))


def test_a_bad_host_with_several_symptoms_is_one_host() -> None:
    world = World(4).fail([("nd0", "nd3"), ("nd1", "nd3"), ("nd2", "nd3")], DROPPED)
    world.fail([("nd3", "nd0"), ("nd3", "nd1"), ("nd3", "nd2")], REFUSED)
    found = only(world.judge(), "peer-blocked")
    assert found.where.hosts == ("nd3",)
    assert found.message.startswith("nothing gets into the host or out of it: ")


def test_a_bad_link_beside_a_deaf_host_is_not_taken_for_the_host() -> None:
    deaf = [("nd0", "nd3"), ("nd1", "nd3"), ("nd2", "nd3")]
    found = World(4).fail(deaf, DROPPED).fail([("nd3", "nd0")], REFUSED).judge()
    assert {each.code: (each.where.hosts, each.where.links) for each in found} == {
        "peer-one-way": (("nd3",), tuple(deaf)),
        "peer-blocked": ((), (("nd3", "nd0"),)),
    }


def test_two_faults_of_different_directions_are_two_findings() -> None:
    world = World(5)
    deaf = [(name, "nd1") for name in world.names if name != "nd1"]
    mute = [("nd3", name) for name in world.names if name != "nd3"]
    found = world.fail([*deaf, *mute], DROPPED).judge()
    assert [(each.code, each.where.hosts) for each in found] == [
        ("peer-one-way", ("nd1",)),
        ("peer-one-way", ("nd3",)),
    ]
    assert [set(each.where.links) for each in found] == [set(deaf), set(mute)]
    assert [each.message.partition(":")[0] for each in found] == [
        "nothing gets into the host",
        "nothing gets out of the host",
    ]


def test_two_deaf_hosts_are_one_finding_of_both() -> None:
    world = World(5)
    links = [pair for pair in pairs(world) if pair[1] in ("nd1", "nd3")]
    (found,) = fold(world.fail(links, DROPPED).judge())
    assert (found.code, found.where.hosts) == ("peer-one-way", ("nd1", "nd3"))
    assert set(found.where.links) == set(links)
    assert "(4 of 4 tried)" in found.message


def test_links_that_fail_in_different_ways_are_findings_of_their_own() -> None:
    world = World(5)
    world.fail([("nd0", "nd1"), ("nd1", "nd0")], DROPPED)
    world.fail([("nd2", "nd3"), ("nd3", "nd2")], REFUSED)
    found = world.judge()
    assert [(each.code, each.where.hosts) for each in found] == [("peer-blocked", ())] * 2
    assert [each.where.links[0] for each in found] == [("nd0", "nd1"), ("nd2", "nd3")]
    assert ["refused" in each.message for each in found] == [False, True]


def test_a_deaf_host_is_not_blamed_for_the_routes_that_another_one_lacks() -> None:
    world = World(5)
    deaf = [(name, "nd1") for name in world.names if name != "nd1"]
    astray = [("nd3", name) for name in world.names if name != "nd3"]
    unanswered = [(b, a) for a, b in astray]
    world.fail([*deaf, *unanswered], DROPPED).fail(astray, NO_ROUTE)
    found = {each.code: each.where for each in world.judge()}
    assert {code: where.hosts for code, where in found.items()} == {
        "peer-no-route": ("nd3",),
        "peer-one-way": ("nd1",),
    }
    assert set(found["peer-no-route"].links) == {*astray, *unanswered}


def test_a_pair_of_two_bad_hosts_that_fails_in_its_own_way_is_a_link() -> None:
    world = World(5)
    deaf = [(name, "nd1") for name in world.names if name != "nd1"]
    mute = [("nd3", name) for name in world.names if name != "nd3"]
    world.fail([*deaf, *mute], DROPPED).fail([("nd3", "nd1")], SILENT_PROXY)
    found = next(each for each in world.judge() if each.code == "peer-intercepted")
    assert (found.where.hosts, found.where.links) == ((), (("nd3", "nd1"),))
    assert found.confidence is Confidence.POSSIBLE


def test_a_call_that_a_rule_of_its_listener_stops_says_nothing_of_the_caller() -> None:
    world = World(3).fail([("nd0", "nd1"), ("nd0", "nd2")], DROPPED).hit("nd1", ("nd0", "nd1"))
    found = sorted(world.judge(), key=lambda each: each.where.hosts)
    assert [(each.where.hosts, each.where.links) for each in found] == [
        ((), (("nd0", "nd2"),)),
        (("nd1",), (("nd0", "nd1"),)),
    ]
    assert found[0].confidence is Confidence.LIKELY  # nd0 is not seen to get out to anybody


def test_two_hosts_with_rules_of_their_own_are_two_findings() -> None:
    world = World(2).fail([("nd0", "nd1"), ("nd1", "nd0")], DROPPED)
    world.hit("nd0", ("nd1", "nd0")).hit("nd1", ("nd0", "nd1"), rule="iifname eth0 drop")
    found = sorted(world.judge(), key=lambda each: each.where.hosts)
    assert {each.code for each in found} == {"peer-blocked"}
    assert [each.where.hosts for each in found] == [("nd0",), ("nd1",)]
    assert [each.where.links for each in found] == [(("nd1", "nd0"),), (("nd0", "nd1"),)]
    assert [each.fix.partition(":")[0] for each in found] == ["on nd0", "on nd1"]


def test_the_same_rule_on_two_hosts_is_one_finding_of_both() -> None:
    world = World(2).fail([("nd0", "nd1"), ("nd1", "nd0")], DROPPED)
    found = only(
        world.hit("nd0", ("nd1", "nd0")).hit("nd1", ("nd0", "nd1")).judge(), "peer-blocked"
    )
    assert (found.where.hosts, len(found.where.links)) == (("nd0", "nd1"), 2)
    assert found.fix.count("nft insert rule") == 2


def test_one_rule_that_stops_calls_both_ways_is_one_finding() -> None:
    world = World(3).fail([("nd0", "nd1"), ("nd1", "nd0"), ("nd2", "nd1"), ("nd1", "nd2")], DROPPED)
    for peer in ("nd0", "nd2"):
        world.hit("nd1", (peer, "nd1"), rule="tcp flags syn drop")
        world.hit("nd1", ("nd1", peer), rule="tcp flags syn drop", packet="reply")
    found = only(world.judge(), "peer-blocked")
    assert (found.where.hosts, len(found.where.links)) == (("nd1",), 4)
    assert [step.command for step in found.fix.steps] == [
        f"nft insert rule inet fw input ip saddr 192.168.77.{i} accept" for i in (1, 3)
    ]


def test_rules_of_both_ends_that_stop_the_same_calls_are_one_finding() -> None:
    world = World(2).fail([("nd0", "nd1")], DROPPED)
    world.hit("nd0", ("nd0", "nd1")).hit("nd1", ("nd0", "nd1"))
    assert only(world.judge(), "peer-one-way").where.hosts == ("nd0", "nd1")


def test_a_host_whose_large_packets_are_lost_on_the_way_out() -> None:
    world = World(4)
    links = [("nd2", name) for name in ("nd0", "nd1", "nd3")]
    world.fail(links, stuck("upload")).fail([(b, a) for a, b in links], stuck("download"))
    found = only(world.judge(), "mtu-blackhole")
    assert (found.where.hosts, found.where.links) == (("nd2",), tuple(links))
    assert found.message.startswith("no large packet gets out of the host: ")


def test_rules_on_the_pairs_that_were_followed_explain_the_others() -> None:
    world = World(5)
    links = [(name, "nd4") for name in world.names[:4]]
    world.fail(links, DROPPED)
    for caller, _ in links[:2]:
        world.hit("nd4", (caller, "nd4"))
    found = only(world.judge(), "peer-one-way")
    assert (found.where.hosts, found.confidence) == (("nd4",), Confidence.CERTAIN)


def test_everybody_drops_everything_and_nobody_is_singled_out() -> None:
    world = World(3)
    found = only(world.fail(pairs(world), DROPPED).judge(), "peer-blocked")
    assert found.where.hosts == ()
    assert len(found.where.links) == 6
