"""Real gloo ranks, the last of them in the role of an inference engine beside the trainers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.broken import broken
from tests.ranks.ranks import Ended, Ranks

COLLECTIVE_S = 8.0
START_S = 20.0
SETTLE_S = 5.0
OPTIONS = ("--select", "side_group", "--collective-timeout", f"{COLLECTIVE_S:g}")
WEIGHT_SYNC = (*OPTIONS, "--groups", "weight-sync")


def side_group(report: Mapping[str, Any]) -> Mapping[str, Any]:
    (check,) = [check for check in report["checks"] if check["name"] == "side_group"]
    return dict(check)


def in_time(ended: Mapping[int, Ended], rounds: int, code: int) -> None:
    """Everybody left with the code, after so many rounds of which each met its deadline."""
    assert {each.code for each in ended.values()} == {code}, ended
    limit = START_S + rounds * (COLLECTIVE_S + SETTLE_S)
    assert max(each.seconds for each in ended.values()) < limit, ended


def found_codes(report: Mapping[str, Any]) -> set[str]:
    """Codes of what checks found, whatever else is installed here."""
    return {found["code"] for found in report["findings"] if found["check"]}


def facts(report: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    (mine,) = [each for each in report["ranks"] if each["rank"] == rank]
    return dict(mine["facts"]["side_group"]["unbound"]["facts"])


@pytest.mark.parametrize("world", [2, 3])
def test_trainers_and_an_engine_that_are_healthy_pass(tmp_path: Path, world: int) -> None:
    ranks = Ranks(tmp_path, world, WEIGHT_SYNC)
    in_time(ranks.wait(60), 1, 0)
    report = ranks.report()
    assert found_codes(report) == set()
    assert side_group(report)["status"] == "pass"
    assert sorted(side_group(report)["hosts_or_ranks_tested"]) == ["0", "1", "2"][:world]
    roles = [facts(report, rank)["role"] for rank in range(world)]
    assert roles == ["trainer"] * (world - 1) + ["engine"]
    first, engine = facts(report, 0), facts(report, world - 1)
    assert first["store"] == engine["store"]
    assert first["store"].startswith("127.0.0.1:")  # what MASTER_ADDR leads to
    assert not first["store"].endswith(f":{ranks.port}")  # a store of its own
    assert first["bound_device_id"] is None
    assert "Gloo" in first["backend_class"]
    assert "Gloo" in engine["side_class"]
    for rank in range(world):
        assert facts(report, rank)["wrong"] == []


def test_a_job_without_a_side_group_is_not_examined_for_one(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, ["--select", "side_group,torch_import"])
    in_time(ranks.wait(60), 1, 0)
    check = side_group(ranks.report())
    assert check["status"] == "skipped"
    assert "--groups weight-sync" in check["reason"]


def test_an_engine_with_another_world_size_hangs_the_side_group_alone(tmp_path: Path) -> None:
    changes = {2: broken("one_member_too_many")}
    ranks = Ranks(tmp_path, 3, WEIGHT_SYNC, changes=changes)
    in_time(ranks.wait(90), 2, 1)
    (root,) = ranks.report()["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("group-init-hang", [0, 2]), root
    assert "side (unbound)" in root["message"]
    assert found_codes(ranks.report()) == {"group-init-hang"}


def test_an_engine_that_freezes_in_the_side_group_is_named_alone(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, WEIGHT_SYNC, changes={2: broken("freezes_in_all_reduce")})
    in_time(ranks.wait(60), 1, 1)
    (root,) = ranks.report()["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("rank-frozen", [2])
    assert found_codes(ranks.report()) == {"rank-frozen"}


def test_a_trainer_that_gets_wrong_sums_is_named_and_not_the_engine(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 4, WEIGHT_SYNC, changes={1: broken("wrong_result")})
    in_time(ranks.wait(60), 1, 1)
    (root,) = ranks.report()["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("collective-wrong-result", [1])


@pytest.mark.skipif(
    Version(metadata.version("torch")) < Version("2.8"),
    reason="the store without libuv leaves its port open when it ends",
)
def test_a_store_that_the_engine_cannot_reach_is_named_with_its_address(tmp_path: Path) -> None:
    """The engine is told of a port at which nobody listens."""
    ranks = Ranks(tmp_path, 3, WEIGHT_SYNC, changes={0: broken("store_ends_at_once")})
    in_time(ranks.wait(60), 1, 1)
    (root,) = ranks.report()["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("group-init-failed", [2])
    assert "127.0.0.1:" in root["message"]
    assert "refused" in root["message"]
