"""The loss check on made-up clusters: the lossy host or link, and what it explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import (
    AFTER_LOSS,
    Cluster,
    Confidence,
    Finding,
    Outcome,
    OutcomeStatus,
    Severity,
    Skip,
    Where,
)
from nccl_doctor.checks.advertised_addresses import AdvertisedAddresses
from nccl_doctor.checks.collectives import Collectives
from nccl_doctor.checks.firewall import Firewall
from nccl_doctor.checks.group_speed import GroupSpeed
from nccl_doctor.checks.links import Links
from nccl_doctor.judge.causes import explain, root_causes
from nccl_doctor.model.kinds import RANK_SILENT
from nccl_doctor.toolkit.groups.attempts import attempt_deadline, attempts_of
from nccl_doctor.toolkit.peers.loss import hosts_to_try_again, read_losses
from tests.support.clusters import make_cluster, outcome
from tests.support.findings import calls, judge
from tests.support.losses import BOTH, CHECK, ONE, TWO, LossyWorld, both
from tests.support.peers import DROPPED, OK, stuck


def only(found: Sequence[Finding]) -> Finding:
    (each,) = found
    assert each.code == "link-lossy"
    return each


# What is tried


@pytest.mark.parametrize("count", [2, 3, 8])
def test_where_nothing_is_lost_no_time_is_spent(count: int) -> None:
    world = LossyWorld(count)
    assert world.judge() == []
    with pytest.raises(Skip, match="the calls of check firewall lost nothing"):
        CHECK.plan(world.cluster())


def test_without_the_calls_of_the_firewall_check_it_calls_itself() -> None:
    names = ["nd0", "nd1"]
    (first,) = CHECK.plan(make_cluster(names))
    assert (first.name, first.groups) == ("calls", ((0, 2),))
    world = LossyWorld(3, alone=True).lose(both("nd0", "nd1"))
    assert world.rounds() == ["calls", "again"]
    assert only(world.judge()).where.links == tuple(both("nd0", "nd1"))
    assert LossyWorld(3, alone=True).judge() == []


def test_where_the_calls_of_the_firewall_check_failed_none_are_made_again() -> None:
    world = LossyWorld(2)
    for name in world.names:
        world.tries[ONE].outcomes[name] = Outcome(OutcomeStatus.UNTESTED, reason="nobody listens")
    with pytest.raises(Skip, match="the calls of check firewall were not made"):
        CHECK.plan(world.tries[ONE].cluster())


def test_a_host_that_did_not_get_to_the_end_of_the_second_try_is_named() -> None:
    world = LossyWorld(3).lose(LossyWorld(3).of("nd1", "in"))
    hung = Outcome(OutcomeStatus.HUNG, reason="the run had 3 s left for it, and not 20 s")
    world.tries[TWO].outcomes["nd1"] = hung
    assert only(world.judge()).where.hosts == ("nd1",)


def test_one_host_has_no_roads() -> None:
    with pytest.raises(Skip, match="one host"):
        CHECK.plan(make_cluster(["nd0"]))


def test_of_many_hosts_the_most_doubtful_and_some_others_are_tried_again() -> None:
    world = LossyWorld(40)
    world.lose(world.of("nd7", "in"))
    *_, again = CHECK.plan(world.cluster())
    (seats,) = again.groups
    assert len(seats) == 16
    assert 14 in seats
    assert only(world.judge()).where.hosts == ("nd7",)


def test_a_pair_of_many_hosts_is_tried_again_with_fourteen_others() -> None:
    world = LossyWorld(40).lose(both("nd30", "nd39"))
    *_, again = CHECK.plan(world.cluster())
    assert {60, 78} < set(again.groups[0])
    assert only(world.judge()).where.links == tuple(both("nd30", "nd39"))


def test_of_many_roads_only_the_lossy_ones_are_read_in_full() -> None:
    """A thousand hosts have a million roads, and several checks ask about their losses."""
    world = LossyWorld(64)
    clean = world.tries[ONE].cluster()
    assert calls(lambda: read_losses(clean)) < 10 * len(world.pairs)
    assert calls(lambda: hosts_to_try_again(clean, range(0, 128, 2))) < 10 * len(world.pairs)
    world.lose(both("nd3", "nd9"))
    lossy = world.tries[ONE].cluster()
    assert calls(lambda: hosts_to_try_again(lossy, range(0, 128, 2))) < 10 * len(world.pairs)
    after = world.cluster()
    assert calls(lambda: read_losses(after)) < 10 * len(world.pairs)


# Who is named


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("one_way", [True, False])
def test_a_lossy_link_is_named_and_neither_of_its_ends(count: int, one_way: bool) -> None:
    links = both("nd0", "nd1")[: 1 if one_way else 2]
    found = only(LossyWorld(count).lose(links).judge())
    assert (found.where.hosts, found.where.links) == ((), tuple(links))
    assert found.level is Severity.WARN
    assert found.confidence is (Confidence.POSSIBLE if count == 2 else Confidence.LIKELY)
    assert "segments lost (5.0 %) with almost no traffic, in two tries" in found.message
    assert "ethtool -S eth0" in found.fix


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("in", "on all roads into the host"),
        ("out", "on all roads out of the host"),
        ("both", "on all roads into the host and out of it"),
    ],
)
@pytest.mark.parametrize("count", [3, 4, 9])
def test_a_lossy_host_is_named_with_its_direction(count: int, way: str, words: str) -> None:
    world = LossyWorld(count)
    found = only(world.lose(world.of("nd2", way)).judge())
    assert (found.where.hosts, found.where.links) == (("nd2",), ())
    assert found.where.interfaces == ("eth0",)
    assert words in found.message
    assert found.kind.title == "TCP segments are lost on all roads of a host"


HANGS = Outcome(OutcomeStatus.HUNG, duration_s=60.0)


@pytest.mark.parametrize(
    ("lost", "group", "severity"),
    [
        (39, HANGS, Severity.WARN),
        (40, HANGS, Severity.FAIL),
        (200, Outcome(OutcomeStatus.SILENT), Severity.FAIL),
        (200, None, Severity.WARN),
        (200, Outcome(OutcomeStatus.OK, {}), Severity.WARN),
        (200, replace(HANGS, duration_s=16.0), Severity.WARN),
        (200, Outcome(OutcomeStatus.DIED, signal="SIGSEGV"), Severity.WARN),
    ],
)
def test_a_tenth_is_a_failure_where_the_groups_of_the_ranks_do_not_get_through(
    lost: int, group: Outcome | None, severity: Severity
) -> None:
    world = LossyWorld(3).lose(both("nd0", "nd1"), lost)
    found = only(judge(CHECK, with_groups(world.cluster(), group)))
    assert found.level is severity


@pytest.mark.parametrize(
    ("attempt", "more_s"),
    [
        ({**OK, "segments": 400, "lost": 20}, 15.0),
        ({**OK, "segments": 400, "lost": 100}, 40.0),
        ({**OK, "wanted": 8, "stood": 2}, 15.0),
        ({**OK, "wanted": 8, "stood": 8}, 0.0),
    ],
)
def test_groups_get_more_time_on_slow_roads(attempt: dict[str, Any], more_s: float) -> None:
    world = LossyWorld(3)
    cluster = world.answer(both("nd0", "nd1"), attempt).cluster()
    assert attempt_deadline(cluster) == cluster.collective_timeout_s + more_s
    hung = with_groups(cluster, replace(HANGS, duration_s=5.0))
    (group,) = attempts_of(hung, "collectives")["world"]
    assert group.is_cut_short is bool(more_s)


def with_groups(cluster: Cluster, group: Outcome | None) -> Cluster:
    """The same cluster, whose ranks formed a group of all; None: none was tried."""
    facts = {} if group is None else {"collectives": {"world": outcome(group)}}
    ranks = [replace(rank, facts={**rank.facts, **facts}) for rank in cluster.ranks]
    return replace(cluster, ranks=tuple(ranks))


@pytest.mark.parametrize(("lost", "segments"), [(1, 100), (2, 100), (4, 2000)])
def test_a_few_lost_segments_are_no_fault(lost: int, segments: int) -> None:
    assert LossyWorld(3).lose(both("nd0", "nd1"), lost, segments).judge() == []


@pytest.mark.parametrize("tries", [(ONE,), (TWO,)])
def test_what_is_lost_once_is_no_fault(tries: Sequence[str]) -> None:
    assert LossyWorld(3).lose(both("nd0", "nd1"), tries=tries).judge() == []


PROVEN = {**OK, "segments": 40, "lost": 10}


def test_a_try_that_loses_very_much_needs_no_second_one() -> None:
    world = LossyWorld(3)
    world.answer(world.of("nd0", "in"), PROVEN)
    assert world.rounds() == []
    found = only(world.judge())
    assert (found.where.hosts, found.level) == (("nd0",), Severity.WARN)
    assert "20 of 80 segments lost (25.0 %)" in found.message
    assert found.message.endswith("in one try")
    (link, _) = CHECK.sections(world.cluster())
    assert (link.segments, link.lost) == (40, 10)


def test_roads_that_are_doubtful_beside_a_proven_one_are_all_tried_again() -> None:
    world = LossyWorld(4).answer([("nd1", "nd0")], PROVEN)
    world.lose([("nd2", "nd0"), ("nd3", "nd0")], lost=4, segments=40)
    assert world.rounds() == ["again"]
    assert only(world.judge()).where.hosts == ("nd0",)


def test_a_second_try_that_nobody_ended_leaves_what_the_first_has_proven() -> None:
    world = LossyWorld(3).answer([("nd1", "nd0")], PROVEN)
    world.lose([("nd2", "nd0")], lost=4, segments=40)
    hung = Outcome(OutcomeStatus.HUNG, reason="no time")
    world.tries[TWO].outcomes.update(dict.fromkeys(world.names, hung))
    assert only(world.judge()).where.links == (("nd1", "nd0"),)


def test_what_was_proven_and_is_gone_in_the_second_try_is_no_fault() -> None:
    world = LossyWorld(3).answer([("nd1", "nd0")], PROVEN, tries=[ONE])
    world.lose([("nd2", "nd0")], lost=4, segments=40, tries=[ONE])
    assert world.rounds() == ["again"]
    assert world.judge() == []


def test_a_road_that_was_clean_one_way_at_first_can_be_lossy_both_ways() -> None:
    there, back = both("nd0", "nd1")
    world = LossyWorld(3).lose([there]).lose([back], tries=[TWO])
    assert only(world.judge()).where.links == (there, back)


def test_lost_answers_make_no_road_lossy() -> None:
    """Of 25 % lost on the way back, up to 6 % look as if they were lost on the way there."""
    there, back = both("nd0", "nd1")
    world = LossyWorld(3).lose([back], lost=100).lose([there], lost=24)
    assert only(world.judge()).where.links == (back,)


def test_a_doubtful_road_that_was_not_tried_again_clears_and_blames_nobody() -> None:
    world = LossyWorld(4).lose(both("nd0", "nd1")).lose(both("nd0", "nd2"))
    world.answer(both("nd0", "nd2"), dict(DROPPED), tries=[TWO])
    assert only(world.judge()).where.links == tuple(both("nd0", "nd1"))


def test_a_road_that_the_job_does_not_take_is_not_judged() -> None:
    world = LossyWorld(3)
    for number in BOTH:
        each = world.tries[number]
        lossy = {"outcome": "ok", "duration_s": 1.0, "segments": 100, "lost": 30}
        each.extra("nd0", "nd1", "docker0", lossy, "nccl-sockets")
    assert world.judge() == []


@given(st.data())
def test_one_random_fault_is_found_exactly(data: st.DataObject) -> None:
    world = LossyWorld(data.draw(st.integers(4, 8)))
    guilty = data.draw(st.sampled_from([*world.names, *combinations(world.names, 2)]))
    way = data.draw(st.sampled_from(["in", "out", "both"]))
    links = world.of(guilty, way) if isinstance(guilty, str) else both(*guilty)
    found = only(world.lose(links, lost=data.draw(st.integers(4, 399))).judge())
    if isinstance(guilty, str):
        assert found.where.hosts == (guilty,)
    else:
        assert found.where.links == tuple(both(*guilty))


# What else is said


def test_heavy_loss_that_stops_a_large_echo_is_no_matter_of_packet_size() -> None:
    slow = {**stuck("upload"), "outcome": "ok", "segments": 40, "lost": 10}
    cluster = LossyWorld(3).answer(both("nd0", "nd1"), slow).cluster()
    assert judge(Firewall(), cluster) == []
    assert only(judge(CHECK, cluster)).where.links == tuple(both("nd0", "nd1"))


CRC = {"eth0": {"rx_crc_errors": 40, "rx_packets": 9000}}


@pytest.mark.parametrize(("lost", "severity"), [(20, Severity.WARN), (80, Severity.FAIL)])
@pytest.mark.parametrize("way", ["in", "both"])
def test_an_interface_that_counts_damaged_packets_is_the_cause(
    way: str, lost: int, severity: Severity
) -> None:
    world = LossyWorld(3)
    world.lose([("nd0", "nd1")] if way == "in" else both("nd0", "nd1"), lost)
    world.drops = {"nd1": CRC, "nd0": CRC}
    damaged, *others = judge(CHECK, with_groups(world.cluster(), HANGS))
    assert (damaged.code, damaged.level) == ("nic-errors-rising", severity)
    assert damaged.where.interfaces == ("eth0",)
    assert others[-1].explained_by == "nic-errors-rising"
    cluster = world.cluster()
    roots = {each.code for each in root_causes(explain(judge(CHECK, cluster), cluster))}
    assert roots == {"nic-errors-rising"}


def test_damaged_packets_at_the_other_end_explain_nothing() -> None:
    world = LossyWorld(3).lose([("nd0", "nd1")])
    world.drops = {"nd0": CRC}
    assert only(world.judge()).explained_by is None


STEPS = ({"step": "init_process_group", "at_s": 0.0}, {"step": "all_reduce", "at_s": 1.0})
HUNG = Outcome(OutcomeStatus.HUNG, breadcrumbs=STEPS, state="S", duration_s=20.0)
GOOD = Outcome(OutcomeStatus.OK, breadcrumbs=STEPS, facts={"steps": [], "wrong": []})


def raised(words: str, steps: int = 2) -> Outcome:
    return Outcome(OutcomeStatus.RAISED, breadcrumbs=STEPS[:steps], reason=f"RuntimeError: {words}")


def broken(cluster: Cluster, *rounds: tuple[str, Outcome]) -> Cluster:
    """The same cluster, with collectives that ended so on every rank."""
    facts = {"collectives": dict(rounds)}
    return replace(cluster, ranks=tuple(replace(rank, facts=facts) for rank in cluster.ranks))


def roots(cluster: Cluster) -> list[str]:
    found = explain([*judge(CHECK, cluster), *judge(Collectives(), cluster)], cluster)
    return [each.code for each in root_causes(found)]


@pytest.mark.parametrize(
    ("rounds", "codes"),
    [
        ([("world", HUNG)], ["link-lossy"]),
        ([("world", HUNG), ("world-again", HUNG)], ["link-lossy"]),
        ([("world", raised("Timed out waiting 3000ms for recv operation"))], ["link-lossy"]),
        ([("world", raised("Connection closed by peer"))], ["link-lossy"]),
        ([("world", raised("Socket Timeout", steps=1))], ["link-lossy"]),
        ([("world", raised("CUDA out of memory"))], ["collective-failed"]),
        ([("world", raised("no device for the interface", steps=1))], ["group-init-failed"]),
        ([("world", GOOD)], ["link-lossy"]),
        ([], ["link-lossy"]),
    ],
)
def test_it_explains_what_hangs_and_what_ran_out_of_time(
    rounds: list[tuple[str, Outcome]], codes: list[str]
) -> None:
    cluster = LossyWorld(3).lose(both("nd0", "nd1")).cluster()
    assert roots(broken(cluster, *rounds)) == codes


def test_a_collective_of_other_hosts_does_not_hang_on_the_link() -> None:
    cluster = broken(LossyWorld(3).lose(both("nd0", "nd1")).cluster())
    hung = {"collectives": {"each-host": HUNG}}
    ranks = tuple(
        replace(rank, facts=hung) if rank.host.name == "nd2" else rank for rank in cluster.ranks
    )
    assert roots(replace(cluster, ranks=ranks)) == ["collective-hang"]


# What the connections of the store have lost


Roads = dict[str, dict[str, list[int]]]
"""Name of the sender → name of the receiver → segments, and lost ones."""


Roads = dict[str, dict[str, list[int]]]
"""Name of the sender → name of the receiver → segments, and lost ones."""


def told(cluster: Cluster, roads: Roads, where: str = "firewall") -> Cluster:
    """The same cluster, whose hosts tell what they lost on roads of the store."""
    round_ = {"clock": "all", "firewall": "matrix", "uplink": AFTER_LOSS}[where]
    address = {host.name: host.addresses[0] for host in cluster.hosts}
    hosts = []
    for host in cluster.hosts:
        rounds = dict(host.facts.get(where, {}))
        seen = {address[name]: counts for name, counts in roads.get(host.name or "", {}).items()}
        known = rounds.get(round_, outcome({}))
        if seen:
            rounds[round_] = replace(known, facts={**(known.facts or {}), "roads": seen})
        hosts.append(replace(host, facts={**host.facts, where: rounds}))
    ranks = [replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks]
    return replace(cluster, hosts=tuple(hosts), ranks=tuple(ranks))


def without_calls(count: int = 3, hung: Sequence[str] = ()) -> Cluster:
    """Hosts of which some came to no end of their calls."""
    world = LossyWorld(count)
    for name in hung:
        world.tries[ONE].outcomes[name] = HUNG
    return world.cluster()


@pytest.mark.parametrize("where", ["clock", "firewall", "uplink"])
def test_connections_of_the_store_prove_a_link_lossy_without_calls(where: str) -> None:
    hung = ["nd1"] if where == "firewall" else ["nd0", "nd1", "nd2"]
    cluster = told(without_calls(hung=hung), {"nd0": {"nd1": [65, 19], "nd2": [500, 0]}}, where)
    found = only(judge(CHECK, cluster))
    assert found.where.links == (("nd0", "nd1"),)
    assert not found.where.hosts
    assert found.level is Severity.WARN
    assert "19 of 65 segments" in found.message or where == "firewall"


def test_connections_of_the_store_prove_the_host_of_the_store_lossy() -> None:
    world = LossyWorld(3)
    world.tries[ONE].outcomes["nd0"] = HUNG
    roads = {"nd0": {"nd1": [56, 14], "nd2": [68, 18]}}
    found = only(judge(CHECK, told(world.cluster(), roads, "uplink")))
    assert found.where.hosts == ("nd0",)
    assert "out of the host" in found.message


@pytest.mark.parametrize(
    "counts",
    [
        [20, 5],  # too few to be sure
        [60, 8],
        [4000, 300],  # less than a tenth: the calls of the check itself decide
    ],
)
def test_connections_of_the_store_alone_prove_heavy_loss_only(counts: list[int]) -> None:
    cluster = told(without_calls(), {"nd0": {"nd1": counts, "nd2": [500, 0]}})
    assert judge(CHECK, cluster) == []


def test_calls_and_connections_of_the_store_that_agree_need_no_second_try() -> None:
    """Together they are less than a tenth, beside a road that needs no second try either."""
    world = LossyWorld(3).lose([("nd1", "nd2")], 23, 223).lose([("nd1", "nd0")], 9, 140)
    cluster = told(world.tries[ONE].cluster(), {"nd1": {"nd0": [40, 6]}})
    with pytest.raises(Skip):
        CHECK.plan(cluster)
    assert only(judge(CHECK, cluster)).where.hosts == ("nd1",)


def test_calls_that_lost_nothing_outweigh_connections_that_lost_something_before() -> None:
    world = LossyWorld(3).lose([("nd0", "nd1")], lost=0, segments=400, tries=[ONE])
    assert judge(CHECK, told(world.cluster(), {"nd0": {"nd1": [60, 12]}})) == []


def test_an_address_that_two_hosts_have_or_nobody_says_nothing() -> None:
    cluster = without_calls(hung=["nd0", "nd1", "nd2"])
    hosts = [replace(host, addresses=(*host.addresses, "172.17.0.1")) for host in cluster.hosts]
    ranks = [replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks]
    cluster = replace(cluster, hosts=tuple(hosts), ranks=tuple(ranks))
    seen = {"172.17.0.1": [90, 50], "10.1.1.1": [90, 50]}
    facts = {**hosts[0].facts, "uplink": {AFTER_LOSS: outcome({"roads": seen})}}
    changed = (replace(hosts[0], facts=facts), *hosts[1:])
    ranks = [replace(rank, host=changed[rank.host.id]) for rank in cluster.ranks]
    assert judge(CHECK, replace(cluster, hosts=changed, ranks=tuple(ranks))) == []


def test_a_rank_behind_a_road_that_loses_what_it_says_to_the_store_is_no_cause() -> None:
    cluster = told(without_calls(hung=["nd1"]), {"nd0": {"nd1": [65, 19], "nd2": [500, 0]}})
    cluster = with_groups(cluster, Outcome(OutcomeStatus.SILENT))
    silent = [
        Finding(RANK_SILENT, "no answer", Where(hosts=("nd1",), ranks=(2,))),
        Finding(RANK_SILENT, "no answer", Where(hosts=("nd2",), ranks=(4,))),
    ]
    found = explain([*judge(CHECK, cluster), *silent], cluster)
    causes = {each.where.hosts: each.explained_by for each in found}
    assert causes == {(): None, ("nd1",): "link-lossy", ("nd2",): None}


# What is not measured on a lossy road


def test_the_speed_of_a_lossy_road_is_not_measured() -> None:
    cluster = LossyWorld(4).lose([("nd1", "nd2")]).cluster()
    (first,) = Links().plan(cluster)
    met = {frozenset(meeting) for slot in first.params["slots"] for meeting in slot}
    every = set(map(frozenset, combinations((0, 2, 4, 6), 2)))
    assert met == every - {frozenset((2, 4))}
    assert first.groups == ((0, 2, 4, 6),)


def test_addresses_are_called_on_roads_that_lose_a_little_and_not_a_tenth() -> None:
    check = AdvertisedAddresses()
    assert check.plan(LossyWorld(3).lose(both("nd0", "nd1"), lost=20).cluster())
    with pytest.raises(Skip, match="loses too many packets"):
        check.plan(LossyWorld(3).lose(both("nd0", "nd1"), lost=60).cluster())


def test_where_every_road_is_lossy_no_speed_is_measured() -> None:
    with pytest.raises(Skip, match="every link loses packets"):
        Links().plan(LossyWorld(2).lose(both("nd0", "nd1")).cluster())


def groups_of(cluster: Cluster) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {each.name: each.groups for each in GroupSpeed().plan(cluster)}


def test_groups_across_a_lossy_road_are_not_timed_and_their_ranks_still_compute() -> None:
    planned = groups_of(LossyWorld(3).lose(both("nd0", "nd1")).cluster())
    assert planned["world"] == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert planned["each-host"] == ((0, 1), (2, 3), (4, 5))
    pairs = {frozenset(g) for name, groups in planned.items() if "pairs" in name for g in groups}
    assert pairs == {frozenset((2, 4)), frozenset((0, 4))}


def test_what_infiniband_carries_is_timed_all_the_same() -> None:
    world = LossyWorld(3, "nccl").lose(both("nd0", "nd1"))
    for number in BOTH:
        for facts in world.tries[number].facts.values():
            facts["nccl_data"] = "infiniband"
    assert groups_of(world.cluster())["world"] == ((0, 1, 2, 3, 4, 5),)
