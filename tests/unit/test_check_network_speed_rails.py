"""Each NIC by itself, on made-up clusters: the slow one, the rail that is slow everywhere, and NICs
that are all slower than their rate allows; and those that nobody can judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import (
    ALONE,
    Cluster,
    Confidence,
    Host,
    Level,
    Outcome,
    OutcomeStatus,
    Severity,
)
from nccl_doctor.model.findings import Finding, Round
from nccl_doctor.toolkit.tables import read_table
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank, make_cluster, outcome, reread
from tests.support.gpu_facts import H100
from tests.support.gpu_facts import facts as by_torch
from tests.support.gpu_facts import gpu as of_torch
from tests.support.gpu_states import gpu, state
from tests.support.rows import each_row
from tests.support.timed_rounds import BUSY, IDLE, all_reduce, hold

CHECK = CHECKS["network_speed"]
LARGE = 128 << 20
FAST, SLOW = 46.0, 3.0
"""GB/s of a NIC of 400 Gb/s."""
PCI = {"width": 16.0, "width_max": 16.0, "speed": 32.0, "speed_max": 32.0}
Rate = Callable[[Round, tuple[int, ...], int], float]
"""GB/s of a group in a round, through the rail of this number; -1 where NCCL chooses."""


def nic(number: int) -> str:
    return f"mlx5_{number}:1"


def hosts(
    count: int,
    nproc: int = 4,
    *,
    nics: int | None = None,
    road: str = "infiniband",
    port: Mapping[str, Any] | None = None,
    pci: Mapping[str, Any] | None = None,
    driver: str = "mlx5_core",
    near: int = 0,
    direct: str = "DMA-BUF",
    virtual: bool = False,
    name: str = H100,
    slot: Callable[[int], str] = lambda number: f"0000:{0x1A + number:02x}:00.0",
    **of: Any,
) -> Cluster:
    """Hosts with as many NICs of 400 Gb/s as GPUs, one beside each; what is said is different."""
    nics = nproc if nics is None else nics
    made = make_cluster([f"nd{n}" for n in range(count)], nproc, backend="nccl", level=Level.FULL)
    known = {}
    for host in made.hosts:
        rails = [
            {"name": nic(n), "pci": slot(n), "numa": 0, "state": "ACTIVE", "subnet": ""}
            for n in range(nics)
        ]
        devices = [
            {
                "device": f"mlx5_{n}",
                "driver": driver,
                "pci": {"address": slot(n), **PCI, **(pci or {})},
                "ports": [
                    {"name": nic(n), "gbps": 400.0, "link": "InfiniBand", **(port or {})},
                ],
            }
            for n in range(nics)
        ]
        facts = {
            "rails": {"slots": [slot(n) for n in range(nics)], "rails": rails, "hca": ""},
            "rdma": {"road": road},
            "fabric_ports": {"at_s": 0.0, "devices": devices, "counters": {}},
            "gpu_direct": {"road": direct, "virtual": virtual},
            "gpu_state": state(host.id, [gpu(host.id, at, name=name, **of) for at in range(nproc)]),
        }
        known[host.id] = replace(
            host, facts={name: {ALONE: outcome(value)} for name, value in facts.items()}
        )
    for rank in made.ranks:
        local = rank.local_rank or 0
        beside = {"near": near, "at": [local], "names": [nic(local)], "own": {}, "own_near": None}
        seen = {
            "gpu_affinity": {"rdma": {**beside, "count": nics}},
            "backend_device": by_torch(
                rank.host.id, local, devices=[of_torch(rank.host.id, n, name) for n in range(nproc)]
            ),
        }
        facts = {name: {ALONE: outcome(value)} for name, value in seen.items()}
        made = change_rank(made, rank.seat, host=known[rank.host.id], facts=facts)
    return replace(made, hosts=tuple(known.values()))


def held(
    cluster: Cluster,
    rate: Rate | float,
    *,
    size: int = LARGE,
    cpu: Mapping[str, Any] = IDLE,
    by: Callable[[Round, tuple[int, ...], int], str] = lambda *_: "",
    **more: Any,
) -> tuple[Cluster, list[Round]]:
    locals_ = {rank.seat: str(rank.local_rank) for rank in cluster.ranks}

    def facts(round_: Round, group: tuple[int, ...], seat: int) -> dict[str, Any]:
        rail = round_.params.get("rails", {}).get(locals_[seat], -1)
        busbw = rate(round_, group, rail) if callable(rate) else rate
        seen = {"rail": rail, "nic": nic(rail)} if rail >= 0 else {}
        seen |= {"by": program} if (program := by(round_, group, rail)) else {}
        return {**all_reduce(size, size / busbw / 1e9, cpu), **seen, **more}

    return hold(CHECK, cluster, facts)


def judged(cluster: Cluster, rate: Rate | float, **how: Any) -> list[Finding]:
    return list(CHECK.judge(held(cluster, rate, **how)[0]))


def slow_at(node: int, *rails: int, nproc: int = 4) -> Rate:
    """The NICs of these numbers on one host are slow."""
    return lambda _, group, rail: (
        SLOW if rail in rails and any(seat // nproc == node for seat in group) else FAST
    )


def test_every_nic_is_tried_alone_by_the_rank_beside_it_and_all_at_once() -> None:
    rounds = {r.name: r for r in CHECK.plan(hosts(4))}
    assert set(rounds) == {"network-0", "network-1", "rails-0-0", "rails-0-1"}
    assert rounds["network-0"].params == {}
    assert rounds["rails-0-0"].params == {"rails": {"0": 0, "1": 1, "2": 2, "3": 3}}
    assert rounds["rails-0-0"].groups == rounds["network-0"].groups


def test_a_gpu_is_paired_with_the_nic_beside_it() -> None:
    made = hosts(2, 2)
    for rank in made.ranks:
        other = 1 - (rank.local_rank or 0)
        facts = {**rank.facts}
        near = {"near": 0, "at": [other], "names": [nic(other)], "own": {}, "count": 2}
        facts["gpu_affinity"] = {ALONE: outcome({"rdma": near})}
        made = change_rank(made, rank.seat, facts=facts)
    rounds = {r.name: r for r in CHECK.plan(made)}
    assert rounds["rails-0-0"].params == {"rails": {"0": 1, "1": 0}}


def test_more_nics_than_ranks_take_more_passes_but_not_without_end() -> None:
    names = {r.name for r in CHECK.plan(hosts(2, 2, nics=4))}
    assert names == {"network-0", "rails-0-0", "rails-1-0"}
    assert len([r for r in CHECK.plan(hosts(2, 1, nics=12)) if r.name.startswith("rails")]) == 4


@pytest.mark.parametrize("road", ["sockets", "efa", "plugin", "none"])
def test_without_verbs_no_nic_can_be_named(road: str) -> None:
    rounds = CHECK.plan(hosts(3, road=road))
    assert {r.name.partition("-")[0] for r in rounds} == {"network"}
    assert judged(hosts(3, road=road), 1.0) == []


def test_a_nic_that_is_down_is_not_tried() -> None:
    made = hosts(2)
    host = made.hosts[1]
    facts = host.facts["rails"][ALONE].facts
    rails = [{**r, "state": "DOWN" if r["name"] == nic(2) else "ACTIVE"} for r in facts["rails"]]
    changed = {"rails": {ALONE: outcome({**facts, "rails": rails})}}
    made = with_host(made, replace(host, facts={**host.facts, **changed}))
    rounds = {r.name: r.groups for r in CHECK.plan(made)}
    assert rounds["rails-0-0"] == ((0, 4), (1, 5), (3, 7))


@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_equals_give_nothing(count: int) -> None:
    assert judged(hosts(count), FAST) == []


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_a_slow_nic_is_named_with_its_host(count: int) -> None:
    (found,) = judged(hosts(count), slow_at(1, 2))
    assert (found.code, found.level) == ("rail-slow", Severity.WARN)
    assert (found.where.hosts, found.where.interfaces) == (("nd1",), (nic(2),))
    assert found.where.links == ()
    assert found.message == (
        "mlx5_2:1 alone: with its neighbours 3 GB/s bus bandwidth, measured twice; other pairs: "
        "46 GB/s"
    )


def written_by_some(*nodes: int) -> Callable[[Round, tuple[int, ...], int], str]:
    """Pairs of these hosts write by RDMA; the others have no program for it, and ask NCCL."""
    return lambda _, group, rail: (
        "ib_write_bw" if rail >= 0 and all(seat // 4 in nodes for seat in group) else ""
    )


def test_a_nic_that_is_slow_by_rdma_writes_is_named_with_the_program() -> None:
    (found,) = judged(hosts(4), slow_at(1, 2), by=written_by_some(0, 1, 2, 3))
    assert (found.where.hosts, found.where.interfaces) == (("nd1",), (nic(2),))
    assert found.message.startswith("mlx5_2:1 alone, by ib_write_bw: with its neighbours 3 GB/s")


def test_writes_are_not_compared_with_nccl() -> None:
    by = written_by_some(0, 1, 2)

    def rate(round_: Round, group: tuple[int, ...], rail: int) -> float:
        return 2 * FAST if by(round_, group, rail) else 2 * FAST / 3

    assert judged(hosts(4), rate, by=by) == []


def test_a_second_try_in_another_way_confirms_nothing() -> None:
    writes = written_by_some(0, 1, 2, 3)

    def by(round_: Round, group: tuple[int, ...], rail: int) -> str:
        return "" if round_.name.startswith("again") else writes(round_, group, rail)

    assert judged(hosts(4), slow_at(1, 2), by=by) == []


def test_all_slow_nics_of_a_host_are_one_finding_and_explain_its_slow_network() -> None:
    def rate(round_: Round, group: tuple[int, ...], rail: int) -> float:
        return SLOW if any(seat // 4 == 1 for seat in group) else FAST

    rail, network = judged(hosts(5), rate)
    assert (rail.code, rail.where.hosts) == ("rail-slow", ("nd1",))
    assert rail.where.interfaces == tuple(nic(n) for n in range(4))
    assert (network.code, network.where.hosts) == ("bandwidth-low", ("nd1",))
    assert network.explained_by == "rail-slow"


def test_between_two_hosts_the_slow_nic_is_named_and_no_end_is_blamed() -> None:
    def rate(_: Round, group: tuple[int, ...], rail: int) -> float:
        return SLOW if rail == 3 else FAST

    (found,) = judged(hosts(2), rate)
    assert (found.code, found.where.hosts) == ("rail-slow", ())
    assert found.where.links == (("nd0", "nd1"), ("nd1", "nd0"))
    assert found.where.interfaces == (nic(3),)
    assert "3 GB/s bus bandwidth between the two hosts, measured twice; other NICs: 46" in (
        found.message
    )


def test_a_rail_that_is_slow_between_all_hosts() -> None:
    (found,) = judged(hosts(4), lambda _, group, rail: SLOW if rail == 0 else FAST)
    assert found.code == "rail-slow"
    assert found.where.hosts == ("nd0", "nd1", "nd2", "nd3")
    assert found.where.interfaces == (nic(0),)
    assert "between all 4 hosts" in found.message


def test_nics_of_another_rate_are_another_kind() -> None:
    made = hosts(3)
    for node in range(3):
        made = with_rates(made, node, {0: 100.0})
    assert judged(made, lambda _, group, rail: 11.0 if rail == 0 else FAST) == []


def with_rates(cluster: Cluster, node: int, gbps: Mapping[int, float]) -> Cluster:
    """The same with NICs of other rates on one host: number → rate."""
    host = cluster.hosts[node]
    facts = host.facts["fabric_ports"][ALONE].facts
    devices = [
        {**device, "ports": [{**device["ports"][0], "gbps": gbps.get(number, 400.0)}]}
        for number, device in enumerate(facts["devices"])
    ]
    changed = {"fabric_ports": {ALONE: outcome({**facts, "devices": devices})}}
    return with_host(cluster, replace(host, facts={**host.facts, **changed}))


def with_host(cluster: Cluster, host: Host) -> Cluster:
    for rank in cluster.ranks_on(host):
        cluster = change_rank(cluster, rank.seat, host=host)
    rest = tuple(host if each.id == host.id else each for each in cluster.hosts)
    return replace(cluster, hosts=rest)


@pytest.mark.parametrize("count", [3, 4, 9])
def test_a_host_with_slower_nics_is_not_compared_with_others(count: int) -> None:
    made = with_rates(hosts(count), 1, dict.fromkeys(range(4), 100.0))

    def rate(_: Round, group: tuple[int, ...], rail: int) -> float:
        return 11.0 if any(seat // 4 == 1 for seat in group) else FAST

    assert judged(made, rate) == []


@pytest.mark.parametrize("count", [3, 4, 9])
def test_a_host_with_other_gpus_is_not_compared_with_others(count: int) -> None:
    made = hosts(count)
    for rank in made.ranks_on(made.hosts[1]):
        seen = by_torch(1, rank.local_rank or 0, 4)
        seen["devices"] = [{**each, "name": "NVIDIA A40"} for each in seen["devices"]]
        facts = {**rank.facts, "backend_device": {ALONE: outcome(seen)}}
        made = change_rank(made, rank.seat, facts=facts)

    def rate(_: Round, group: tuple[int, ...], rail: int) -> float:
        return 21.0 if any(seat // 4 == 1 for seat in group) else FAST

    assert judged(made, rate) == []


def test_what_was_slow_once_is_noise() -> None:
    def rate(round_: Round, group: tuple[int, ...], rail: int) -> float:
        once = not round_.name.startswith("again")
        return slow_at(1, 2)(round_, group, rail) if once else FAST

    assert judged(hosts(4), rate) == []
    assert (
        judged(hosts(2), lambda r, g, n: SLOW if n == 3 and "again" not in r.name else FAST) == []
    )


def test_a_busy_machine_is_told_and_not_blamed() -> None:
    (found,) = judged(hosts(4), slow_at(1, 2), cpu=BUSY)
    assert found.level is Severity.INFO


def test_figures_name_the_nics() -> None:
    shown = list(CHECK.figures(held(hosts(2), FAST)[0]))
    alone = [each for each in shown if each.name == "all-reduce through one NIC alone, 128 MiB"]
    assert [each.where.interfaces for each in alone] == [(nic(n),) for n in range(4)]
    assert [each.value for each in alone] == [pytest.approx(FAST)] * 4


# --- floors ---


@pytest.mark.parametrize("count", [2, 3, 4])
def test_nics_that_are_all_equally_slow_are_named_together(count: int) -> None:
    (found,) = judged(hosts(count), 12.0)
    assert found.code == "bandwidth-below-floor"
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.where.hosts == tuple(f"nd{node}" for node in range(count))
    assert found.where.interfaces == tuple(nic(n) for n in range(4))
    assert found.message == (
        "all-reduce through one NIC of 400 Gb/s alone: at most 12 GB/s bus bandwidth, measured "
        "twice; such a NIC gives at least 20 GB/s here"
    )
    assert "ib_loopback" in found.evidence["source"]
    measured = [(each["host"], each["nic"]) for each in found.evidence["measured"]]
    assert sorted(measured) == [(f"nd{node}", nic(n)) for node in range(count) for n in range(4)]


def test_only_the_host_that_is_slow_with_every_partner_is_below() -> None:
    """Not slow enough for an outlier: its neighbours are good with others."""

    def rate(_: Round, group: tuple[int, ...], rail: int) -> float:
        return 15.0 if any(seat // 4 == 1 for seat in group) else 25.0

    (found,) = judged(hosts(4), rate)
    assert (found.code, found.where.hosts) == ("bandwidth-below-floor", ("nd1",))


def test_half_the_capacity_between_switches_is_not_below() -> None:
    assert judged(hosts(4), 0.45 * 50) == []


def test_every_row_says_where_its_numbers_are_from() -> None:
    for row in read_table("nccl_doctor.checks.network_speed", "floors.toml")["nic"]:
        assert row["source"]
        assert row["seen"].year >= 2026
        assert row["least_gbps"] < 0.5 * row["gbps"] / 8


WITHOUT_GPU = ({"direct": "none"}, {"near": 3}, {"name": "NVIDIA GeForce RTX 4090"})


@each_row("how", WITHOUT_GPU)
def test_the_floor_of_rdma_writes_asks_for_no_gpu(how: dict[str, Any]) -> None:
    assert judged(hosts(2, **how), SLOW) == []
    (found,) = judged(hosts(2, **how), SLOW, by=written_by_some(0, 1))
    assert (found.code, found.where.hosts) == ("bandwidth-below-floor", ("nd0", "nd1"))
    assert found.where.interfaces == tuple(nic(n) for n in range(4))
    assert found.message.startswith("RDMA writes (ib_write_bw) through one NIC of 400 Gb/s alone")
    assert found.kind.title.startswith("RDMA writes")
    assert "no GPU and no NCCL took part" in (found.fix or "")
    assert judged(hosts(2, virtual=True, **how), SLOW, by=written_by_some(0, 1)) == []


@each_row(
    "how",
    [
        {"port": {"gbps": 25.0}},
        {"port": {"gbps": None}},
        {"driver": "bnxt_en"},
        {"pci": {"speed": None, "width": None}},
        {"near": 3},
        {"near": None},
        {"virtualization": 1},
        {"virtualization": None},
        {"mig": [1, 1]},
        {"max_pcie_generation": None},
        {"road": "sockets"},
        {"direct": "none"},
        {"virtual": True},
        {"name": "NVIDIA GeForce RTX 4090"},
    ],
)
def test_where_something_else_may_limit_there_is_no_floor(how: dict[str, Any]) -> None:
    assert judged(hosts(3, **how), 2.0) == []


@pytest.mark.parametrize("check", ["gpu_state", "fabric_ports", "gpu_direct"])
def test_without_facts_there_is_no_floor(check: str) -> None:
    made = hosts(3)
    for host in made.hosts:
        made = with_host(made, replace(host, facts={**host.facts, check: {}}))
    assert judged(made, 2.0) == []


def test_the_floor_is_lower_where_pcie_carries_less() -> None:
    older = {"max_pcie_generation": 4, "max_pcie_width": 16}
    assert judged(hosts(3, **older), 17.0) == []
    (found,) = judged(hosts(3, **older), 12.0)
    assert "gives at least 15.8 GB/s here" in found.message
    shared = hosts(3, slot=lambda number: f"0000:{0x1A + number // 2:02x}:00.{number % 2}")
    assert judged(shared, 17.0) == []  # two ports of one adapter have its slot together


def test_a_nic_that_is_slower_than_others_is_named_once() -> None:
    (found,) = judged(hosts(4), slow_at(1, 2))
    assert found.code == "rail-slow"


def test_below_once_is_noise() -> None:
    made, rounds = held(hosts(2), lambda r, g, n: FAST if "again" in r.name else 12.0)
    assert list(CHECK.judge(made)) == []
    assert "again-rails-0-0" in {r.name for r in rounds}


def test_without_a_second_try_nobody_is_below() -> None:
    untested = Outcome(OutcomeStatus.UNTESTED, reason="no time was left")

    def facts(round_: Round, group: tuple[int, ...], seat: int) -> Any:
        if round_.name.startswith("again"):
            return untested
        rail = round_.params.get("rails", {}).get(str(seat % 4), -1)
        return {**all_reduce(LARGE, LARGE / 2e9), "rail": rail, "nic": nic(rail)}

    made, _ = hold(CHECK, hosts(2), facts)
    assert list(CHECK.judge(made)) == []


def test_a_saved_report_is_judged_alike() -> None:
    made = held(hosts(3), 12.0)[0]
    known = {host.id: replace(host, facts=reread(host.facts)) for host in made.hosts}
    ranks = [replace(r, host=known[r.host.id], facts=reread(r.facts)) for r in made.ranks]
    saved = replace(made, hosts=tuple(known.values()), ranks=tuple(ranks))
    assert list(CHECK.judge(saved)) == list(CHECK.judge(made)) != []
    assert list(CHECK.figures(saved)) == list(CHECK.figures(made)) != []


def test_small_messages_and_busy_machines_say_nothing() -> None:
    assert judged(hosts(3), 2.0, size=1 << 20) == []
    assert judged(hosts(3), 2.0, cpu=BUSY) == []


def test_a_setting_that_slows_down_is_named_and_makes_it_information() -> None:
    (found,) = judged(hosts(3), 2.0, slowing={"NCCL_NET_GDR_LEVEL": "LOC"})
    assert (found.level, found.confidence) == (Severity.INFO, Confidence.POSSIBLE)
    assert found.message.endswith("; NCCL_NET_GDR_LEVEL=LOC is set")
