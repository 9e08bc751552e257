"""Clocks that differ, over roads of any slowness: bounds, majority, and real exchanges."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Launch, Level, Severity, Skip, Untested
from nccl_doctor.checks import clock
from nccl_doctor.checks.clock import Clock
from nccl_doctor.checks.clock.clocks import clock_offsets
from nccl_doctor.gather.peers import RoundPeers
from nccl_doctor.model.job import Rendezvous
from nccl_doctor.toolkit.c10d import keep_alive
from nccl_doctor.toolkit.peers.schedule import Schedule, schedule_of
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.findings import judge, only
from tests.support.rows import each_row

pytestmark = pytest.mark.xdist_group("torch")

CHECK = Clock()
EPOCH = 1_800_000_000.0


def exchange(
    clocks: Mapping[int, float], delay_s: float, seed: int, missed: Sequence[int] = ()
) -> dict[int, dict[str, Any]]:
    """Facts of one group: seat → error of its clock. Nobody hears those that are `missed`."""
    chance = random.Random(seed)
    found: dict[int, dict[str, Any]] = {
        seat: {"group": min(clocks), "exchanges": [], "synchronized": True, "c10d": False}
        for seat in clocks
    }
    start = EPOCH
    for _ in range(3):
        sent = {seat: start + chance.uniform(0, delay_s) for seat in clocks}
        heard = max(at for seat, at in sent.items() if seat not in missed)
        for seat, error in clocks.items():
            received = max(heard, sent[seat]) + chance.uniform(0, delay_s)
            silent = [other for other in missed if other != seat]
            entry = [sent[seat] + error, received + error, silent]
            found[seat]["exchanges"].append(entry)
        start += 3 * delay_s
    return found


def cluster(errors: Sequence[float], delay_s: float = 0.05, seed: int = 1, **more: Any) -> Cluster:
    """One rank per host; `more` are facts of all."""
    seen = exchange(dict(enumerate(errors)), delay_s, seed)
    names = [f"nd{i}" for i in range(len(errors))]
    facts = {name: {**seen[i], **more} for i, name in enumerate(names)}
    facts = json.loads(json.dumps(facts))
    return make_cluster(names, 1, check="clock", by_host=facts, round_name="all")


def change(made: Cluster, host: int, **fields: Any) -> Cluster:
    """Other facts of one host."""
    hosts = {h.id: h for h in made.hosts}
    now = hosts[host].facts["clock"]["all"].facts
    hosts[host] = replace(hosts[host], facts={"clock": {"all": outcome({**now, **fields})}})
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    return replace(made, hosts=tuple(hosts.values()), ranks=ranks)


def test_equal_clocks_and_small_differences_are_fine() -> None:
    assert judge(CHECK, cluster([0, 0, 0])) == []
    assert judge(CHECK, cluster([0, 4.8, -4.8], delay_s=0.01)) == []
    assert judge(CHECK, make_cluster()) == []


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_the_one_wrong_clock_is_named(wrong: int) -> None:
    errors = [-42.0 if host == wrong else 0.01 * host for host in range(4)]
    found = only(CHECK, cluster(errors), "clock-skew", hosts=[f"nd{wrong}"])
    assert found.level is Severity.WARN
    assert found.confidence.value == "certain"
    assert "s behind the others" in found.message
    assert found.evidence["offsets"].keys() == {"nd0", "nd1", "nd2", "nd3"}


def test_several_wrong_clocks_each_with_its_own_error() -> None:
    found = judge(CHECK, cluster([0, 0, 0, 30.0, -3600.0]))
    assert [f.where.hosts for f in found] == [("nd3",), ("nd4",)]
    assert found[0].message.startswith("30.0 s ahead")
    assert found[1].message.startswith("3600.0 s behind")


def test_of_two_nobody_knows_the_right_one() -> None:
    found = only(CHECK, cluster([0, 20]), "clock-skew", hosts=["nd0", "nd1"])
    assert found.confidence.value == "possible"
    assert found.message.startswith("the clocks differ by 20.0 s")
    made = change(cluster([0, 20, 0, 20]), 1, synchronized=False)  # nd3 says that it is right
    tie = only(CHECK, made, "clock-skew", hosts=["nd0", "nd1", "nd2", "nd3"])
    assert tie.confidence.value == "possible"


def test_the_one_that_nothing_keeps_right_is_the_likely_one() -> None:
    for wrong, said in ((0, "behind"), (1, "ahead of")):
        made = change(cluster([0, 20]), wrong, synchronized=False)
        found = only(CHECK, made, "clock-skew", hosts=[f"nd{wrong}"])
        assert found.confidence.value == "likely"
        assert said in found.message


@pytest.mark.parametrize(
    ("error", "severity"),
    [(20.0, Severity.FAIL), (9.5, Severity.FAIL), (8.5, Severity.WARN), (-9.5, Severity.FAIL)],
)
def test_a_c10d_rendezvous_does_not_live_with_it(error: float, severity: Severity) -> None:
    """A sign of life is up to 6 s old, and dead after 15: a host 9 s behind is removed at times."""
    for errors, hosts in (([0, error], ["nd0", "nd1"]), ([0, error, 0], ["nd1"])):
        found = only(CHECK, cluster(errors, delay_s=0.01, c10d=True), "clock-skew", hosts=hosts)
        assert found.level is severity
        assert ("c10d" in found.message) == (severity is Severity.FAIL)
    assert only(CHECK, cluster([0, error, 0], 0.01), "clock-skew", hosts=["nd1"]).level is (
        Severity.WARN
    )


def test_a_host_that_is_ahead_removes_the_others() -> None:
    ahead = only(CHECK, cluster([0, 12, 0], c10d=True), "clock-skew", hosts=["nd1"])
    behind = only(CHECK, cluster([0, -12, 0], c10d=True), "clock-skew", hosts=["nd1"])
    assert "it removes the others as dead" in ahead.message
    assert "the others remove it as dead" in behind.message


def test_the_intervals_of_the_rendezvous_are_those_that_were_set() -> None:
    slow = cluster([0, 60, 0], c10d=True, keep_alive=[30.0, 120.0])
    assert only(CHECK, slow, "clock-skew", hosts=["nd1"]).level is Severity.WARN
    quick = cluster([0, 2.0, 0], delay_s=0.01, c10d=True, keep_alive=[1.0, 3.0])
    assert only(CHECK, quick, "clock-skew", hosts=["nd1"]).level is Severity.FAIL
    assert judge(CHECK, cluster([0, 0.9, 0], 0.01, c10d=True, keep_alive=[1.0, 3.0])) == []
    assert keep_alive(Rendezvous()) == (5.0, 15.0)
    conf = "keep_alive_interval=10, keep_alive_max_attempt=4"
    assert keep_alive(Rendezvous("c10d", conf=conf)) == (10.0, 40.0)


@each_row("seed", range(50))
def test_a_slow_road_widens_the_bounds_and_invents_nothing(seed: int) -> None:
    chance = random.Random(seed)
    errors = [0.0] + [chance.choice([0.0, 0.0, chance.uniform(-60, 60)]) for _ in range(5)]
    delay_s = chance.choice([0.001, 0.1, 3.0, 30.0])
    facts = exchange(dict(enumerate(errors)), delay_s, seed)
    for seat, found in clock_offsets(facts, {}).items():
        assert found.low <= errors[seat] <= found.high
        assert found.error <= 2 * delay_s
    alike = cluster([0.0] * 6, delay_s, seed)
    assert judge(CHECK, alike) == []
    named = {h for f in judge(CHECK, cluster(errors, delay_s, seed)) for h in f.where.hosts}
    wrong = {f"nd{i}" for i, error in enumerate(errors) if abs(error) > 5}
    if len(wrong) < 3:
        assert named <= wrong


def test_a_host_that_nobody_heard_is_not_compared() -> None:
    facts = exchange({0: 0.0, 1: 0.0, 2: 50.0}, 0.05, 1, missed=[2])
    assert set(clock_offsets(facts, {})) == {0, 1}
    assert clock_offsets({}, {}) == {}
    assert set(clock_offsets({1: facts[1], 2: facts[2]})) == {1}


def test_groups_are_chained_by_their_first_hosts() -> None:
    errors = {0: 0.0, 1: 1.0, 2: -30.0, 3: -29.0}
    reports = exchange({0: errors[0], 1: errors[1]}, 0.05, 1)
    reports |= exchange({2: errors[2], 3: errors[3]}, 0.05, 2)
    heads = exchange({0: errors[0], 2: errors[2]}, 0.05, 3)
    found = clock_offsets(reports, heads)
    assert all(found[seat].low <= error <= found[seat].high for seat, error in errors.items())
    assert set(clock_offsets(reports, {})) == {0, 1}


# Rounds and real exchanges ------------------------------------------------------------------------


@each_row("seed", range(20))
def test_of_many_hosts_few_exchanges_compare_all_clocks(seed: int) -> None:
    errors = {seat: -30.0 if seat == 7 else 0.01 * (seat % 3) for seat in range(90)}
    (planned,) = CHECK.plan(make_cluster([f"nd{i}" for i in errors], 1, run_id=str(seed)))
    schedule = schedule_of(planned.groups[0], planned.params)
    assert schedule is not None
    facts = exchange(errors, 0.05, seed)
    for seat, each in facts.items():
        each["met"] = sorted(schedule.partners(seat))
        assert len(each["met"]) <= 11
    found = clock_offsets(facts)
    assert found.keys() == errors.keys()
    assert all(found[seat].low <= error <= found[seat].high for seat, error in errors.items())
    lost = {seat: each for seat, each in facts.items() if seat}  # the first host is gone
    assert clock_offsets(lost).keys() == lost.keys()
    names = [f"nd{seat}" for seat in errors]
    by_host = {f"nd{seat}": each for seat, each in facts.items()}
    made = make_cluster(names, 1, check="clock", by_host=by_host, round_name="all")
    assert only(CHECK, made, "clock-skew", hosts=["nd7"]).level is Severity.WARN


def test_one_round_of_all_hosts() -> None:
    few = make_cluster(["nd0", "nd1", "nd2"], 2)
    (only_round,) = CHECK.plan(few)
    assert only_round.groups == ((0, 2, 4),)
    assert only_round.may_shrink
    # Rank 0's host first, wherever it stands.
    swapped = change_rank(change_rank(few, 0, rank=4), 4, rank=0)
    assert CHECK.plan(swapped)[0].groups[0][0] == 4
    (many,) = CHECK.plan(make_cluster([f"nd{i}" for i in range(70)], 1, level=Level.FULL))
    assert many.groups == (tuple(range(70)),)
    assert not many.params["schedule"]["all_pairs"]  # each time is read through the store


def context(seat: int, group: tuple[int, ...], peers: Any, **params: Any) -> Context:
    told = {"hosts": len(group), "present": len(group), **params}
    return Context(
        launch=Launch(), env={}, round="all", group=group, seat=seat, params=told, peers=peers
    )


LOOK = """
from nccl_doctor.api import Context, Launch
from nccl_doctor.checks.clock import _uses_c10d

print(*(_uses_c10d(Context(Launch(name), {})) for name in ("torchrun", "accelerate", "srun")))
"""


def test_the_launcher_above_says_whether_its_agents_meet_by_c10d() -> None:
    shell = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, LOOK]  # it stays, as an agent does
    line = [*shell, "launch", "--rdzv_backend", "c10d", "t.py"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True True False\n"


def test_where_there_is_nobody_to_compare_with() -> None:
    with pytest.raises(Skip, match="one host"):
        CHECK.plan(make_cluster(["nd0"]))
    with pytest.raises(Untested, match="no other host"):
        CHECK.observe(context(0, (0,), None))


class Store:
    """A store, as rank 0's host serves it."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def peers(self, group: tuple[int, ...], seat: int) -> RoundPeers:
        return RoundPeers("127.0.0.1", self.server.port, "clock/", group, seat)


def meet(group: tuple[int, ...], present: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Facts of real observers over a real store."""
    store = Store()
    with ThreadPoolExecutor(len(present)) as pool:
        found = pool.map(
            lambda seat: CHECK.observe(context(seat, group, store.peers(group, seat))), present
        )
        return dict(zip(present, map(dict, found), strict=True))


def test_a_real_exchange_has_narrow_bounds() -> None:
    facts = meet((0, 3, 6), (0, 3, 6))
    found = clock_offsets(facts, {})
    assert set(found) == {0, 3, 6}
    for offset in found.values():
        assert offset.low <= 0 <= offset.high
        assert offset.error < 2.5
    json.dumps(facts)


def test_a_real_exchange_by_schedule_asks_the_partners_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "_EXCHANGE_S", 0.6)
    group = tuple(range(12))
    told = Schedule(group, "a", all_pairs=False).to_params()
    store = Store()
    present = [seat for seat in group if seat != 5]
    with ThreadPoolExecutor(len(present)) as pool:
        found = pool.map(
            lambda seat: CHECK.observe(context(seat, group, store.peers(group, seat), **told)),
            present,
        )
        facts = dict(zip(present, map(dict, found), strict=True))
    assert all(len(each["met"]) == 8 for each in facts.values())
    assert all(
        entry[2] == ([5] if 5 in each["met"] else [])
        for each in facts.values()
        for entry in each["exchanges"]
    )
    assert clock_offsets(facts).keys() == set(present)


def test_one_that_stays_away_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_EXCHANGE_S", 0.5)
    facts = meet((0, 3, 6), (0, 3))
    assert set(clock_offsets(facts, {})) == {0, 3}
    assert all(entry[2] == [6] for entry in facts[0]["exchanges"])
    with pytest.raises(Untested, match="no other host answered"):
        meet((0, 3), (0,))
