"""The facts of a host for people: short, whole where it matters, and harmless."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.model.report import Report
from nccl_doctor.report import facts
from tests.support.clusters import change_rank, make_cluster, outcome
from tests.support.reports import RUN, made_check, through_json

HOSTILE = "a\033[2J\033]0;x\007\n\rb\u202ec\u2028d\x9b31me\x7f\ud800"
SOURCES = {"world_size": "WORLD_SIZE", "rank": "RANK", "nnodes": "derived from WORLD_SIZE"}


def made(
    found: Any, *, hosts=("nd0",), nproc=1, more: dict[str, Any] | None = None, **changes: Any
) -> Report:
    cluster = make_cluster(hosts, nproc, check="gpus", by_rank={0: found})
    ranks = cluster.ranks[0].facts | {k: {"alone": outcome(v)} for k, v in (more or {}).items()}
    cluster = change_rank(cluster, 0, facts=ranks, **changes)
    return conclude(cluster, [made_check("gpus")], run=replace(RUN, alone=True))


def report_of(found: Any, **more: Any) -> Report:
    return through_json(made(found, **more))


def lines(report, **how) -> list[str]:
    return facts.render(report, **how).splitlines()


def test_the_whole_block():
    found = {
        "torch": "2.13.0",
        "driver": None,
        "built": True,
        "host": {"proc": 8, "kfd": 0, "driver": None},
        "chosen": {"gloo": {"picks": [["eth0", "10.0.0.1"]], "reason": "name"}, "nccl": {}},
        "devices": [{"index": 0, "name": "H200", "uuid": "GPU-1", "broken": False, "ok": True}],
        "seconds": 0.1 + 0.2,
    }
    report = report_of(
        found, launch={"sources": SOURCES}, env={"NCCL_DEBUG": "INFO", "MASTER_PORT": "29500"}
    )
    assert lines(report) == [
        "host nd0",
        "  addresses    192.168.77.1",
        "launch",
        "  launcher     torchrun",
        "  rank         0  (RANK)",
        "  world_size   1  (WORLD_SIZE)",
        "  nnodes       1  (derived from WORLD_SIZE)",
        "environment",
        "  MASTER_PORT  29500",
        "  NCCL_DEBUG   INFO",
        "gpus",
        "  built        yes",
        "  chosen.gloo  picks eth0 10.0.0.1; reason name",
        "  devices.0    name H200; index 0; ok; uuid GPU-1",
        "  host         kfd 0; proc 8",
        "  seconds      0.3",
        "  torch        2.13.0",
        "  (none)       chosen.nccl, driver",
    ]


def test_what_only_repeats_the_launch_record_is_left_out():
    out = lines(report_of({"rank": 0, "world_size": 7}))
    assert "  world_size  7" in out
    assert not any(line.startswith("  rank") for line in out)


def test_what_could_not_be_observed_says_why():
    hung = Outcome(OutcomeStatus.HUNG, reason="no answer in 10 s")
    out = lines(report_of(hung, more={"zeta": {"x": 1}, "alpha": {"x": 1}}))
    assert "  hung       no answer in 10 s" in out
    # The report's checks in their order, then what no check asked for.
    assert [line for line in out if line in ("gpus", "alpha", "zeta")] == ["gpus", "alpha", "zeta"]


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_long_values_are_cut_and_it_is_said(width):
    out = lines(report_of({"path": "/x" * 300, "k" * 70: 1}), width=width)
    assert all(len(line) <= max(width, 40) for line in out[:-1])
    assert any(line.endswith("…") for line in out)
    assert out[-1].startswith("Longer values are cut")
    assert not any("Longer" in line for line in lines(report_of({"x": 1})))


def test_many_are_counted():
    devices = [{"index": i} for i in range(20)]
    out = lines(report_of({"devices": devices, "ports": list(range(20))}, hosts=("a",), nproc=12))
    assert "  devices    and 12 more" in out
    assert "  ports      0, 1, 2, 3, 4, 5, 6, 7 and 12 more" in out
    assert "and 4 more ranks on a" in out
    assert "launch of rank 7" in out
    hosts = tuple(f"n{i}" for i in range(10))
    assert "and 2 more hosts" in lines(report_of({"x": 1}, hosts=hosts))


def test_deep_data_ends():
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"d": [deep]}
    assert "…" in facts.render(report_of({"deep": deep}))


def test_nothing_from_outside_reaches_the_terminal():
    report = report_of(
        {HOSTILE: HOSTILE, "list": [HOSTILE], "table": {HOSTILE: {HOSTILE: HOSTILE}}},
        more={HOSTILE: {"x": HOSTILE}},
        env={"NCCL_" + HOSTILE: HOSTILE},
        launch={"launcher": HOSTILE, "sources": {"rank": HOSTILE}},
    )
    for ascii_ in (False, True):
        out = facts.render(report, ascii=ascii_, width=300)
        out.encode("ascii" if ascii_ else "utf-8")
        assert all(line.isprintable() for line in out.splitlines())
    assert "\\x1b[2J" in out


def test_it_reads_the_same_from_a_file():
    report = made({"b": 1, "a": {"d": 2, "c": (1, 2)}}, launch={"sources": SOURCES})
    assert facts.render(through_json(report)) == facts.render(report)
