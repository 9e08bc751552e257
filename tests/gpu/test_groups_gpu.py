"""Groups with NCCL on one GPU: whole runs of the tool, healthy, and with one rank that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.broken import broken
from tests.gpu.one_gpu import examine

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl_gpu")]

FLIGHT_SINCE, RAS_SINCE = (2, 3), (2, 24)
"""torch whose NCCL groups have a flight recorder, and NCCL that answers by RAS."""


@pytest.mark.parametrize("check", ["collectives", "exchanges", "groups", "group_speed"])
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


def test_groups_of_gloo_beside_nccl_work(tmp_path: Path) -> None:
    report = examine(tmp_path, 0, "--select", "groups", "--groups", "many")
    for rank in report["ranks"]:
        seen = rank["facts"]["groups"]["beside-gloo"]["facts"]
        assert seen["made"]["world"]["backend_class"] == "ProcessGroupGloo"
        assert seen["wrong"] == []


def test_every_dimension_of_a_mesh_works(tmp_path: Path) -> None:
    report = examine(tmp_path, 0, "--select", "device_mesh", "--mesh", "dp=2,tp=2")
    assert {check["status"] for check in report["checks"]} == {"pass"}


def test_a_wrong_result_names_the_rank_that_sees_it(tmp_path: Path) -> None:
    report = examine(tmp_path, 1, "--select", "collectives", rank2=broken("wrong_result"))
    (root,) = report["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("collective-wrong-result", [2])


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of ranks of which one stops in a collective."""
    folder = tmp_path_factory.mktemp("frozen")
    return examine(folder, 1, "--select", "collectives", rank1=broken("freezes_in_all_reduce"))


def evidence_of(report: dict[str, Any]) -> dict[str, Any]:
    (root,) = report["root_causes"]
    found: dict[str, Any] = root["evidence"]
    return found


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])


def test_a_rank_that_freezes_is_named_and_no_other(frozen: dict[str, Any]) -> None:
    (root,) = frozen["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("rank-frozen", [1])


def test_ranks_that_wait_say_what_their_flight_recorders_hold(
    frozen: dict[str, Any], machine: dict[str, Any]
) -> None:
    if numbers(machine["torch"]) < FLIGHT_SINCE:
        pytest.skip(f"torch {machine['torch']} has no flight recorder")
    assert evidence_of(frozen).get("recorder")


def test_ranks_that_wait_say_what_ras_says(frozen: dict[str, Any], machine: dict[str, Any]) -> None:
    if numbers(machine["nccl"]) < RAS_SINCE:
        pytest.skip(f"NCCL {machine['nccl']} has no RAS")
    assert evidence_of(frozen).get("ras")
