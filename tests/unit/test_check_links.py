"""The links check on made-up clusters: who is slow or lossy is named, a noisy machine is not."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Context,
    Finding,
    Launch,
    Layer,
    Level,
    Outcome,
    OutcomeStatus,
    Round,
    Severity,
    Skip,
    Untested,
)
from nccl_doctor.checks.collectives import Collectives
from nccl_doctor.checks.links import Links
from nccl_doctor.tools.timed import Pace, hold_meetings
from nccl_doctor.tools.wire import Gate
from nccl_doctor.verdict.causes import explain
from tests.clusters import make_cluster, outcome
from tests.findings import judge

CHECK = Links()
FIRST, AGAIN = 1, 2
BOTH = (FIRST, AGAIN)
USUAL = 1.25e9

Link = tuple[str, str]


class World:
    """Healthy hosts that measure each other twice, to be spoilt by a test.

    Only what the check itself asks for is measured the second time.
    """

    def __init__(self, count: int, backend: str = "gloo") -> None:
        self.names = [f"nd{i}" for i in range(count)]
        self.backend = backend
        self.pairs: list[Link] = list(permutations(self.names, 2))
        self.records = {(number, pair): record() for number in BOTH for pair in self.pairs}
        self.host_facts: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        self.silent: set[str] = set()

    def seat(self, name: str) -> int:
        return 2 * self.names.index(name)

    def of(self, name: str, way: str = "both") -> list[Link]:
        """Links of one host, by direction."""
        ends = {"out": (0,), "in": (1,), "both": (0, 1)}[way]
        return [pair for pair in self.pairs if name in {pair[end] for end in ends}]

    def change(self, links: Iterable[Link], tries: Sequence[int] = BOTH, **fields: Any) -> World:
        for pair in links:
            for number in tries:
                self.records[number, pair] = {**self.records[number, pair], **fields}
        return self

    def slow(self, links: Iterable[Link], tries: Sequence[int] = BOTH, share: float = 0.1) -> World:
        return self.change(links, tries, rate=share * USUAL)

    def lossy(self, links: Iterable[Link], tries: Sequence[int] = BOTH, lost: int = 20) -> World:
        for pair in (links := list(links)):
            self.change([pair], tries, lost=lost, segments=400, rate=0.05 * USUAL)
        return self

    def starve(self, name: str, tries: Sequence[int] = BOTH) -> World:
        """The CPU of a host is taken: both sides of its links know."""
        for pair in self.of(name):
            ends = [cpu(0.6 if end == name else 0.0) for end in pair]
            self.change([pair], tries, cpu={"echo": ends, "burst": ends})
        return self

    def noise(self, seed: int, share: float) -> World:
        """Every value of every try is off by up to a share of it."""
        chance = random.Random(seed)
        for key, each in self.records.items():
            self.records[key] = {
                **each,
                "rate": each["rate"] * chance.uniform(1 - share, 1 + share),
                "rtt_us": each["rtt_us"] * chance.uniform(1 - share, 1 + share),
            }
        return self

    def cluster(self, **fields: Any) -> Cluster:
        """After both rounds, as re-read from a saved report."""
        first = self._with({}, **fields)
        *_, last = CHECK.plan(first)
        if last.name != "confirm":
            return first
        return self._with(last.params, **fields)

    def judge(self, **fields: Any) -> list[Finding]:
        cluster = self.cluster(**fields)
        assert [r.name for r in CHECK.plan(cluster)] == [
            r.name for r in CHECK.plan(self._with({}, **fields))
        ]
        return judge(CHECK, cluster)

    def meetings(self) -> set[frozenset[str]]:
        """Who meets again."""
        *_, last = CHECK.plan(self._with({}))
        slots = last.params.get("slots", ())
        return {frozenset(self.names[seat // 2] for seat in m) for slot in slots for m in slot}

    def _with(self, params: Mapping[str, Any], **fields: Any) -> Cluster:
        again = {frozenset(meeting) for slot in params.get("slots", ()) for meeting in slot}
        made = make_cluster(self.names, backend=self.backend, **fields)
        hosts = []
        for host in made.hosts:
            name = host.name or ""
            rounds = {"exchange": outcome(self._facts(name, FIRST, None))}
            mine = {seat for meeting in again for seat in meeting}
            if self.seat(name) in mine:
                rounds["confirm"] = outcome(self._facts(name, AGAIN, again))
            if name in self.silent:
                rounds = {key: outcome(Outcome(OutcomeStatus.SILENT)) for key in rounds}
            hosts.append(replace(host, facts=json.loads(json.dumps({"links": rounds}))))
        ranks = [replace(rank, host=hosts[rank.host.id]) for rank in made.ranks]
        return replace(made, hosts=tuple(hosts), ranks=tuple(ranks))

    def _facts(self, name: str, number: int, only: set[frozenset[int]] | None) -> dict[str, Any]:
        return {
            "address": f"192.168.77.{self.names.index(name) + 1}",
            "interface": "eth0",
            "nic_mbps": None,
            "carries_data": True,
            "load": 0.5,
            "sent": {
                str(self.seat(other)): self.records[number, (name, other)]
                for other in self.names
                if other != name
                and (only is None or frozenset((self.seat(name), self.seat(other))) in only)
            },
            **self.host_facts[name],
        }


def cpu(waited: float) -> dict[str, Any]:
    return {"wall_s": 1.0, "cpu_s": 0.1, "waited_s": waited, "preempted": 3}


def record(**fields: Any) -> dict[str, Any]:
    return {
        "rtt_us": 50.0,
        "rate": USUAL,
        "segments": 1000,
        "lost": 0,
        "tcp": {"segments": 100_000, "lost": 0, "rtt_us": 60, "rttvar_us": 9, "retransmits": 0},
        "cpu": {"echo": [cpu(0.0)] * 2, "burst": [cpu(0.01)] * 2},
        "stalled": "",
        **fields,
    }


def loud(findings: Iterable[Finding]) -> list[Finding]:
    return [found for found in findings if found.level is not Severity.INFO]


def only(findings: Sequence[Finding], code: str) -> Finding:
    assert [each.code for each in findings] == [code], findings
    assert findings[0].fix
    return findings[0]


def both(a: str, b: str) -> list[Link]:
    return [(a, b), (b, a)]


# Healthy


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16])
def test_a_healthy_cluster_gives_nothing_and_needs_no_second_try(count: int) -> None:
    world = World(count)
    assert world.judge() == []
    assert [each.name for each in CHECK.plan(world.cluster())] == ["exchange"]


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(0, 1 << 30))
def test_noise_of_forty_percent_raises_nothing(count: int, seed: int) -> None:
    assert World(count).noise(seed, 0.4).judge() == []


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(0, 1 << 30))
def test_the_noise_of_a_busy_machine_raises_nothing_loud(count: int, seed: int) -> None:
    world = World(count).noise(seed, 0.95)
    for name in world.names:
        world.starve(name)
    assert loud(world.judge()) == []


# A slow link


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_a_slow_link_is_named_and_neither_of_its_ends(count: int) -> None:
    found = only(World(count).slow(both("nd0", "nd2")).judge(), "link-slow")
    assert found.where.hosts == ()
    assert found.where.links == (("nd0", "nd2"), ("nd2", "nd0"))
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert "1 Gbit/s both ways" in found.message
    assert "the other links: 10 Gbit/s" in found.message
    assert "192.168.77.3" in found.fix


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_link_that_is_slow_one_way(count: int) -> None:
    found = only(World(count).slow([("nd1", "nd0")]).judge(), "link-slow")
    assert (found.where.hosts, found.where.links) == ((), (("nd1", "nd0"),))


def test_a_link_is_slow_only_below_a_third() -> None:
    assert World(4).slow(both("nd0", "nd1"), share=0.34).judge() == []
    assert only(World(4).slow(both("nd0", "nd1"), share=0.32).judge(), "link-slow")


def test_a_link_on_which_nothing_moves_is_slow() -> None:
    world = World(4).change([("nd0", "nd1")], rate=None, stalled="burst")
    found = only(world.judge(), "link-slow")
    assert found.where.links == (("nd0", "nd1"),)
    assert found.message.startswith("0 Mbit/s one way")


def test_the_suspect_meets_again_and_so_do_both_ends_with_good_partners() -> None:
    world = World(6).slow(both("nd0", "nd1"))
    met = world.meetings()
    assert frozenset(("nd0", "nd1")) in met
    controls = met - {frozenset(("nd0", "nd1"))}
    assert len(controls) == 2
    assert {"nd0", "nd1"} < {name for each in controls for name in each}


# A slow host


@pytest.mark.parametrize("count", [3, 4, 5, 8, 12])
@pytest.mark.parametrize("way", ["in", "out", "both"])
def test_a_slow_host_is_named_and_none_of_its_victims(count: int, way: str) -> None:
    world = World(count)
    found = only(world.slow(world.of("nd1", way)).judge(), "host-slow")
    assert (found.where.hosts, found.where.links) == (("nd1",), ())
    assert found.where.interfaces == ("eth0",)
    assert {"in": "receiving", "out": "sending", "both": "both ways"}[way] in found.message
    assert "ethtool eth0" in found.fix
    # Two of three links of three hosts are slow: as well the third one may be fast.
    unsure = way == "both" and count == 3
    assert found.confidence is (Confidence.POSSIBLE if unsure else Confidence.LIKELY)


def test_not_every_link_of_a_slow_host_is_tried_again() -> None:
    world = World(16)
    world.slow(world.of("nd5"))
    assert len([meeting for meeting in world.meetings() if "nd5" in meeting]) == 3
    assert only(world.judge(), "host-slow").where.hosts == ("nd5",)


# Two faults


def test_two_slow_links_are_both_named() -> None:
    world = World(5).slow([*both("nd0", "nd1"), *both("nd2", "nd3")])
    found = world.judge()
    assert [each.code for each in found] == ["link-slow"] * 2
    links = {link for each in found for link in each.where.links}
    assert links == {*both("nd0", "nd1"), *both("nd2", "nd3")}


def test_a_slow_host_and_a_slow_link_elsewhere() -> None:
    world = World(6)
    world.slow([*world.of("nd4"), *both("nd0", "nd1")])
    by_code = {each.code: each for each in world.judge()}
    assert set(by_code) == {"host-slow", "link-slow"}
    assert by_code["host-slow"].where.hosts == ("nd4",)
    assert by_code["link-slow"].where.links == tuple(both("nd0", "nd1"))


def test_two_slow_hosts_of_six() -> None:
    world = World(6)
    found = world.slow([*world.of("nd1"), *world.of("nd4")]).judge()
    assert [each.code for each in found] == ["host-slow"] * 2
    assert sorted(each.where.hosts for each in found) == [("nd1",), ("nd4",)]


def test_a_slow_host_and_a_lossy_link_elsewhere() -> None:
    world = World(6)
    world.slow(world.of("nd4")).lossy(both("nd0", "nd1"))
    by_code = {each.code: each for each in world.judge()}
    assert set(by_code) == {"host-slow", "link-lossy"}
    assert by_code["host-slow"].where.hosts == ("nd4",)
    assert by_code["link-lossy"].where.links == tuple(both("nd0", "nd1"))


# What looks odd and is fine


@pytest.mark.parametrize(
    "racks", [("nd0 nd1", "nd2 nd3"), ("nd0 nd1 nd2 nd3", "nd4 nd5"), ("nd0 nd1 nd2", "nd3 nd4")]
)
def test_two_racks_are_no_fault(racks: tuple[str, str]) -> None:
    one, other = (rack.split() for rack in racks)
    world = World(len(one) + len(other))
    world.slow([pair for a in one for b in other for pair in both(a, b)], share=0.25)
    assert loud(world.judge()) == []


def test_two_fast_hosts_do_not_make_the_others_slow() -> None:
    world = World(5).change(both("nd0", "nd1"), rate=10 * USUAL, rtt_us=5.0)
    assert world.judge() == []


def test_where_all_are_slow_nobody_is() -> None:
    world = World(4)
    assert world.slow(world.pairs, share=0.01).judge() == []


# Noise


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_what_is_slow_once_is_noise(count: int) -> None:
    world = World(count)
    assert world.slow(both("nd0", "nd1"), tries=[FIRST]).judge() == []
    assert world.lossy(both("nd0", "nd1"), tries=[FIRST]).judge() == []
    world = World(count)
    assert world.slow(world.of("nd0"), tries=[FIRST]).judge() == []


def test_the_better_try_counts() -> None:
    world = World(4).slow(both("nd0", "nd1"), tries=[AGAIN])
    world.slow(both("nd0", "nd1"), tries=[FIRST], share=0.5)
    assert world.judge() == []


def test_where_the_controls_are_slow_now_the_suspect_is_not_blamed() -> None:
    world = World(4).slow(both("nd0", "nd1"), tries=[FIRST])
    world.slow(world.pairs, tries=[AGAIN])
    assert loud(world.judge()) == []


@pytest.mark.parametrize("tries", [[FIRST], [AGAIN], BOTH])
def test_who_has_no_cpu_is_not_blamed_and_the_report_says_so(tries: list[int]) -> None:
    world = World(4)
    world.slow(world.of("nd1")).starve("nd1", tries)
    found = only(world.judge(), "link-slow")
    assert found.level is Severity.INFO
    assert found.where.hosts == ()
    assert "CPU" in found.message
    assert found.evidence["links"][0]["again" if AGAIN in tries else "first"]["starved"]
    assert set(found.evidence["load average"]) <= set(world.names)


def test_a_busy_host_elsewhere_does_not_hide_a_slow_link() -> None:
    world = World(5).slow(both("nd0", "nd1")).starve("nd4")
    found = only(loud(world.judge()), "link-slow")
    assert found.where.links == tuple(both("nd0", "nd1"))


# Loss


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("one_way", [True, False])
def test_a_lossy_link_is_named_and_is_not_also_slow(count: int, one_way: bool) -> None:
    links = both("nd0", "nd1")[: 1 if one_way else 2]
    world = World(count).slow(both("nd0", "nd1")).lossy(links)
    found = only(world.judge(), "link-lossy")
    assert (found.where.hosts, found.where.links) == ((), tuple(links))
    assert found.level is Severity.WARN
    assert found.confidence is (Confidence.POSSIBLE if count == 2 else Confidence.LIKELY)
    assert "segments lost (5.0 %)" in found.message


@pytest.mark.parametrize("way", ["in", "out", "both"])
def test_a_lossy_host_is_named(way: str) -> None:
    world = World(4)
    found = only(world.lossy(world.of("nd2", way)).judge(), "link-lossy")
    assert (found.where.hosts, found.where.links) == (("nd2",), ())


@pytest.mark.parametrize(("lost", "segments"), [(4, 100), (9, 2000)])
def test_a_few_lost_segments_are_no_fault(lost: int, segments: int) -> None:
    world = World(3).change(both("nd0", "nd1"), lost=lost, segments=segments)
    assert world.judge() == []


def test_what_a_burst_loses_is_no_fault() -> None:
    tcp = {"segments": 1000, "lost": 200}
    world = World(3).change(both("nd0", "nd1"), tcp=tcp)
    assert frozenset(("nd0", "nd1")) in world.meetings()
    assert world.judge() == []


def test_an_echo_that_stands_still_while_segments_are_sent_again() -> None:
    gone: dict[str, Any] = {
        "stalled": "echo",
        "rate": None,
        "rtt_us": None,
        "segments": 0,
        "cpu": {},
    }
    world = World(3).change([("nd0", "nd1")], tcp={"segments": 6, "lost": 4}, **gone)
    found = only(world.judge(), "link-lossy")
    assert found.where.links == (("nd0", "nd1"),)
    assert "stood still" in found.message


# Latency


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_late_link_and_a_late_host(count: int) -> None:
    found = only(
        World(count).change(both("nd0", "nd1"), rtt_us=20_000.0, rate=USUAL / 9).judge(),
        "latency-high",
    )
    assert (found.where.hosts, found.where.links) == ((), tuple(both("nd0", "nd1")))
    assert "20 ms" in found.message
    assert "0.05 ms" in found.message
    world = World(count)
    found = only(world.change(world.of("nd1"), rtt_us=9_000.0).judge(), "latency-high")
    assert found.where.hosts == ("nd1",)


@pytest.mark.parametrize(("rtt", "usual"), [(900.0, 50.0), (4000.0, 500.0)])
def test_a_round_trip_is_late_by_a_factor_and_by_a_time(rtt: float, usual: float) -> None:
    world = World(4)
    world.change(world.pairs, rtt_us=usual).change(both("nd0", "nd1"), rtt_us=rtt)
    assert world.judge() == []


def test_a_late_answer_of_a_busy_host_is_not_its_link() -> None:
    world = World(4)
    world.change(world.of("nd1"), rtt_us=9_000.0).starve("nd1")
    assert loud(world.judge()) == []


# Two hosts


def test_of_two_hosts_one_direction_is_compared_with_the_other() -> None:
    found = only(World(2).slow([("nd0", "nd1")]).judge(), "link-slow")
    assert (found.where.hosts, found.where.links) == ((), (("nd0", "nd1"),))
    assert found.confidence is Confidence.POSSIBLE


def test_two_hosts_that_are_slow_both_ways_have_nobody_to_be_compared_with() -> None:
    world = World(2)
    assert world.slow(world.pairs, share=0.001).judge() == []


def line_rates(*mbps: int | None) -> World:
    world = World(2)
    for name, each in zip(world.names, mbps, strict=True):
        world.host_facts[name]["nic_mbps"] = each
    return world


def test_two_hosts_are_compared_with_their_line_rate() -> None:
    found = only(
        line_rates(10_000, 10_000).slow(both("nd0", "nd1"), share=0.09).judge(), "link-slow"
    )
    assert (found.where.hosts, found.where.links) == ((), tuple(both("nd0", "nd1")))
    assert "line rate 10 Gbit/s" in found.message


@pytest.mark.parametrize("mbps", [(1000, 10_000), (10_000, None), (None, None)])
def test_two_hosts_of_which_the_line_rate_says_nothing(mbps: tuple[int | None, int | None]) -> None:
    assert line_rates(*mbps).slow(both("nd0", "nd1"), share=0.09).judge() == []


def test_a_fast_line_is_not_filled_by_one_connection() -> None:
    assert line_rates(400_000, 400_000).judge() == []


# InfiniBand


def test_where_infiniband_carries_the_data_a_slow_socket_is_only_information() -> None:
    world = World(4, backend="nccl").slow(both("nd0", "nd1"))
    for name in world.names:
        world.host_facts[name]["carries_data"] = False
    assert only(world.judge(), "link-slow").level is Severity.INFO


# What was not measured


def test_who_fell_silent_makes_nobody_slow() -> None:
    world = World(3).slow([("nd0", "nd2"), ("nd1", "nd2")])
    world.silent.add("nd2")
    assert world.judge() == []


def test_what_was_not_measured_is_not_judged() -> None:
    world = World(3)
    for pair in both("nd0", "nd1"):
        world.records[FIRST, pair] = {"problem": "the partner did not call"}
    assert world.judge() == []


def test_a_suspect_that_was_not_measured_again_is_not_blamed() -> None:
    world = World(4).slow(both("nd0", "nd1"))
    for pair in both("nd0", "nd1"):
        world.records[AGAIN, pair] = {"problem": "no time was left"}
    assert world.judge() == []


# The collectives that a lossy link breaks


def broken(world: World, *rounds: tuple[str, Outcome], **fields: Any) -> Cluster:
    """The same cluster, with collectives that ended so on every rank."""
    cluster = world.cluster(**fields)
    facts = {"collectives": {name: how.to_json() for name, how in rounds}}
    return replace(cluster, ranks=tuple(replace(rank, facts=facts) for rank in cluster.ranks))


STEPS = ({"step": "init_process_group", "at_s": 0.0}, {"step": "all_reduce", "at_s": 1.0})
HUNG = Outcome(OutcomeStatus.HUNG, breadcrumbs=STEPS, state="S")
GOOD = Outcome(OutcomeStatus.OK, breadcrumbs=STEPS, facts={"steps": [], "wrong": []})
CUT = Outcome(
    OutcomeStatus.RAISED, breadcrumbs=STEPS, reason="RuntimeError: Connection closed by x"
)
OWN = Outcome(OutcomeStatus.RAISED, breadcrumbs=STEPS, reason="RuntimeError: CUDA out of memory")


@pytest.mark.parametrize(
    ("rounds", "level"),
    [
        ([("world", HUNG)], Severity.FAIL),
        ([("world", HUNG), ("world-again", HUNG)], Severity.FAIL),
        ([("world", GOOD), ("multi-group", CUT)], Severity.FAIL),
        ([("world", HUNG), ("world-again", GOOD)], Severity.WARN),
        ([("world", OWN)], Severity.WARN),
        ([("world", GOOD)], Severity.WARN),
        ([], Severity.WARN),
    ],
)
def test_loss_is_a_failure_where_a_collective_over_the_link_broke(
    rounds: list[tuple[str, Outcome]], level: Severity
) -> None:
    world = World(3).lossy(both("nd0", "nd1"))
    assert only(judge(CHECK, broken(world, *rounds)), "link-lossy").level is level


def test_a_collective_of_other_hosts_is_not_broken_by_the_link() -> None:
    world = World(3).lossy(both("nd0", "nd1"))
    cluster = broken(world)
    hung = {"collectives": {"each-host": HUNG.to_json()}}
    ranks = tuple(
        replace(rank, facts=hung) if rank.host.name == "nd2" else rank for rank in cluster.ranks
    )
    (found,) = judge(CHECK, replace(cluster, ranks=ranks))
    assert found.level is Severity.WARN


def test_a_lossy_link_explains_the_collective_that_hangs_on_it() -> None:
    cluster = broken(World(3).lossy(both("nd0", "nd1")), ("world", HUNG))
    found = explain([*judge(CHECK, cluster), *judge(Collectives(), cluster)], cluster)
    by_code = {each.code: each for each in found}
    assert set(by_code) == {"link-lossy", "collective-hang"}
    assert by_code["collective-hang"].explained_by == "link-lossy"
    assert by_code["link-lossy"].explained_by is None
    assert by_code["link-lossy"].kind.layer is Layer.ROUTE


# Planning


def rounds_of(cluster: Cluster) -> list[Round]:
    return list(CHECK.plan(cluster))


def test_one_participant_of_each_host_that_is_there() -> None:
    (first,) = rounds_of(make_cluster(["nd0", "nd1", "nd2"], absent_nodes=[2]))
    assert (first.name, first.groups, first.may_shrink) == ("exchange", ((0, 2),), True)
    assert rounds_of(make_cluster(["nd0"], absent_nodes=[0])) == []


def test_many_hosts_take_no_longer_than_sixteen() -> None:
    names = [f"nd{i}" for i in range(200)]
    (few,) = rounds_of(make_cluster(names[:16]))
    (many,) = rounds_of(make_cluster(names))
    assert many.deadline_s < few.deadline_s
    (every,) = rounds_of(make_cluster(names, level=Level.FULL))
    assert every.deadline_s > many.deadline_s


def test_nobody_has_two_partners_at_once_when_trying_again() -> None:
    world = World(8)
    world.slow(world.of("nd3")).lossy(both("nd0", "nd1"))
    *_, last = rounds_of(world.cluster())
    for slot in last.params["slots"]:
        busy = [seat for meeting in slot for seat in meeting]
        assert len(busy) == len(set(busy))
    assert {seat for slot in last.params["slots"] for m in slot for seat in m} == set(
        last.groups[0]
    )


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_one_random_fault_is_found_exactly(data: st.DataObject) -> None:
    count = data.draw(st.integers(4, 8))
    world = World(count).noise(data.draw(st.integers(0, 1 << 30)), 0.2)
    guilty = data.draw(st.sampled_from([*world.names, *combinations(world.names, 2)]))
    links = world.of(guilty) if isinstance(guilty, str) else both(*guilty)
    found = world.slow(links, share=0.1).judge()
    if isinstance(guilty, str):
        assert only(found, "host-slow").where.hosts == (guilty,)
    else:
        assert only(found, "link-slow").where.links == tuple(both(*guilty))


# Observing


class OtherHost:
    """A peer behind its own gate."""

    def __init__(self, posts: Mapping[int, Any]) -> None:
        self.posts = posts
        self.posted: Any = None

    def post(self, tag: str, value: Any) -> None:
        self.posted = json.loads(json.dumps(value))

    def collect(self, tag: str, timeout_s: float) -> dict[int, Any]:
        return {**self.posts, 0: self.posted}

    def store(self) -> Any:
        raise AssertionError("no process group is needed")


def context(group: tuple[int, ...], peers: OtherHost | None, **params: Any) -> Context:
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_CONF_FILE": "/nonexistent"}
    return Context(
        launch=Launch(), env=env, round="exchange", group=group, params=params, peers=peers
    )


def test_observing_measures_both_ways() -> None:
    theirs: dict[int, Any] = {}
    with Gate("127.0.0.2") as gate:
        peers = OtherHost({4: gate.door.to_json()})

        def other() -> None:
            end = time.monotonic() + 10
            theirs.update(hold_meetings([[(0, 4)]], 4, gate, {}, pace=Pace(), deadline=end))

        thread = threading.Thread(target=other)
        thread.start()
        facts = json.loads(json.dumps(CHECK.observe(context((0, 4), peers))))
        thread.join(10)
    assert facts["sent"]["4"]["rate"] > 1e6
    assert theirs[0]["rate"] > 1e6
    for door in (gate.door.to_json(), peers.posted):
        assert door["token"] not in json.dumps(facts)
        assert door["answer"] not in json.dumps(facts)


def test_nothing_measured_is_not_known() -> None:
    with pytest.raises(Untested, match="was not listening"):
        CHECK.observe(context((0, 4), OtherHost({})))


def test_one_host_has_no_links() -> None:
    with pytest.raises(Skip, match="one host"):
        CHECK.observe(context((0,), None, hosts=1))


def test_one_host_of_several_has_not_been_tested() -> None:
    with pytest.raises(Untested, match="no other host"):
        CHECK.observe(context((0,), None, hosts=2))
