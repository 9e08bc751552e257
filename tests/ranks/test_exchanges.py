"""Real gloo ranks that exchange data, one of them with a broken torch: code, place, nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.broken import broken
from tests.ranks.ranks import Ranks

WORLD = 3
ATTEMPT_S = 8
HANG_S = 3
TIMEOUT_S = 60
MARGIN_S = 30
"""Beyond the deadline of the one round, as for other checks: the start, and a stuck child."""


def examine(
    folder: Path, faults: dict[int, str], code: int, attempt_s: int = ATTEMPT_S
) -> dict[str, Any]:
    """The report of a job in which these ranks have these faults; a hang must end in time."""
    ranks = Ranks(
        folder,
        WORLD,
        ["--select", "exchanges", f"--collective-timeout={attempt_s}", f"--timeout={TIMEOUT_S}"],
        changes={rank: broken(fault) for rank, fault in faults.items()},
    )
    ended = ranks.wait(TIMEOUT_S + 5)
    assert {each.code for each in ended.values()} == {code}, ended
    if attempt_s == HANG_S:  # one round runs into its deadline, and nothing is tried again
        assert max(each.seconds for each in ended.values()) < HANG_S + MARGIN_S
    return ranks.report()


def blamed(report: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Code and ranks of everything that is found, causes or not."""
    return [(found["code"], found["where"]["ranks"]) for found in report["findings"]]


def test_a_step_that_the_backend_lacks_is_left_out_and_the_others_are_run(tmp_path: Path) -> None:
    report = examine(tmp_path, dict.fromkeys(range(WORLD), "lacks_all_to_all"), 0)
    (check,) = (c for c in report["checks"] if c["name"] == "exchanges")
    assert (check["status"], report["findings"]) == ("pass", [])
    ring = ["send to the next rank", "send to the previous rank"]
    for rank in report["ranks"]:
        facts = rank["facts"]["exchanges"]["world"]["facts"]
        steps = ["all_gather", "reduce_scatter"]
        assert facts["steps"] == [*2 * steps, "broadcast from 0", *steps, *3 * ring]
        assert facts["lacking"] == {"all_to_all": "Backend gloo does not support alltoall_base"}


def test_wrong_parts_name_the_rank_that_sent_them(tmp_path: Path) -> None:
    report = examine(tmp_path, {1: "sends_wrong_parts"}, 1)
    assert blamed(report) == [("collective-wrong-result", [1])]
    evidence = report["findings"][0]["evidence"]
    assert evidence["parts"] == [{"from": 1, "to": "0, 2"}]
    assert evidence["steps"] == ["all_to_all"]


def test_a_rank_that_stops_in_a_step_is_named_with_the_step(tmp_path: Path) -> None:
    report = examine(tmp_path, {1: "freezes_in_all_to_all"}, 1, HANG_S)
    assert blamed(report) == [("rank-frozen", [1])]
    (found,) = report["findings"]
    assert found["message"].startswith("frozen in all_to_all of group world (process state T")
