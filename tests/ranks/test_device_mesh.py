"""A device mesh on real gloo ranks: its groups, one of which hangs, and sizes that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.broken import broken
from tests.ranks.ranks import Ranks

COLLECTIVE_S = 6
OPTIONS = ("--select", "device_mesh", "--collective-timeout", str(COLLECTIVE_S))
SETTLE_S = 5.0
"""What the tool allows beyond a deadline, to examine a stuck child."""
WALL_S = 60.0
"""With the start of four ranks, which on a small, busy machine takes longer than all the rest."""


def report_of(folder: Path, mesh: str, code: int, **ranks: Any) -> dict[str, Any]:
    """The report of four ranks, all of which leave with this code, two rounds later at most."""
    job = Ranks(folder, 4, [*OPTIONS, "--mesh", mesh], **ranks)
    ended = job.wait(WALL_S)
    assert {each.code for each in ended.values()} == {code}, ended
    report = job.report()
    (check,) = report["checks"]
    assert check["duration_s"] < 2 * (COLLECTIVE_S + SETTLE_S), check
    return report


def rounds_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [rank["facts"]["device_mesh"] for rank in report["ranks"]]


def test_every_group_of_a_healthy_mesh_works_alone_and_at_once(tmp_path: Path) -> None:
    report = report_of(tmp_path, "dp=2,tp=2", 0)
    assert report["findings"] == []
    (check,) = report["checks"]
    assert check["status"] == "pass"
    assert sorted(check["hosts_or_ranks_tested"]) == ["0", "1", "2", "3"]
    for rounds in rounds_of(report):
        assert set(rounds) == {"mesh", "at-once"}
        assert {outcome["status"] for outcome in rounds.values()} == {"ok"}
    facts = rounds_of(report)[3]["mesh"]["facts"]
    assert facts["built_by"] == "init_device_mesh"
    assert facts["groups"] == {"dp": "ranks 1, 3", "tp": "ranks 2–3"}
    assert "all_reduce (async)" in rounds_of(report)[3]["at-once"]["facts"]["steps"]


def test_a_torch_without_meshes_gets_the_same_groups_by_hand(tmp_path: Path) -> None:
    changes = dict.fromkeys(range(4), broken("no_device_mesh"))
    report = report_of(tmp_path, "dp=2,sp=1,tp=2", 0, changes=changes)
    facts = rounds_of(report)[3]["mesh"]["facts"]
    assert facts["built_by"] == "new_group"
    assert facts["groups"] == {"dp": "ranks 1, 3", "sp": "rank 3", "tp": "ranks 2–3"}


def test_a_rank_that_freezes_in_one_dimension_only_is_named(tmp_path: Path) -> None:
    changes = {1: broken("stops_among_neighbours")}
    report = report_of(tmp_path, "dp=2,tp=2", 1, changes=changes)
    (root,) = report["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("rank-frozen", [1])
    assert "group tp[0] (ranks 0–1)" in root["message"]
    assert report["findings"] == [root]


def test_a_group_that_hangs_for_no_visible_reason_is_named_and_no_other(tmp_path: Path) -> None:
    changes = {2: broken("waits_among_neighbours")}
    report = report_of(tmp_path, "dp=2,tp=2", 1, changes=changes)
    (root,) = report["root_causes"]
    assert report["findings"] == [root], rounds_of(report)
    assert root["code"] in ("collective-hang", "rank-frozen")
    assert set(root["where"]["ranks"]) <= {2, 3}
    assert 2 in root["where"]["ranks"]
    assert "group tp[1] (ranks 2–3)" in root["message"]


def test_sizes_that_do_not_multiply_to_the_ranks_and_the_nearest_that_do(tmp_path: Path) -> None:
    report = report_of(tmp_path, "dp=3,tp=2", 1)
    (root,) = report["root_causes"]
    assert root["code"] == "mesh-does-not-divide"
    assert root["evidence"]["nearest"][0] == "dp=2,tp=2"
    assert (root["where"]["hosts"], root["where"]["ranks"]) == ([], [])
    assert all("device_mesh" not in rank["facts"] for rank in report["ranks"])


def test_a_mesh_smaller_than_the_job_works_and_is_a_warning(tmp_path: Path) -> None:
    report = report_of(tmp_path, "dp=1,tp=3", 0)
    (found,) = report["findings"]
    assert (found["code"], found["severity"]) == ("mesh-does-not-divide", "warn")
    groups = [rank["facts"]["device_mesh"]["mesh"]["facts"]["groups"] for rank in report["ranks"]]
    assert [group.get("tp") for group in groups] == ["ranks 0–2"] * 3 + [None]


def test_a_mesh_that_does_not_fit_stops_no_other_check(tmp_path: Path) -> None:
    job = Ranks(tmp_path, 2, ["--select", "device_mesh,collectives", "--mesh", "dp=3"])
    assert {each.code for each in job.wait(WALL_S).values()} == {1}
    statuses = {check["name"]: check["status"] for check in job.report()["checks"]}
    assert statuses == {"device_mesh": "fail", "collectives": "pass"}
