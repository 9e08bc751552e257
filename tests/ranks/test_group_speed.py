"""Real gloo ranks are timed: every size, every kind of group, computing apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.ranks import Ranks
from tests.ranks.test_network_speed import RANK, observed
from tests.support.priority import FIRST


def test_what_is_measured(tmp_path: Path) -> None:
    options = ["--select", "group_speed", "--mesh", "dp=1,tp=3", "--collective-timeout", "15"]
    ranks = Ranks(tmp_path, 3, options, changes=dict.fromkeys(range(3), FIRST))
    ended = ranks.wait(90)
    assert {each.code for each in ended.values()} == {0}, ended
    report = ranks.report()
    assert [f["code"] for f in report["findings"] if f["severity"] != "info"] == []
    for rank in report["ranks"]:
        rounds = rank["facts"]["group_speed"]
        assert {"world", "mesh-tp"} <= set(rounds)
        assert "nvls" not in rounds
        facts = rounds["world"]["facts"]
        assert facts["compute"]["seconds"] > 0
        sizes = {each["bytes"]: each for each in facts["all_reduce"]}
        assert set(sizes) == {8, 65_536, 4_194_304}
        assert all(each["seconds"] > 0 and each["times"] >= 1 for each in sizes.values())
        assert all(each["busbw"] == pytest.approx(each["algbw"] * 4 / 3) for each in sizes.values())
        assert sizes[4_194_304]["seconds"] > sizes[8]["seconds"] / 2


NVLS = RANK.replace("network_speed", "group_speed").replace("NetworkSpeed", "GroupSpeed")
NVLS = NVLS.replace("network-0", "nvls")
REFUSES = """
works = dist.all_reduce

def all_reduce(*args, **kwargs):
    works(*args, **kwargs)  # as soon as one leaves, gloo fails at the other
    raise RuntimeError("NCCL error\\nLast error:\\nno algorithm/protocol available for AllReduce")

dist.all_reduce = all_reduce
"""


def test_with_nvlink_sharp_alone_an_error_of_the_backend_is_a_fact(tmp_path: Path) -> None:
    begin, call, end = NVLS.partition("facts =")
    for facts in observed(tmp_path, code=f"{begin}{REFUSES}{call}{end}"):
        assert facts["at_init"]["NCCL_ALGO"] == "allreduce:nvls"
        assert facts["failed"] == "no algorithm/protocol available for AllReduce"
        assert "all_reduce" not in facts
