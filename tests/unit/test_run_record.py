"""`run` of a report: read leniently, written whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.codec import Node
from nccl_doctor.model.report import RunRecord
from nccl_doctor.report.formats import json as json_format
from nccl_doctor.report.text import render
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, read_with
from tests.support.rows import each_row

CLUSTER = make_cluster()
REPORT = conclude(CLUSTER, [], run=RUN)
FULL = replace(
    RUN,
    options={"strict": True, "of a newer version": 1},
    baseline={"text": "2 earlier runs"},
    redacted_with="abc",
    alone=True,
    extra={"hostfile": "hosts", "merged": [{"id": None}]},
)


def read(data: Any) -> RunRecord:
    return RunRecord.from_json(Node("report.run", data), CLUSTER)


@pytest.mark.parametrize("record", [RUN, FULL, RunRecord()])
def test_a_record_comes_back_exactly(record: RunRecord) -> None:
    assert read(record.to_json(CLUSTER)) == record


def test_the_keys_keep_their_order() -> None:
    assert list(replace(RUN, baseline={}).to_json(CLUSTER)) == [
        *("id", "started", "duration_s", "launcher", "command", "options", "baseline"),
        *("world_size", "nnodes", "backend", "level", "join_timeout_s", "collective_timeout_s"),
        *("complete", "expected", "job", "alone"),
    ]


@each_row(
    ("key", "value", "good"),
    [
        ("id", 17, "a"),
        ("id", None, "a"),
        ("started", ["now"], "2026-11-21"),
        ("duration_s", "long", 1),
        ("duration_s", True, 1.5),
        ("launcher", {}, "srun"),
        ("command", ["nccl-doctor"], "nccl-doctor run"),
        ("baseline", "past", {}),
        ("redacted_with", [], "abc"),
    ],
)
def test_a_value_of_another_type_is_not_known_but_written_again(
    key: str, value: Any, good: Any
) -> None:
    report = read_with(REPORT, **{key: value})
    assert getattr(report.run, key) is None
    assert report.to_json()["run"] == {**REPORT.to_json()["run"], key: value}
    assert render(report)
    assert json_format.render(report)
    assert replace(report.run, **{key: good}).to_json(CLUSTER)[key] == good


@pytest.mark.parametrize("alone", [1, "true", None])
def test_alone_is_true_or_it_is_not(alone: object) -> None:
    assert read_with(REPORT, alone=alone).run.alone is False


def test_a_record_without_keys_says_nothing() -> None:
    assert read({}) == RunRecord()
    assert set(RunRecord().to_json(CLUSTER)) & set(RUN.to_json(CLUSTER)) >= {"options", "alone"}
    assert "id" not in RunRecord().to_json(CLUSTER)


@pytest.mark.parametrize("options", [None, [], "--strict", 1])
def test_odd_options_are_refused(options: object) -> None:
    with pytest.raises(ValueError, match=r"^report\.run\.options is .*, not an object$"):
        read_with(REPORT, options=options)


def test_keys_of_another_version_are_written_again() -> None:
    newer = {"options": {"new": [1]}, "baseline": {"text": "t", "new": 2}, "new": {"deep": 3}}
    assert read_with(REPORT, **newer).to_json()["run"] == {**REPORT.to_json()["run"], **newer}
