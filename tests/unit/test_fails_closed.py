"""What was not measured is never green: in no format, for no reader, with no exit profile."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from nccl_doctor.api import Finding, Outcome, OutcomeStatus, Where
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.report import Report
from nccl_doctor.report import github
from nccl_doctor.report.formats import formats, renderer
from nccl_doctor.report.profiles import tell
from nccl_doctor.report.text import render as render_text
from tests.support.ci import OK, SHM, report_of
from tests.support.clusters import change_rank, make_cluster
from tests.support.gpu_facts import gpu
from tests.support.pages import Page
from tests.support.reports import RUN, made_check
from tests.support.rows import each_row
from tests.unit.test_check_backend_device import check as backend_device
from tests.unit.test_check_backend_device import cluster_of, one_host

junitparser = pytest.importorskip("junitparser")

SKIPPED = Outcome(OutcomeStatus.SKIPPED, reason="no GPU")
PART = Outcome(OutcomeStatus.OK, facts=OK, reason="one of two could not be read")
HUNG = Outcome(OutcomeStatus.HUNG, breadcrumbs=({"step": "open /dev/x", "at_s": 0.0},))
DIED = Outcome(OutcomeStatus.DIED, reason="killed by SIGSEGV")


def broken_check() -> Report:
    cluster = make_cluster(("nd0",), 1, check="shm", by_host={"nd0": OK})
    return conclude(cluster, [made_check("shm", error=RuntimeError("oh"))], run=RUN)


def one_rank_short() -> Report:
    cluster = make_cluster(check="shm", by_host={"nd0": OK, "nd1": OK})
    return conclude(change_rank(cluster, 3, reported=False), [made_check("shm")], run=RUN)


def seven_of_eight(**more: object) -> Report:
    few = [gpu(0, index) for index in range(7)]
    cluster = cluster_of(one_host(0, 8, devices=few), hosts=1, **more)
    return conclude(cluster, [backend_device], run=RUN)


NOT_GREEN: dict[str, tuple[Callable[[], Report], int]] = {
    "no check ran": (lambda: conclude(make_cluster(), [], run=RUN), 3),
    "every check was skipped": (lambda: report_of(by_host={"nd0": SKIPPED, "nd1": SKIPPED}), 3),
    "a check broke": (broken_check, 3),
    "a check saw a part of one host": (lambda: report_of(by_host={"nd0": OK, "nd1": PART}), 3),
    "a check hung on one host": (lambda: report_of(by_host={"nd0": OK, "nd1": HUNG}), 3),
    "a check died on every host": (lambda: report_of(by_host={"nd0": DIED, "nd1": DIED}), 3),
    "one host told nothing": (lambda: report_of(by_host={"nd0": OK}), 3),
    "fewer hosts than asked for": (lambda: report_of(absent_nodes=[1]), 3),
    "fewer ranks than asked for": (one_rank_short, 3),
    "a fault": (lambda: report_of(Finding(SHM, "64 MiB", Where(hosts=("nd1",)))), 1),
    "7 of 8 GPUs, one for each rank": (seven_of_eight, 1),
    "7 of 8 GPUs, as expected": (lambda: seven_of_eight(expected={"gpus_per_host": 8}), 1),
    "a usage error": (lambda: replace(report_of(), exit_code=2, verdict="unknown"), 2),
}

SHOWS: dict[str, Callable[[Report, str], bool]] = {
    # form → whether a rendered report says that something is wrong
    "html": lambda report, text: report.verdict.upper() in Page(text).one("header").text,
    "json": lambda report, text: f'"exit_code": {report.exit_code}' in text,
    "junit": lambda report, text: is_red(text),
    "markdown": lambda report, text: text.startswith(("## ❌", "## ❓")),
    "prometheus": lambda report, text: f"nccl_doctor_exit_code {report.exit_code}\n" in text,
    "termination": lambda report, text: report.verdict.upper() in text,
}


def is_red(text: str) -> bool:
    """Whether a foreign reader of JUnit counts a failure or an error, in cases and in totals."""
    root = ElementTree.parse(io.BytesIO(text.encode())).getroot()
    (suite,) = junitparser.JUnitXml.fromroot(root)
    bad = [
        case for case in suite if any(not isinstance(r, junitparser.Skipped) for r in case.result)
    ]
    return bool(bad) and len(bad) == suite.failures + suite.errors


def test_every_format_has_its_rule():
    assert sorted(SHOWS) == formats()


@each_row("case", NOT_GREEN)
def test_it_is_not_green(case: str):
    make, code = NOT_GREEN[case]
    report = make()
    assert report.exit_code == code
    assert report.verdict not in ("pass", "warn")
    for form in formats():
        assert SHOWS[form](report, renderer(form)(report)), form
    assert report.verdict.upper() in render_text(report, quiet=True).splitlines()[0]
    assert github.commands(report).startswith("::error ")
    assert re.match(r"## [❌❓] ", github.summary(report))
    for profile in ("nagios", "npd"):
        told = tell(report, profile, code)
        assert told is not None
        assert told.code > 0
        assert told.line


@pytest.mark.parametrize("case", [case for case in NOT_GREEN if case.startswith("7 of 8")])
def test_a_runner_with_7_of_8_gpus_is_named_as_such(case: str):
    report = NOT_GREEN[case][0]()
    (host,) = report.cluster.hosts
    for form in formats():
        if form != "prometheus":  # which holds no message
            assert "7 visible GPUs" in renderer(form)(report), form
            assert str(host.name) in renderer(form)(report), form
    assert 'code="gpu-missing"' in renderer("prometheus")(report)


@pytest.mark.parametrize("form", formats())
def test_green_is_green(form: str):
    report = report_of()
    assert report.exit_code == 0
    text = renderer(form)(report)
    if form == "junit":
        assert not is_red(text)
    if form == "termination":
        assert text == ""
    assert github.commands(report) == ""
