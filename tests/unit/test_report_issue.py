"""Issue forms of other projects, filled in from a report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nccl_doctor.api import Finding, Layer, Where
from nccl_doctor.cli.bundle import PROJECTS
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.registry import installed
from nccl_doctor.report.issue import UNKNOWN, fill, form_of, projects
from tests.support.clusters import make_cluster
from tests.support.planted import secret_report
from tests.support.reports import RUN, kind, made_check

FIELDS = {  # as the projects' own forms name them
    "nccl": (
        *("How is this issue impacting you?", "Share Your Debug Logs"),
        *("Steps to Reproduce the Issue", "NCCL Version", "Your platform details"),
        "Error Message & Behavior",
    ),
    "pytorch": ("🐛 Describe the bug", "Versions"),
    "deepspeed": (
        *("Describe the bug", "To Reproduce", "Expected behavior", "ds_report output"),
        *("System info", "Launcher context", "Docker context", "Additional context"),
    ),
}


def report(code: str = "collective-hang"):
    by_rank = {
        0: {"torch": "2.13.0+cu129", "cuda": "12.9", "nccl": "2.27.5", "driver": "570.86.15"},
        1: {"torch": "2.13.0+cu129", "cuda": "12.9", "nccl": "2.27.5", "driver": None},
    }
    cluster = make_cluster(
        check="software",
        by_rank=by_rank,
        env={0: {"NCCL_DEBUG": "INFO", "RANK": "0"}, 1: {"NCCL_DEBUG": "WARN"}},
        backend="nccl",
    )
    found = Finding(kind(code, Layer.COLLECTIVE), "it hung | <b>@someone</b>", Where(ranks=(2, 3)))
    return conclude(cluster, [made_check("made", finds=[found])], run=RUN)


def test_the_forms_that_there_are():
    assert projects() == sorted(PROJECTS) == sorted(FIELDS)


@pytest.mark.parametrize("project", PROJECTS)
def test_every_field_of_the_form_is_there_and_filled(project):
    words = fill(form_of(project), report(), installed)
    at = [words.index(field) for field in FIELDS[project]]
    assert at == sorted(at)
    for told in ("2.13.0+cu129", "2.27.5", "570.86.15", "4 ranks on 2 hosts", "collective-hang"):
        assert told in words
    assert "NCCL_DEBUG=INFO\n(other values on 3 of 4 ranks)" in words
    assert "RANK=0" not in words
    assert "`ranks 2–3 on nd1`" in words
    assert UNKNOWN in words
    assert "$" not in words


def test_the_impact_in_the_words_of_the_form():
    for code, impact in {
        "collective-hang": "Application hang",
        "collective-wrong-result": "Data corruption",
        "link-slow": "Lower performance than expected",
        "rank-crashed": "Application crash",
        "made-up": "-- Please specify --",
    }.items():
        assert f"impacting you?\n\n{impact}" in fill(form_of("nccl"), report(code), installed)


def test_nothing_that_was_observed_is_markup():
    words = fill(form_of("pytorch"), report(), installed)
    assert "`it hung | <b>@someone</b>`" in words


def test_the_log_of_a_stuck_rank():
    log = "nd0:1:2 [0] NCCL INFO x\nnd0:1:2 [0] NCCL WARN Call to connect timed out\n```\n\x1b[31m"
    stuck = Outcome(OutcomeStatus.HUNG, log_tail=log, stack='File "x.py", line 3')
    words = fill(form_of("nccl"), _stuck(stuck), installed)
    assert "First `NCCL WARN`: `nd0:1:2 [0] NCCL WARN Call to connect timed out`" in words
    assert "````text\n" in words
    assert "\x1b" not in words


def _stuck(outcome):
    cluster = make_cluster(check="collectives", by_rank={0: outcome}, round_name="world")
    return conclude(cluster, [], run=RUN)


@pytest.mark.parametrize("project", PROJECTS)
def test_a_report_that_knows_little(project):
    empty = conclude(make_cluster(absent_nodes=(0, 1)), [], run=replace(RUN, command=""))
    assert "not in the report" in fill(form_of(project), empty, installed)
    assert fill(form_of(project), secret_report(), installed)
