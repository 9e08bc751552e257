"""`--expect-load-seconds`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.program import error_of, program
from tests.support.reports import validate

HERE = ("--select", "timeouts", "--backend", "gloo", "--nproc-per-node", "2")


def test_a_load_that_no_time_out_covers_fails(tmp_path: Path):
    done = program(
        "run", *HERE, "--expect-load-seconds", "100000", "--json", "-", cwd=tmp_path, timeout_s=150
    )
    data = json.loads(done.stdout)
    validate(data)
    assert (done.returncode, data["verdict"]) == (1, "fail"), done
    (finding,) = data["root_causes"]
    (host,) = data["hosts"]
    assert finding["code"] == "timeout-too-short"
    assert finding["where"]["hosts"] == [host["host"]]
    assert finding["where"]["ranks"] == []
    assert "alone for 100000 s" in finding["message"]
    assert "timeout=timedelta(minutes=2500)" in finding["fix"]
    assert {row["layer"] for row in finding["evidence"]["layers"]} >= {"store", "heartbeat", "W&B"}


def test_the_table_is_in_the_facts_and_behind_v(tmp_path: Path):
    saved = tmp_path / "report.json"
    done = program("run", *HERE, "-v", "--json", str(saved), cwd=tmp_path, timeout_s=150)
    data = json.loads(saved.read_text())
    assert (done.returncode, data["findings"]) == (0, []), done
    table = data["hosts"][0]["facts"]["timeouts"]["alone"]["facts"]["waits"]
    assert table["columns"][:3] == ["layer", "seconds", "set by"]
    lines = done.stdout.splitlines()
    at = lines.index("timeouts: waits")
    assert lines[at + 1].split()[:2] == ["layer", "seconds"]
    words = [line.split() for line in lines[at:]]
    for row in table["rows"]:
        assert any(line[: len(row[0].split())] == row[0].split() for line in words), row
    assert "timeouts: waits" not in program("report", "show", str(saved)).stdout


@pytest.mark.parametrize("value", ["-3", "abc", "0", "nan", "1e999", ""])
def test_a_load_that_is_no_time_is_a_usage_error(value: str):
    line = error_of(program("run", f"--expect-load-seconds={value}"))
    assert f"'--expect-load-seconds': {value!r} is not a positive number of seconds" in line
