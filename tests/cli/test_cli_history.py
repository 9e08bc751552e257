"""`--baseline` and `report diff`, with saved reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nccl_doctor.report.formats import json as json_format
from tests.cli.program import error_of, program
from tests.support.exchanges import World
from tests.support.pasts import noisy, saved
from tests.support.reports import validate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten earlier runs, what else lies about, and beside the folder the run of today."""
    made = tmp_path_factory.mktemp("runs")
    past = made / "past"
    past.mkdir()
    for i, report in enumerate(noisy(4, 10, 0.02)):
        (past / f"{i}.json").write_text(json_format.render(report))
    (past / "junk.json").write_text("{")
    (past / "README").write_text("not looked at")
    today = World(4).noise(99, 0.02).slow([("nd0", "nd2")], share=0.82).cluster()
    (made / "today.json").write_text(json_format.render(saved(today, 21)))
    return made


def test_a_slower_link_is_a_warning_and_fails_if_strict(folder):
    done = program("report", "judge", "today.json", "--baseline", "past", "--json", "-", cwd=folder)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    validate(report)
    (found,) = report["root_causes"]
    assert found["code"] == "slower-than-before"
    assert found["where"]["links"] == [["nd0", "nd2"]]
    assert report["run"]["baseline"]["left_out"] == {"not a report": 1}
    assert len(report["run"]["baseline"]["runs"]) == 10


def test_its_own_report_is_not_among_its_baseline(folder, tmp_path):
    (tmp_path / "today.json").write_bytes((folder / "today.json").read_bytes())
    done = program("report", "judge", "today.json", "--baseline", ".", "-v", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "baseline: 0 earlier runs in .; not used: 1 of this run" in done.stdout
    assert "baseline-too-short" in done.stdout


def test_a_baseline_that_cannot_be_read_ends_it_before_it_starts(folder):
    for command in (("run", "--select", "ranks"), ("report", "judge", "today.json")):
        words = error_of(program(*command, "--baseline", "past/junk.json", cwd=folder))
        assert words.startswith("--baseline: past/junk.json is not a report")


def test_diff(folder):
    done = program("report", "diff", "past/3.json", "today.json", "--strict", cwd=folder)
    assert done.returncode == 0, "speeds of two runs are noise for all one knows"
    assert "before  2026-11-04T07:00:00+00:00 PASS" in done.stdout
    assert "nd0 → nd2" in done.stdout
    assert "two runs cannot tell a change from noise" in done.stdout


def test_diff_as_json_and_what_is_worse(folder):
    arguments = ("report", "diff", "past/3.json", "-", "--format", "json", "--strict")
    bad = World(4).slow([("nd0", "nd2"), ("nd2", "nd0")]).cluster()
    text = json_format.render(saved(bad, 21))
    done = program(*arguments, cwd=folder, input=text)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["worse"] is True
    assert [(each["state"], each["code"]) for each in told["findings"]] == [("new", "link-slow")]
    assert told["old"]["verdict"] == "pass"
    assert told["speeds"][0]["where"] in (
        {"links": [["nd0", "nd2"]]},
        {"links": [["nd2", "nd0"]]},
    )
