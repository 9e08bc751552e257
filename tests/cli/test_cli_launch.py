"""Bad launch variables: one clear line, exit 2, and the finding in the report."""

from __future__ import annotations

import json

import pytest

from tests.cli.program import program
from tests.ranks.ranks import free_port, rank_env
from tests.support.forkserver import Forked

BAD = [
    ("RANK", "x", "launch-bad-value"),
    ("RANK", "5", "rank-out-of-range"),
    ("WORLD_SIZE", "0", "launch-bad-value"),
    ("LOCAL_RANK", "7", "local-rank-out-of-range"),
    ("MASTER_PORT", "70000", "launch-bad-value"),
    ("MASTER_ADDR", None, "launch-missing-variable"),
]
MORE = [
    ("RANK", "", "launch-bad-value"),
    ("RANK", "-1", "launch-bad-value"),
    ("WORLD_SIZE", "1e3", "launch-bad-value"),
    ("WORLD_SIZE", None, "launch-missing-variable"),
    ("LOCAL_RANK", "a", "launch-bad-value"),
    ("MASTER_PORT", "abc", "launch-bad-value"),
    ("MASTER_ADDR", "", "launch-bad-value"),
]
"""Of the same kinds; tests/unit/test_launch_problems.py has those of every variable."""


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [*BAD, *(pytest.param(*each, marks=pytest.mark.wide) for each in MORE)],
)
def test_bad_variable(tmp_path, name, value, code):
    path = tmp_path / "report.json"
    err = tmp_path / "err"
    done = Forked(
        ["run", "--json", str(path), "--level=quick", "--join-timeout=2", "--timeout=30"],
        rank_env(0, 1, free_port(), **{name: value}),
        folder=tmp_path,
        out=tmp_path / "out",
        err=err,
    )
    assert done.wait(60) == 2, err.read_text()
    lines = [line for line in err.read_text().splitlines() if line.startswith("nccl-doctor: ")]
    words = [line for line in lines if "FAIL" not in line and "so far: " not in line]
    assert sum(name in line for line in words) == 1
    assert "Traceback" not in err.read_text()
    reports = [path, *tmp_path.glob("report.*.json")]
    (report,) = [json.loads(p.read_text()) for p in reports if p.exists()]
    assert report["exit_code"] == 2
    (found,) = [f for f in report["findings"] if f["code"] == code]
    assert name in found["message"]
    saved = next(p for p in reports if p.exists())
    assert program("report", "judge", str(saved)).returncode == 2  # the same facts and answer
