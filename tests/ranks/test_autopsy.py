"""Real jobs of gloo ranks that die: the autopsy of what they print names the rank, and no other."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from nccl_doctor.autopsy.examine import examine
from tests.support.deaths import CODES, Death, consoles_of


@pytest.mark.parametrize(
    "death",
    [
        Death("raises", 1, 2, 3, "log-dir"),
        Death("killed", 0, 2, 3, "torchrun"),
        Death("sleeps", 2, 1, 3, "plain"),
    ],
    ids=str,
)
def test_the_rank_that_failed_first_is_named(death: Death, tmp_path: Path) -> None:
    left = consoles_of(death, tmp_path)
    report = examine([str(path) for path in left], io.BytesIO(), started="2026-11-28T00:00:00")
    assert report.exit_code == 1
    (cause,) = report.root_causes
    assert cause.code in CODES[death.fault]
    assert [*cause.where.ranks] == death.culprits
    victims = [finding for finding in report.findings if finding is not cause]
    assert all(finding.explained_by == cause.code for finding in victims)
    assert not any({*finding.where.ranks} & {*death.culprits} for finding in victims)
