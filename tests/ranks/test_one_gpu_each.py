"""Real ranks that see one GPU each, as a launcher gives them out that hides the others."""

from __future__ import annotations

from pathlib import Path

from tests.broken import broken
from tests.ranks.ranks import Ranks

CHECKS = ("collectives", "group_speed", "seeds")
ATTEMPT_S = 8


def test_each_takes_the_only_gpu_that_it_sees(tmp_path: Path) -> None:
    options = ["--backend", "nccl", "--select", ",".join(CHECKS)]
    ranks = Ranks(
        tmp_path,
        3,
        [*options, "--collective-timeout", str(ATTEMPT_S)],
        changes={rank: broken("sees_one_gpu") for rank in range(3)},
    )
    ended = ranks.wait(60)
    report = ranks.report()
    assert report["findings"] == []
    assert {each.code for each in ended.values()} == {0}, ended
    states = {check["name"]: check["status"] for check in report["checks"]}
    assert states == dict.fromkeys(CHECKS, "pass")
