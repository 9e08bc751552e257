"""NVLink SHARP alone inside hosts, on made-up clusters: who tries it, who is slow, who cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Level, Outcome, OutcomeStatus, Severity
from nccl_doctor.model.findings import Finding, Round
from tests.support.checks import CHECKS
from tests.support.gpu_facts import H100
from tests.support.gpu_facts import gpu as by_torch
from tests.support.gpu_states import cluster_of, gpu, in_fabric, state, torch_sees, with_backend
from tests.support.rows import each_row
from tests.support.timed_rounds import BUSY, IDLE, all_reduce, hold

CHECK = CHECKS["group_speed"]
B200 = "NVIDIA B200"
LARGE = 128 << 20
NONE = (
    "no algorithm/protocol available for function AllReduce. NCCL_ALGO was set to allreduce:nvls."
)
Nvls = Callable[[Round, int], Any]
"""(round, host) → GB/s of bus bandwidth, the error that NCCL raises, or how all its ranks end."""
HUNG = Outcome(
    OutcomeStatus.HUNG,
    breadcrumbs=({"step": "init_process_group"}, {"step": "all_reduce (timed)", "sequence": 1}),
    state="S",
    duration_s=90.0,
)


def hosts(
    *models: str,
    nproc: int = 8,
    nccl: str = "2.28.9",
    seen: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    **of: Any,
) -> Cluster:
    """Hosts of eight GPUs; `of` changes what NVML says of every GPU, `seen` what the rank sees."""
    states = [
        state(node, [gpu(node, at, name=model, **of) for at in range(8)])
        for node, model in enumerate(models)
    ]
    made = cluster_of(*states, nproc=nproc, **{"level": Level.FULL, **(cluster or {})})
    ranks = torch_sees(len(models), nccl=nccl)
    for seat, facts in ranks.items():
        node = seat // 8
        facts["devices"] = [{**by_torch(node, at, models[node]), **(seen or {})} for at in range(8)]
    here = {r.seat: ranks[8 * (r.seat // nproc) + r.seat % nproc] for r in made.present}
    return with_backend(made, here)


def held(
    cluster: Cluster,
    nvls: Nvls | float = 412.0,
    *,
    off: Any = None,
    each_host: Callable[[int], float] = lambda host: 338.0,
    cpu: dict[str, Any] = IDLE,
) -> tuple[Cluster, list[Round]]:
    """After all rounds."""

    def facts(round_: Round, group: tuple[int, ...], seat: int) -> Any:
        host = next(rank.host.id for rank in cluster.ranks if rank.seat == group[0])
        said: Any = each_host(host) if round_.name.endswith(("each-host", "hosts")) else 338.0
        if "nvls" in round_.name:
            said = nvls(round_, host) if callable(nvls) else nvls
        own = {"slowing": {}, "nvls_off": {} if off is None else off}
        if isinstance(said, Outcome):
            return said
        if isinstance(said, str):
            return {**own, "failed": said}
        factor = 2 * (len(group) - 1) / len(group)
        timed = all_reduce(LARGE, factor * LARGE / said / 1e9, cpu) if len(group) > 1 else {}
        return {**timed, **own, "compute": {"what": "a product", "seconds": 0.01, "cpu": cpu}}

    return hold(CHECK, cluster, facts)


def judged(cluster: Cluster, nvls: Nvls | float, **how: Any) -> list[Finding]:
    return list(CHECK.judge(held(cluster, nvls, **how)[0]))


def rounds_of(cluster: Cluster, nvls: Nvls | float = 412.0, **how: Any) -> dict[str, Any]:
    return {each.name: each.groups for each in held(cluster, nvls, **how)[1] if "nvls" in each.name}


@pytest.mark.parametrize("count", [1, 3])
def test_each_host_is_timed_once_and_a_healthy_one_gives_a_figure_only(count: int) -> None:
    made, held_rounds = held(hosts(*[H100] * count))
    names = [each.name for each in held_rounds]
    assert names.count("nvls") == 1
    assert "again-nvls" not in names
    (nvls,) = [each for each in held_rounds if each.name == "nvls"]
    assert nvls.groups == tuple(tuple(range(8 * at, 8 * at + 8)) for at in range(count))
    assert list(CHECK.judge(made)) == []
    shown = [each for each in CHECK.figures(made) if "NVLink SHARP" in each.name]
    assert {each.name for each in shown} == {
        "all-reduce inside a host by NVLink SHARP alone, 8 ranks, 128 MiB"
    }
    assert [each.where.hosts for each in shown] == [(f"nd{at}",) for at in range(count)]
    assert [each.value for each in shown] == [pytest.approx(412.0, rel=1e-3)] * count


@each_row(
    "changes",
    [
        {"cluster": {"backend": "gloo"}},
        {"cluster": {"level": Level.STANDARD}},
        {"nccl": "2.23.4"},  # takes rings where it cannot use it, without a word
        {"nccl": None},
        {"nproc": 2},
        {"seen": {"capability": [8, 0]}},
        {"seen": {"multicast": False}},
        {"seen": {"uuid": None}},
        {"fabric": None},
        {"fabric": in_fabric(state="NOT_SUPPORTED")},
        {"fabric": in_fabric(state="IN_PROGRESS")},
        {"fabric": in_fabric(status=999)},
        {"nvlinks": []},
        {"nvlinks": [0] * 18},
        {"mig": [1, 1]},
        {"virtualization": 2},
    ],
)
def test_it_is_not_tried_where_it_may_not_be_there(changes: dict[str, Any]) -> None:
    assert rounds_of(hosts(H100, H100, **changes)) == {}


@each_row("off", [{"NCCL_NVLS_ENABLE": "0"}, {"NCCL_PROTO": "LL128"}, "a report without the fact"])
def test_it_is_not_tried_where_a_setting_is_against_it_or_nobody_said(off: Any) -> None:
    assert rounds_of(hosts(H100, H100), off=off) == {}


@each_row("seen", [{}, {"multicast": None}, {"multicast": True}])
def test_it_is_tried_where_the_driver_does_not_deny_it(seen: dict[str, Any]) -> None:
    assert list(rounds_of(hosts(H100, H100, seen=seen))) == ["nvls"]


def test_a_host_where_all_reduces_failed_does_not_try_it() -> None:
    made, _ = held(hosts(H100, H100))
    for rank in made.ranks[:8]:
        rounds = {**rank.facts["group_speed"], "each-host": replace(HUNG, group=0)}
        rounds = {name: each for name, each in rounds.items() if "nvls" not in name}
        facts = {**rank.facts, "group_speed": rounds}
        ranks = [replace(r, facts=facts) if r.seat == rank.seat else r for r in made.ranks]
        made = replace(made, ranks=tuple(ranks))
    (nvls,) = [each for each in CHECK.plan(made) if each.name == "nvls"]
    assert nvls.groups == (tuple(range(8, 16)),)


def test_a_host_that_is_slow_twice_is_named() -> None:
    made, rounds = held(hosts(*[H100] * 4), lambda _, host: 90.0 if host == 2 else 412.0)
    (found,) = CHECK.judge(made)
    assert (found.code, found.where.hosts) == ("bandwidth-low", ("nd2",))
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    assert found.message == (
        "by NVLink SHARP alone (NCCL_ALGO=allreduce:nvls) inside the host 90 GB/s bus bandwidth, "
        "inside others 412 GB/s"
    )
    assert "fabricmanager" in found.fix
    (again,) = [each for each in rounds if each.name == "again-nvls"]
    assert again.groups[0] == tuple(range(16, 24))
    assert len(again.groups) == 3  # beside two that were good


def test_what_was_slow_once_is_noise() -> None:
    def nvls(round_: Round, host: int) -> float:
        return 90.0 if host == 2 and round_.name == "nvls" else 412.0

    assert judged(hosts(*[H100] * 4), nvls) == []


def test_only_the_same_gpus_are_compared() -> None:
    mixed = hosts(H100, B200, B200, B200)
    assert judged(mixed, lambda _, host: 412.0 if host == 0 else 835.0) == []
    assert judged(mixed, lambda _, host: NONE if host == 0 else 835.0) == []


def test_a_busy_machine_is_told_and_not_blamed() -> None:
    (found,) = judged(
        hosts(*[H100] * 4), lambda _, host: 90.0 if host == 2 else 412.0, cpu=dict(BUSY)
    )
    assert (found.level, found.where.hosts) == (Severity.INFO, ("nd2",))


def test_a_host_that_is_slow_in_any_way_is_named_once() -> None:
    (found,) = judged(
        hosts(*[H100] * 4),
        lambda _, host: 30.0 if host == 2 else 412.0,
        each_host=lambda host: 30.0 if host == 2 else 338.0,
    )
    assert "NVLink SHARP" not in found.message
    assert found.where.hosts == ("nd2",)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("end", [NONE, HUNG], ids=["refused", "hung"])
def test_a_host_where_it_fails_while_it_works_inside_the_others(count: int, end: Any) -> None:
    (found,) = judged(hosts(*[H100] * count), lambda _, host: end if host == 1 else 412.0)
    assert (found.code, found.where.hosts) == ("bandwidth-low", ("nd1",))
    assert (found.where.ranks, found.where.links) == ((), ())
    assert (found.level, found.confidence) == (Severity.WARN, Confidence.LIKELY)
    how = NONE if end is NONE else "no progress in all_reduce (timed) within 90 s"
    assert found.message == (
        "by NVLink SHARP alone (NCCL_ALGO=allreduce:nvls) all-reduces inside the host fail, twice: "
        f"{how}; inside others they give 412 GB/s bus bandwidth"
    )
    assert found.evidence["tries"] == [how, how]
    assert found.kind.title.startswith("NVLink SHARP fails")
    assert "fabricmanager" in found.fix


@each_row("end", [NONE, HUNG])
def test_where_it_works_nowhere_nobody_is_blamed(end: Any) -> None:
    made, rounds = held(hosts(*[H100] * 3), lambda *_: end)
    assert list(CHECK.judge(made)) == []
    assert [each.name for each in rounds if "nvls" in each.name] == ["nvls"]
    assert [each.value for each in CHECK.figures(made) if "NVLink SHARP" in each.name] == []


def test_where_more_fail_than_work_nobody_is_blamed() -> None:
    assert judged(hosts(*[H100] * 3), lambda _, host: 412.0 if host == 1 else NONE) == []


@each_row(
    ("first", "again"),
    [
        ({1: NONE}, {}),
        ({1: HUNG}, {}),
        ({1: NONE}, {0: NONE, 1: NONE, 2: NONE}),  # nor did it work inside the others any more
        ({1: replace(HUNG, state="T")}, {1: replace(HUNG, state="T")}),  # somebody stopped it
        (
            {1: Outcome(OutcomeStatus.SILENT)},
            {1: Outcome(OutcomeStatus.UNTESTED, reason="no time left")},
        ),
    ],
)
def test_what_failed_once_or_for_another_reason_is_no_finding(
    first: dict[int, Any], again: dict[int, Any]
) -> None:
    def nvls(round_: Round, host: int) -> Any:
        return (first if round_.name == "nvls" else again).get(host, 412.0)

    assert judged(hosts(*[H100] * 3), nvls) == []


def test_an_own_view_blames_nobody() -> None:
    made, _ = held(hosts(*[H100] * 3), lambda _, host: NONE if host == 1 else 412.0)
    assert list(CHECK.judge(replace(made, complete=False))) == []
