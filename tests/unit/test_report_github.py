"""Annotations and step summary: what the runner of GitHub Actions reads, and what it would drop."""

from __future__ import annotations

import re
from dataclasses import replace

from nccl_doctor.api import Finding, Layer, Outcome, OutcomeStatus, Severity, Where
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.report import github
from nccl_doctor.report.formats import markdown
from nccl_doctor.system import terminal
from tests.support.ci import GROUP, HOSTILE, NOTE, OK, PORT, RISK, SHM, report_of
from tests.support.gpu_facts import gpu
from tests.support.reports import RUN, kind
from tests.unit.test_check_backend_device import check as backend_device
from tests.unit.test_check_backend_device import cluster_of, one_host

UNESCAPED = {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ",", "%25": "%"}
COMMAND = re.compile(r"::(error|warning) title=([^:,\n]*)::([^\n]*)")


def read(text: str) -> list[tuple[str, str, str]]:
    """(kind, title, message) of every command, with the escapes that the runner takes back."""
    out = []
    for line in text.splitlines():
        match = COMMAND.fullmatch(line)
        assert match, line
        parts = list(match.groups())
        for escape, char in UNESCAPED.items():
            parts = [part.replace(escape, char) for part in parts]
        out.append((parts[0], parts[1], parts[2]))
    return out


def test_causes_are_merged_and_symptoms_left_out():
    report = report_of(
        Finding(RISK, "100% sure, or: not", Where(hosts=("nd2",))),
        Finding(NOTE, "fyi"),
        Finding(GROUP, "hung", Where(ranks=(0, 1, 2, 3))),
        Finding(PORT, "no answer", Where(links=(("nd1", "nd0"),))),
        Finding(SHM, "64 MiB", Where(hosts=("nd0",)), fix="mount it, larger: 1g"),
        Finding(SHM, "32 MiB", Where(hosts=("nd1",)), fix="mount it, larger: 1g"),
        hosts=("nd0", "nd1", "nd2"),
    )
    assert read(github.commands(report)) == [
        (
            "error",
            "shm-small: Title of shm-small",
            "where: nd0; nd1\nseen: 64 MiB\nseen: 32 MiB\nfix: mount it, larger: 1g",
        ),
        (
            "error",
            "port-shut: Title of port-shut",
            "where: nd1 → nd0\nseen: no answer\nfix: fix port-shut",
        ),
        (
            "warning",
            "a-risk: Title of a-risk",
            "where: nd2\nseen: 100% sure, or: not\nfix: fix a-risk",
        ),
    ]


def test_a_healthy_run_says_nothing():
    assert github.commands(report_of()) == ""


def test_an_exit_code_that_is_not_0_has_an_error():
    hung = Outcome(OutcomeStatus.HUNG, breadcrumbs=({"step": "open /dev/x", "at_s": 0.0},))
    unknown = report_of(by_host={"nd0": OK, "nd1": hung})
    strict = report_of(Finding(RISK, "so so", Where(hosts=("nd0",))), strict=True)
    nothing = replace(report_of(), findings=(), root_causes=(), checks=(), exit_code=3)
    for report in (unknown, strict, nothing):
        kinds = [told for told, _, _ in read(github.commands(report))]
        assert kinds[:1] == ["error"]
    ((_, title, message),) = read(github.commands(unknown))
    assert title == "nccl-doctor: UNKNOWN"
    assert "hung in open /dev/x (nd1)" in message


def test_a_runner_with_7_of_8_gpus_is_named():
    few = [gpu(0, index) for index in range(7)]
    for expected, words in (({"gpus_per_host": 8}, "expected 8 per host"), ({}, "8 local ranks")):
        cluster = cluster_of(one_host(0, 8, devices=few), hosts=1, expected=expected)
        report = conclude(cluster, [backend_device], run=RUN)
        assert report.exit_code == 1
        ((told, title, message),) = read(github.commands(report))
        assert (told, title.split(":")[0]) == ("error", "gpu-missing")
        assert "where: rank 7 on nd0\n" in message
        assert f"seen: 7 visible GPUs, {words}\n" in message
        assert "### ❌" in github.summary(report)


def test_no_more_than_github_keeps_the_worst_first():
    found = [
        Finding(kind(f"{level.value}-{i}", Layer.HOST, level), "m", Where(hosts=("nd0",)))
        for i in range(14)
        for level in (Severity.WARN, Severity.FAIL)
    ]
    out = read(github.commands(report_of(*found)))
    assert [told for told, _, _ in out] == ["error"] * 10 + ["warning"] * 10
    assert out[9][2] == "and 5 more: they are in the report"
    assert len(read(github.commands(report_of(*found[:20])))) == 20


def test_hostile_text_is_one_command_and_no_other():
    report = report_of(Finding(SHM, HOSTILE, Where(hosts=(HOSTILE,)), fix=HOSTILE + "\n::x::"))
    out = github.commands(report)
    out.encode()
    ((told, _, _),) = read(out)
    assert told == "error"


def test_the_log_holds_no_command():
    text = "::error::a\n  ::stop-commands::b\nc ::d:: ##[add-mask]e\n\t::f\n"
    out = terminal.inert(text)
    for line in out.splitlines():
        assert not line.lstrip().startswith("::")
        assert "##[" not in line
    assert "c ::d::" in out
    plain = markdown.render(report_of())
    assert terminal.inert(plain) == plain


def test_the_summary_fits():
    kinds = [kind(f"code-{i}", Layer.HOST) for i in range(40)]
    report = report_of(*[Finding(one, "ü" * 900, Where(hosts=("nd0",))) for one in kinds])
    whole = github.summary(report)
    assert whole == markdown.render(report)
    assert len(whole.encode()) < github.ROOM
    for room in (0, 10, 100, 5000, len(whole.encode()) - 1):
        cut = github.summary(report, room)
        assert len(cut.encode()) <= room
        assert cut == "" or cut.endswith("\nThe rest is in the report.\n")
    assert github.summary(report, 5000).count("### ❌") > 1
    assert github.summary(report, -5) == ""


def test_a_report_of_thousands_stays_below_the_limit():
    places = [Where(hosts=(f"node{i:04}",)) for i in range(2000)]
    found = tuple(Finding(SHM, f"{i} " + "x" * 3000, at) for i, at in enumerate(places))
    report = replace(report_of(), root_causes=found, findings=found)
    assert len(github.summary(report).encode()) < github.ROOM
    assert len(github.commands(report)) < 64 << 10
