"""An autopsy beside the examinations of the same hosts before and after the job."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from nccl_doctor.api import Cluster, Finding, Where
from nccl_doctor.autopsy.examine import examine, with_examinations
from nccl_doctor.model.report import Report
from nccl_doctor.report.text import render
from tests.cli.program import error_of, program
from tests.support.clusters import make_cluster, shut_out
from tests.support.consoles import CLOSED, raised
from tests.support.reports import RUN, kind, through_json

LOST = "".join(raised(rank, CLOSED) for rank in range(4))


def autopsy(tmp_path: Path, text: str = LOST) -> Report:
    (tmp_path / "job.log").write_text(text)
    started = "2026-11-28T10:00:00+00:00"
    return examine([str(tmp_path / "job.log")], io.BytesIO(), started=started)


def examination(*hosts: str, code: str = "gpu-lost", cluster: Cluster | None = None) -> Report:
    """A report that finds a fault on each of these hosts."""
    causes = tuple(Finding(kind(code), "seen", Where(hosts=(host,))) for host in hosts)
    verdict, number = ("fail", 1) if causes else ("pass", 0)
    of = cluster or make_cluster()
    return Report(verdict, number, "made up", RUN, of, root_causes=causes, findings=causes)


def test_a_fault_that_only_the_examination_after_the_job_finds_is_a_cause(tmp_path: Path) -> None:
    alone = autopsy(tmp_path)
    assert (alone.exit_code, alone.root_causes[0].code) == (3, "cause-not-told")
    found = through_json(with_examinations(alone, examination("nd0"), examination("nd0", "nd1")))
    (cause,) = found.root_causes
    assert (cause.code, cause.where.hosts) == ("gpu-lost", ("nd1",))
    assert cause.message == "after the job: seen"
    assert (found.verdict, found.exit_code, found.summary) == ("fail", 1, "Title of gpu-lost")
    assert "cause-not-told" not in {finding.code for finding in found.findings}
    assert "examined before the job: FAIL · after it: FAIL" in render(found)


def test_the_cause_in_the_text_stays_the_first_one(tmp_path: Path) -> None:
    text = LOST + raised(4, "KeyError: 3")
    found = with_examinations(autopsy(tmp_path, text), examination(), examination("nd1"))
    assert [cause.code for cause in found.root_causes] == ["rank-raised", "gpu-lost"]
    assert found.summary == found.root_causes[0].kind.title


@pytest.mark.parametrize(
    "after",
    [
        examination(),
        examination("nd0"),
        examination("nd1", code="host-absent", cluster=make_cluster(absent_nodes=[1])),
        examination("nd1", code="host-absent", cluster=shut_out(make_cluster(), "nd1")),
        examination("nd1", cluster=make_cluster(complete=False)),
        None,
    ],
)
def test_nothing_new_and_hosts_that_did_not_come_again_change_no_verdict(
    after: Report | None, tmp_path: Path
) -> None:
    alone = autopsy(tmp_path)
    found = with_examinations(alone, examination("nd0"), after)
    assert (found.verdict, found.root_causes) == (alone.verdict, alone.root_causes)
    assert found.run.extra["before"]["verdict"] == "fail"


def test_the_reports_are_given_by_file(tmp_path: Path) -> None:
    autopsy(tmp_path)
    for name, report in (("before", examination()), ("after", examination("nd1"))):
        (tmp_path / f"{name}.json").write_text(json.dumps(report.to_json()))
    line = ["autopsy", "--before", "before.json", "--after", "after.json", "job.log"]
    done = program(*line, cwd=tmp_path)
    assert done.returncode == 1, done
    assert "[gpu-lost]" in done.stdout
    wrong = program("autopsy", "--after", "nosuch.json", "job.log", cwd=tmp_path)
    assert "cannot read nosuch.json: No such file" in error_of(wrong)


def test_a_report_that_says_something_else_at_these_keys_is_shown(tmp_path: Path) -> None:
    alone = autopsy(tmp_path)
    extra = {**alone.run.extra, "before": 3, "damaged": "x"}
    assert "examined" not in render(replace(alone, run=replace(alone.run, extra=extra)))
