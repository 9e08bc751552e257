"""Real gloo ranks, one of them with a broken torch: code, place, and nobody else."""

from __future__ import annotations

from pathlib import Path

from tests.broken import broken
from tests.ranks.ranks import Ranks


def test_a_wrong_result_names_the_rank_that_sees_it(tmp_path: Path) -> None:
    ranks = Ranks(
        tmp_path,
        3,
        ["--select", "collectives", "--collective-timeout", "8"],
        changes={1: broken("wrong_result")},
    )
    ended = ranks.wait(60)
    assert {each.code for each in ended.values()} == {1}, ended
    (root,) = ranks.report()["root_causes"]
    assert (root["code"], root["where"]["ranks"]) == ("collective-wrong-result", [1])
