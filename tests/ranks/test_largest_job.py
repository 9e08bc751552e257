"""Rank 0 of the largest job, in which nobody else comes: there is time left for the report."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.ranks.ranks import Ranks

RANKS = 131_072
TIMEOUT_S = 60.0


@pytest.mark.wide
def test_rank_0_reports_on_all_others_in_time(tmp_path: Path) -> None:
    options = ("--join-timeout=3", f"--timeout={TIMEOUT_S:g}", "--level=quick", "--backend=gloo")
    size = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": "8"}
    began = time.monotonic()
    ranks = Ranks(tmp_path, RANKS, options, start=[0], changes={0: size})
    (ended,) = ranks.wait(TIMEOUT_S + 2).values()
    assert time.monotonic() - began < TIMEOUT_S + 2
    assert ended.code == 1, ended
    report = json.loads((tmp_path / "report.json").read_text())
    assert (len(report["ranks"]), len(report["hosts"])) == (RANKS, RANKS // 8)
    (absent,) = (each for each in report["findings"] if each["code"] == "host-absent")
    assert len(absent["where"]["nodes"]) == RANKS // 8 - 1
    assert absent["message"].startswith("16383 of 16384 hosts, 131064 of 131072 ranks")
