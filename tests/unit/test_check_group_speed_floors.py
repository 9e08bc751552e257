"""Hosts that are all equally slow inside, on made-up clusters; and those that nobody can judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Figure, Level, Severity
from nccl_doctor.model.findings import Finding, Round
from nccl_doctor.toolkit.tables import read_table
from tests.support.checks import CHECKS
from tests.support.clusters import change_rank
from tests.support.gpu_facts import H100, H200
from tests.support.gpu_facts import gpu as by_torch
from tests.support.gpu_states import cluster_of, gpu, state, torch_sees, with_backend
from tests.support.timed_rounds import BUSY, IDLE, all_reduce, hold

CHECK = CHECKS["group_speed"]
A100, B200, PCIE, L40S = "NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA H100 PCIe", "NVIDIA L40S"
LARGE = 128 << 20
GB = 1e9
Rate = Callable[[Round, tuple[int, ...]], float]


def hosts(*models: str, nproc: int = 8, **of: Any) -> Cluster:
    """Hosts of eight GPUs of a model, by torch and by the driver; `of` changes every GPU."""
    states = [
        state(node, [gpu(node, at, name=model, **of) for at in range(8)])
        for node, model in enumerate(models)
    ]
    seen = torch_sees(len(models))
    for seat, facts in seen.items():
        node = seat // 8
        facts["devices"] = [by_torch(node, at, models[node]) for at in range(8)]
    made = cluster_of(*states, nproc=nproc, level=Level.FULL)
    ranks = {rank.seat: rank for rank in made.present}
    kept = {seat: seen[8 * (seat // nproc) + seat % nproc] for seat in ranks}
    return with_backend(made, kept)


def held(
    cluster: Cluster,
    rate: Rate | float,
    *,
    size: int = LARGE,
    cpu: Mapping[str, Any] = IDLE,
    slowing: Mapping[str, str] | None = None,
) -> tuple[Cluster, list[Round]]:
    """After all rounds; bus bandwidth of (round, group) in GB/s, for groups within one host."""

    def facts(round_: Round, group: tuple[int, ...], seat: int) -> dict[str, Any]:
        busbw = rate(round_, group) if callable(rate) else rate
        factor = 2 * (len(group) - 1) / len(group)
        compute = {"what": "a product", "seconds": 0.01, "cpu": dict(IDLE)}
        timed = all_reduce(size, factor * size / busbw / GB, cpu) if len(group) > 1 else {}
        return {**timed, "compute": compute, "slowing": dict(slowing or {})}

    return hold(CHECK, cluster, facts)


def judged(cluster: Cluster, rate: Rate | float, **how: Any) -> list[Finding]:
    return list(CHECK.judge(held(cluster, rate, **how)[0]))


def low(found: list[Finding]) -> list[Finding]:
    return [each for each in found if each.code == "bandwidth-below-floor"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_hosts_that_are_all_equally_slow_are_named_together(count: int) -> None:
    (found,) = judged(hosts(*[H100] * count), 40.0)
    assert found.code == "bandwidth-below-floor"
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.where.hosts == tuple(f"nd{node}" for node in range(count))
    assert (found.where.ranks, found.where.links) == ((), ())
    assert found.message == (
        "all-reduce of 128 MiB inside a host: at most 40 GB/s bus bandwidth, measured twice; 8 "
        "NVIDIA H100 80GB HBM3 with their NVLinks give at least 170 GB/s"
    )
    assert "issues 212" in found.evidence["source"]


@pytest.mark.parametrize(("model", "rate"), [(H100, 338.0), (H200, 412.0), (A100, 174.0)])
def test_what_healthy_hosts_were_seen_to_reach_is_above(model: str, rate: float) -> None:
    links = {"nvlinks": [1] * 12} if model == A100 else {}
    assert judged(hosts(*[model] * 3, **links), rate) == []
    # As a virtual machine without NVLink SHARP, or calls that wait for each other.
    assert judged(hosts(*[model] * 3, **links), 0.6 * rate) == []


def test_every_row_says_where_its_numbers_are_from() -> None:
    for row in read_table("nccl_doctor.checks.group_speed", "floors.toml")["gpu"]:
        assert row["source"]
        assert row["seen"].year >= 2026
        assert 60 < row["least_gbps"] <= row["usual_gbps"] / 1.9


@pytest.mark.parametrize("model", [PCIE, L40S, "NVIDIA H100 NVL", f"{H100} MIG 1g.10gb", "AMD MI"])
def test_models_whose_boards_differ_have_no_floor(model: str) -> None:
    assert judged(hosts(model, model, nvlinks=[]), 12.0) == []
    assert judged(hosts(model, model), 12.0) == []


@pytest.mark.parametrize(
    "of",
    [
        {"nvlinks": []},
        {"nvlinks": None},
        {"nvlinks": [0] * 18},
        {"mig": [1, 1]},
        {"virtualization": 2},
        {"virtualization": None},
        {"lost": True},
    ],
    ids=["no NVLinks", "not told", "all down", "MIG", "vGPU", "virtual or not", "lost"],
)
def test_gpus_that_are_not_whole_or_have_no_nvlink_have_none(of: dict[str, Any]) -> None:
    assert judged(hosts(H100, H100, **of), 12.0) == []


def test_gpus_passed_through_to_a_virtual_machine_have_their_nvlinks() -> None:
    assert low(judged(hosts(H100, virtualization=1), 12.0))


def test_with_fewer_nvlinks_the_floor_is_lower() -> None:
    half = hosts(H100, H100, nvlinks=[1] * 9 + [0] * 9)
    assert judged(half, 90.0) == []
    (found,) = judged(half, 80.0)
    assert "give at least 85 GB/s" in found.message


def test_mixed_models_in_a_host_have_no_floor_and_hosts_each_their_own() -> None:
    mixed = hosts(H100)
    devices = [by_torch(0, at, H100 if at % 2 else A100) for at in range(8)]
    for rank in mixed.ranks:
        seen = rank.facts["backend_device"]["alone"].facts
        mixed = with_backend(mixed, {rank.seat: {**seen, "devices": devices}})
    assert judged(mixed, 12.0) == []
    found = low(judged(hosts(H100, PCIE), 12.0))
    assert [each.where.hosts for each in found] == [("nd0",)]


def test_without_the_driver_s_word_there_is_no_floor() -> None:
    made = hosts(H100, H100)
    blind = replace(made, hosts=tuple(replace(host, facts={}) for host in made.hosts))
    for rank in made.ranks:
        blind = change_rank(blind, rank.seat, host=blind.hosts[rank.host.id])
    assert judged(blind, 12.0) == []
    no_uuid = hosts(H100, H100)
    for rank in no_uuid.ranks:
        seen = dict(rank.facts["backend_device"]["alone"].facts)
        seen["devices"] = [{**each, "uuid": None} for each in seen["devices"]]
        no_uuid = with_backend(no_uuid, {rank.seat: seen})
    assert judged(no_uuid, 12.0) == []


def test_ranks_that_share_a_gpu_have_no_floor() -> None:
    made = hosts(H100, H100)
    for rank in made.ranks:
        seen = dict(rank.facts["backend_device"]["alone"].facts)
        made = with_backend(made, {rank.seat: {**seen, "device": 0}})
    assert judged(made, 12.0) == []


@pytest.mark.parametrize(("model", "nproc"), [(H100, 2), (A100, 4)])
def test_fewer_gpus_may_not_use_all_nvlinks(model: str, nproc: int) -> None:
    assert judged(hosts(model, model, nproc=nproc), 12.0) == []


def test_small_messages_say_nothing() -> None:
    assert judged(hosts(H100, H100), 12.0, size=4 << 20) == []


def test_what_was_slow_once_is_not_below() -> None:
    def rate(round_: Round, group: tuple[int, ...]) -> float:
        return 300.0 if round_.name.startswith("again") else 40.0

    made, rounds = held(hosts(H100, H100), rate)
    assert list(CHECK.judge(made)) == []
    (again,) = [r for r in rounds if r.name.startswith("again")]
    assert (again.name, again.groups) == ("again-low", (tuple(range(8)), tuple(range(8, 16))))


def test_without_a_second_try_nobody_is_below() -> None:
    made, _ = held(hosts(H100, H100), 12.0)
    ranks = []
    for rank in made.ranks:
        rounds = {k: v for k, v in rank.facts["group_speed"].items() if k != "again-low"}
        ranks.append(replace(rank, facts={**rank.facts, "group_speed": rounds}))
    assert low(list(CHECK.judge(made)))
    assert list(CHECK.judge(replace(made, ranks=tuple(ranks)))) == []


def test_a_busy_machine_is_not_below() -> None:
    assert judged(hosts(H100, H100), 12.0, cpu=BUSY) == []


def test_a_setting_that_slows_down_is_named_and_makes_it_information() -> None:
    (found,) = judged(hosts(H100, H100), 12.0, slowing={"NCCL_MAX_CTAS": "4"})
    assert (found.level, found.confidence) == (Severity.INFO, Confidence.POSSIBLE)
    assert found.message.endswith("; NCCL_MAX_CTAS=4 is set")


def test_an_outlier_is_named_once() -> None:
    def rate(_: Round, group: tuple[int, ...]) -> float:
        return 12.0 if set(group) == set(range(8, 16)) else 338.0

    (found,) = judged(hosts(*[H100] * 4), rate)
    assert (found.code, found.where.hosts) == ("bandwidth-low", ("nd1",))


def test_the_bandwidth_inside_a_host_is_a_figure() -> None:
    shown: list[Figure] = list(CHECK.figures(held(hosts(H100, H100), 338.0)[0]))
    inside = [each for each in shown if "inside a host" in each.name]
    assert [each.value for each in inside] == [pytest.approx(338.0, rel=1e-3)] * 2
