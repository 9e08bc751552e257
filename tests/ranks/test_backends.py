"""Real ranks that were told different backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.ranks.ranks import Ranks

TIMEOUT_S = 60


def examine(folder: Path, told: dict[int, str], *options: str, code: int) -> dict[str, Any]:
    """The report of three ranks, of which these have a --backend; in time, and with this code."""
    extra = {rank: ("--backend", backend) for rank, backend in told.items()}
    ranks = Ranks(folder, 3, options, extra=extra)
    ended = ranks.wait(TIMEOUT_S)
    assert {each.code for each in ended.values()} == {code}, ended
    return ranks.report()


def test_the_odd_one_is_named_and_the_others_backend_is_examined(tmp_path: Path) -> None:
    told = {0: "gloo", 1: "gloo", 2: "nccl"}
    report = examine(tmp_path, told, "--select", "launch_record,collectives", code=1)
    (found,) = report["findings"]
    assert (found["code"], found["where"]["ranks"]) == ("backend-option-differs", [2])
    assert found["message"] == "--backend=nccl, elsewhere --backend=gloo; gloo was examined"
    states = {check["name"]: check["status"] for check in report["checks"]}
    assert states == {"launch_record": "fail", "collectives": "pass"}
    assert report["run"]["duration_s"] < 20


def test_rank_0_does_not_choose_for_all(tmp_path: Path) -> None:
    told = {1: "nccl", 2: "nccl"}  # rank 0 sees no GPU here, and would take gloo
    report = examine(tmp_path, told, "--select", "launch_record", code=0)
    assert report["findings"] == []
    assert report["run"]["backend"] == "nccl"
    assert [rank["backend"] for rank in report["ranks"]] == ["auto", "nccl", "nccl"]
