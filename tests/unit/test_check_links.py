"""The links check on made-up clusters: who is slow or lossy is named, a noisy machine is not."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import Confidence, Round, Severity
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.findings import Status
from nccl_doctor.toolkit.peers.schedule import in_slots
from tests.support.exchanges import AGAIN, BOTH, CHECK, FIRST, USUAL, World, both, loud, only
from tests.support.reports import RUN
from tests.support.rows import each_row

# Healthy


@pytest.mark.parametrize("count", [2, 3, 4, 8, 16])
def test_a_healthy_cluster_gives_nothing_and_needs_no_second_try(count: int) -> None:
    world = World(count)
    assert world.judge() == []
    assert [each.name for each in CHECK.plan(world.cluster())] == ["exchange"]


@given(st.integers(2, 8), st.integers(0, 1 << 30))
def test_noise_of_forty_percent_raises_nothing(count: int, seed: int) -> None:
    assert World(count).noise(seed, 0.4).judge() == []


@given(st.integers(2, 6), st.integers(0, 1 << 30))
def test_the_noise_of_a_busy_machine_raises_nothing_loud(count: int, seed: int) -> None:
    # 1.89 / 0.11 is what an end that runs 0.4 of the time may lose, squared, and a third of that.
    world = World(count).noise(seed, 0.89)
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


@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_very_slow_link_is_seen_among_links_that_differ_much(count: int) -> None:
    world = World(count)
    for number, pair in enumerate(world.pairs):
        world.slow([pair], share=(1.0, 0.8, 0.3, 0.2)[number % 4])
    found = only(world.slow(both("nd0", "nd2"), share=0.005).judge(), "link-slow")
    assert found.where.links == tuple(both("nd0", "nd2"))


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


@each_row("count", [4, 5, 8, 12, 16])
def test_what_is_tried_again_is_tried_with_half_as_many_pairs_at_once(count: int) -> None:
    world = World(count)
    for a, b in zip(world.names[::2], world.names[1::2], strict=False):
        world.slow(both(a, b))
    _, *again = CHECK.plan(world.after())
    assert [each.name for each in again][:2] == ["confirm", "confirm-2"]
    for each in again:
        assert len(each.groups[0]) // 2 <= max(1, count // 4)
        assert {seat for pair in each.pairs or () for seat in pair} == set(each.groups[0])


def test_a_report_with_one_second_round_for_all_is_judged_as_it_was() -> None:
    world = World(12)
    for a, b in zip(world.names[::2], world.names[1::2], strict=True):
        world.slow(both(a, b))
    first, *again = CHECK.plan(world.after())
    assert len(again) > 1
    met = [pair for each in again for slot in each.params["slots"] for pair in slot]
    group = tuple(sorted({seat for pair in met for seat in pair}))
    older = Round("confirm", (group,), 30.0, {"slots": in_slots(met)})
    cluster = world.after([older])
    assert [each.name for each in CHECK.plan(cluster)] == [first.name, "confirm"]
    report = conclude(cluster, [CHECK], run=RUN)
    assert [each.status for each in report.checks] == [Status.WARN]


def test_links_that_are_slow_only_while_all_others_are_busy_are_not_named() -> None:
    world = World(8)
    crowded = [pair for a, b in (("nd0", "nd1"), ("nd2", "nd3")) for pair in both(a, b)]
    assert world.slow(crowded, [FIRST]).judge() == []


# A slow host


@each_row(("count", "way"), product([3, 4, 5, 8, 12], ["in", "out", "both"]))
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


def test_controls_that_are_a_little_slower_now_do_not_hide_the_suspect() -> None:
    world = World(3).slow(World(3).pairs, tries=[AGAIN], share=0.3)
    found = only(world.slow(both("nd0", "nd2"), share=0.005).judge(), "link-slow")
    assert found.where.links == tuple(both("nd0", "nd2"))


@pytest.mark.parametrize("tries", [[FIRST], [AGAIN], BOTH])
def test_who_has_no_cpu_is_not_blamed_and_the_report_says_so(tries: list[int]) -> None:
    world = World(4)
    world.slow(world.of("nd1")).starve("nd1", tries)
    found = only(world.judge(), "link-slow")
    assert found.level is Severity.INFO
    assert found.where.hosts == ()
    assert "CPU" in found.message
    assert "while the CPU" in found.kind.title
    assert found.evidence["links"][0]["again" if AGAIN in tries else "first"]["starved"]
    assert set(found.evidence["load average"]) <= set(world.names)


def test_a_host_is_blamed_for_more_than_a_lack_of_cpu_explains() -> None:
    # A CPU that was there for 40 % of the time makes no link a hundred times slower.
    world = World(4)
    world.slow(world.of("nd1"), share=0.01).starve("nd1")
    found = only(world.judge(), "host-slow")
    assert (found.level, found.where.hosts) == (Severity.WARN, ("nd1",))


def test_nothing_that_passes_without_a_cpu_is_not_the_link() -> None:
    world = World(4)
    world.change(world.of("nd1"), rate=None, stalled="burst").starve("nd1")
    found = only(world.judge(), "link-slow")
    assert (found.level, found.where.hosts) == (Severity.INFO, ())


def test_a_busy_host_elsewhere_does_not_hide_a_slow_link() -> None:
    world = World(5).slow(both("nd0", "nd1")).starve("nd4")
    found = only(loud(world.judge()), "link-slow")
    assert found.where.links == tuple(both("nd0", "nd1"))


# Latency


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_late_link_and_a_late_host(count: int) -> None:
    found = only(
        World(count).change(both("nd0", "nd1"), rtt_us=20_000.0, rate=USUAL / 9).judge(),
        "latency-high",
    )
    assert (found.where.hosts, found.where.links) == ((), tuple(both("nd0", "nd1")))
    assert "20 ms" in found.message
    assert "50 µs" in found.message
    world = World(count)
    found = only(world.change(world.of("nd1"), rtt_us=9_000.0).judge(), "latency-high")
    assert found.where.hosts == ("nd1",)
    assert found.fix.startswith("on nd1: ethtool -c eth0 ")


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
