"""Real gloo ranks, one of them with a broken torch: code, place, and nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.broken import broken
from tests.ranks.ranks import Ranks

ATTEMPT_S = 8
HANG_S = 3
TIMEOUT_S = 60


def examine(
    folder: Path, world: int, check: str, faults: dict[int, str], attempt_s: int = ATTEMPT_S
) -> dict[str, Any]:
    """The report of a job in which these ranks have these faults; it must fail, and in time."""
    ranks = Ranks(
        folder,
        world,
        ["--select", check, "--collective-timeout", str(attempt_s), f"--timeout={TIMEOUT_S}"],
        changes={rank: broken(fault) for rank, fault in faults.items()},
    )
    ended = ranks.wait(TIMEOUT_S + 5)
    assert {each.code for each in ended.values()} == ({1} if faults else {0}), ended
    return ranks.report()


def blamed(report: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Code and ranks of everything that is found, causes or not."""
    return [(found["code"], found["where"]["ranks"]) for found in report["findings"]]


def test_a_wrong_result_names_the_rank_that_sees_it(tmp_path: Path) -> None:
    report = examine(tmp_path, 3, "collectives", {1: "wrong_result"})
    assert blamed(report) == [("collective-wrong-result", [1])]


def test_healthy_ranks_pass_in_one_round_of_every_use(tmp_path: Path) -> None:
    report = examine(tmp_path, 4, "groups", {})
    (check,) = [c for c in report["checks"] if c["name"] == "groups"]
    assert (check["status"], report["findings"]) == ("pass", [])
    for rank in report["ranks"]:
        facts = {name: o["facts"] for name, o in rank["facts"]["groups"].items()}
        assert set(facts) == {"every-use"}
        mine = "odds" if rank["rank"] % 2 else "evens"
        for name, seen in facts.items():
            assert set(seen["made"]) == {name, "world", mine}
            assert seen["made"][mine]["backend_class"] == "ProcessGroupGloo"
            assert seen["made"][name]["bound_device_id"] is None


@pytest.mark.parametrize(
    ("fault", "rank", "code"),
    [
        ("freezes_in_the_second_group", 2, "rank-frozen"),
        pytest.param("swaps_new_groups", 0, "group-init-hang", marks=pytest.mark.wide),
        ("swaps_new_groups", 1, "group-init-hang"),
        pytest.param("skips_a_new_group", 2, "group-init-hang", marks=pytest.mark.wide),
        ("skips_a_new_group", 3, "group-init-hang"),
        ("reduces_another_size", 1, "collective-failed"),
        ("wrong_result", 3, "collective-wrong-result"),
    ],
)
def test_the_culprit_is_named_and_nobody_else(
    tmp_path: Path, fault: str, rank: int, code: str
) -> None:
    hangs = code in ("rank-frozen", "group-init-hang")
    report = examine(tmp_path, 4, "groups", {rank: fault}, HANG_S if hangs else ATTEMPT_S)
    assert blamed(report) == [(code, [rank])]
