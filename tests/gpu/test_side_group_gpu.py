"""The side group with NCCL, on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.one_gpu import one_gpu
from tests.ranks.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nccl_gpu")]

WORLD = 3
COLLECTIVE_S = 40.0
OPTIONS = (
    *("--select", "side_group", "--groups", "weight-sync", "--backend", "nccl"),
    *("--collective-timeout", f"{COLLECTIVE_S:g}", "--timeout", "400"),
)


def test_a_bound_default_group_is_blamed_for_a_hang_and_an_unbound_one_passes(
    tmp_path: Path,
) -> None:
    """With torch before 2.15. Newer ones bind by themselves: then no variant but the control may
    finish, and the binding is blamed all the same.
    """
    ranks = Ranks(tmp_path, WORLD, OPTIONS, changes=one_gpu(WORLD))
    ended = ranks.wait(420)
    report = ranks.report()
    found = [each for each in report["findings"] if each["check"] == "side_group"]
    codes = {each["code"] for each in found}
    assert codes <= {"device-id-multi-group-hang"}, found
    assert {each.code for each in ended.values()} == {1 if codes else 0}
    for each in found:
        assert each["where"]["ranks"] == [0, WORLD - 1]
    facts = report["ranks"][0]["facts"]["side_group"]
    finished = [name for name, held in facts.items() if held["status"] == "ok"]
    assert {"unbound", "cleared"} & set(finished), facts
    for name in finished:
        assert facts[name]["facts"]["wrong"] == []
        assert "NCCL" in facts[name]["facts"]["side_class"]
