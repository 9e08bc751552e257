"""Groups with NCCL on one GPU: whole runs of the tool, healthy, and with one rank that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.broken import broken
from tests.gpu.one_gpu import one_gpu
from tests.ranks.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl_gpu")]

WORLD = 4
COLLECTIVE_S = 40.0
WALL_S = 420.0


def examine(folder: Path, code: int, *options: str, **broken_ranks: Any) -> dict[str, Any]:
    """The report of ranks that all leave with this code; `rank1={…}` changes one of them."""
    changes = one_gpu(WORLD)
    for name, more in broken_ranks.items():
        changes[int(name.removeprefix("rank"))].update(more)
    times = ("--collective-timeout", f"{COLLECTIVE_S:g}", "--timeout", "400")
    ranks = Ranks(folder, WORLD, ["--backend", "nccl", *times, *options], changes=changes)
    ended = ranks.wait(WALL_S)
    assert {each.code for each in ended.values()} == {code}, ended
    return ranks.report()


@pytest.mark.parametrize("check", ["collectives", "groups", "group_speed"])
def test_healthy_ranks_pass(tmp_path: Path, check: str) -> None:
    report = examine(tmp_path, 0, "--select", check)
    assert [f["code"] for f in report["findings"] if f["severity"] != "info"] == []
    (only,) = report["checks"]
    assert only["status"] == "pass"


def test_a_bound_default_group_is_tried_too_and_says_so(tmp_path: Path) -> None:
    report = examine(tmp_path, 0, "--select", "groups")
    for rank in report["ranks"]:
        rounds = rank["facts"]["groups"]
        assert {"in-order", "in-turn", "at-once", "in-order-bound"} <= set(rounds)
        assert "cuda:0" in str(rounds["in-order-bound"]["facts"]["made"])


def test_every_dimension_of_a_mesh_works(tmp_path: Path) -> None:
    report = examine(tmp_path, 0, "--select", "device_mesh", "--mesh", "dp=2,tp=2")
    assert {check["status"] for check in report["checks"]} == {"pass"}


def test_a_wrong_result_names_the_rank_that_sees_it(tmp_path: Path) -> None:
    report = examine(tmp_path, 1, "--select", "collectives", rank2=broken("wrong_result"))
    (root,) = report["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("collective-wrong-result", [2])


def test_a_rank_that_freezes_is_named_and_ras_is_asked(tmp_path: Path) -> None:
    report = examine(tmp_path, 1, "--select", "collectives", rank1=broken("freezes_in_all_reduce"))
    (root,) = report["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("rank-frozen", [1])
    assert "flight" in str(root["evidence"]).lower() or "ras" in str(root["evidence"]).lower()
