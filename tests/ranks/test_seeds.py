"""Real gloo ranks, one of which takes another seed than it is given."""

from __future__ import annotations

from pathlib import Path

from tests.broken import broken
from tests.ranks.ranks import Ranks


def test_a_rank_with_another_seed_is_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, ["--select", "seeds"], changes={1: broken("another_seed")})
    ended = ranks.wait(60)
    assert {each.code for each in ended.values()} == {1}, ended
    report = ranks.report()
    (found,) = report["findings"]
    assert (found["code"], found["severity"]) == ("seed-differs", "fail")
    assert found["where"]["ranks"] == [1]
    assert report["run"]["duration_s"] < 20  # the check's own deadline, and the settling


def test_ranks_with_the_same_seed_pass(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, ["--select", "seeds"])
    ended = ranks.wait(60)
    assert {each.code for each in ended.values()} == {0}, ended
    report = ranks.report()
    assert report["findings"] == []
    assert [check["status"] for check in report["checks"] if check["name"] == "seeds"] == ["pass"]
