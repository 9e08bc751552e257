"""The report for people."""

from __future__ import annotations

import re

import pytest

from nccl_doctor.api import (
    Confidence,
    Finding,
    Fix,
    Layer,
    Outcome,
    OutcomeStatus,
    Severity,
    Step,
    Where,
    shell,
)
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.report import text
from nccl_doctor.report.story import checks_in_words
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, kind, made_check, through_json
from tests.support.rows import each_row

SHM = kind("shm-small", Layer.HOST)
PORT = kind("port-shut", Layer.PORT)
GROUP = kind("group-hang", Layer.GROUP)
RISK = kind("a-risk", Layer.ROUTE, Severity.WARN)
NOTE = kind("a-note", Layer.ROUTE, Severity.INFO)
OK = {"x": 1}


def report_of(*findings: Finding, hosts=("nd0", "nd1"), nproc=2, by_host=None, **more):
    facts = dict.fromkeys(hosts, OK) if by_host is None else by_host
    cluster = make_cluster(hosts, nproc, check="shm", by_host=facts, **more)
    check = made_check("shm", finds=findings)
    return through_json(conclude(cluster, [check], run=RUN))


def lines(report, **how) -> list[str]:
    return text.render(report, **{"width": 100, **how}).splitlines()


def test_healthy():
    assert lines(report_of()) == [
        "nccl-doctor: PASS: No failure found for 4 ranks on 2 hosts; no collective was run",
        "",
        "checks: 1 passed · 2 hosts · 4 ranks · 3.5 s · exit code 0",
        "Next: start the job as you started this, with torchrun",
    ]


def test_broken():
    report = report_of(
        Finding(
            PORT,
            "connect to 192.168.77.1:29500: no answer in 3 s",
            Where(links=(("nd1", "nd0"),)),
            fix="nft delete rule inet filter input handle 7",
            confidence=Confidence.LIKELY,
        ),
        Finding(GROUP, "hung", Where(ranks=(0, 1, 2, 3))),
        Finding(RISK, "port 29500 is risky", Where(hosts=("nd0",))),
        Finding(NOTE, "just so you know"),
    )
    assert lines(report) == [
        "nccl-doctor: FAIL: Title of port-shut (nd1 → nd0)",
        "",
        "✗ [port-shut]",
        "  where nd1 → nd0",
        "  seen  connect to 192.168.77.1:29500: no answer in 3 s (likely)",
        "  why   Why port-shut matters",
        "  fix   nft delete rule inet filter input handle 7",
        "",
        "Explained by the above, gone when it is fixed",
        "  · group-hang (ranks 0–1 on nd0, ranks 2–3 on nd1): explained by port-shut: "
        "same place, lower layer",
        "",
        "Warnings",
        "  ! a-risk (nd0): port 29500 is risky",
        "    fix: fix a-risk",
        "",
        "checks: 1 failed · 2 hosts · 4 ranks · 3.5 s · exit code 1",
        "Next: nccl-doctor explain port-shut",
    ]


def test_quiet_is_the_verdict_and_what_to_fix():
    report = report_of(
        Finding(SHM, "64 MiB", Where(hosts=("nd1",))), Finding(RISK, "r", Where(hosts=("nd0",)))
    )
    assert lines(report, quiet=True) == [
        "nccl-doctor: FAIL: Title of shm-small (nd1)",
        "",
        "✗ [shm-small]",
        "  where nd1",
        "  seen  64 MiB",
        "  fix   fix shm-small",
    ]


def test_verbose_shows_passing_checks_and_notes():
    report = report_of(Finding(NOTE, "fyi", Where(hosts=("nd0",))))
    plain, verbose = lines(report), lines(report, verbose=2)
    assert not any("a-note" in line or "shm" in line for line in plain)
    assert "  · a-note (nd0): fyi" in verbose
    assert any(re.match(r"✓ +shm +host +pass +2 hosts +0.0 s", line) for line in verbose)


def test_what_is_not_known_is_always_said():
    hung = Outcome(OutcomeStatus.HUNG, breadcrumbs=({"step": "open /dev/x", "at_s": 0.0},))
    report = report_of(by_host={"nd0": OK, "nd1": hung})
    out = lines(report)
    assert out[0] == (
        "nccl-doctor: UNKNOWN: The examination could not be completed: shm: hung in open /dev/x "
        "(nd1)"
    )
    assert "  ? shm: hung in open /dev/x (nd1)" in out
    assert out[-1] == "Next: run again with -vv to see every check"


def test_absent_hosts_are_counted():
    *_, counted, explain, merge = lines(report_of(absent_nodes=[1]))
    assert "1 of 2 hosts · 2 of 4 ranks" in counted
    assert explain.startswith("Next: ")
    assert merge.startswith("Next: run again on all hosts with --output-dir FOLDER")


@each_row(
    ("where", "words"),
    [
        (Where(hosts=("nd1",), ranks=(2, 3)), "ranks 2–3 on nd1"),
        (Where(ranks=(1,)), "rank 1 on nd0"),
        (Where(hosts=("nd0", "nd1"), ranks=(2,)), "rank 2 on nd1, nd0"),
        (Where(links=(("nd1", "nd0"), ("nd0", "nd1"))), "nd0 ↔ nd1"),
        (Where(nodes=(3, 4)), "nodes 3–4"),
        (Where(hosts=("nd1",), nodes=(1,)), "nd1"),
        (Where(hosts=("nd0",), interfaces=("eth1",)), "eth1 on nd0"),
        (Where(hosts=("nd0",), devices=("cuda:0",)), "nd0, cuda:0"),
        (Where(ranks=(77,)), "rank 77"),
    ],
)
def test_places_in_words(where, words):
    out = lines(report_of(Finding(SHM, "m", where)))
    assert f"  where {words}" in out


def test_many_places_stay_readable():
    hosts = tuple(f"node{i:03}" for i in range(64))
    everyone = Where(ranks=tuple(range(512)))
    report = report_of(
        Finding(SHM, "m", everyone),
        *[Finding(PORT, f"message {i}", Where(hosts=(host,))) for i, host in enumerate(hosts)],
        hosts=hosts,
        nproc=8,
    )
    out = lines(report)
    assert "  where ranks 0–511 on 64 hosts" in out
    assert len(out) < 40
    report = report_of(
        *[Finding(PORT, f"message {i}", Where(hosts=(host,))) for i, host in enumerate(hosts)],
        hosts=hosts,
    )
    assert "        and 58 more like this (all of them in --json)" in lines(report)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_width(width):
    long = Finding(SHM, "word " * 60, Where(hosts=("nd1",)), fix="do this " * 30)
    out = lines(report_of(long), width=width, verbose=2)
    table = [line for line in out if "0.0 s" in line or line.startswith(("--", "    check"))]
    assert all(len(line) <= max(width, 40) for line in out if line not in table)


def test_colour_only_on_demand():
    report = report_of(Finding(SHM, "m", Where(hosts=("nd1",))))
    assert "\033" not in text.render(report)
    assert text.render(report, color=True).startswith("\033[1;31mnccl-doctor: FAIL: Title")
    plain = re.sub(r"\033\[[\d;]*m", "", text.render(report, color=True))
    assert plain == text.render(report)


CAUSE = "nd1's firewall drops connections from nd0 (nft inet filter input)"


def test_the_cause_is_the_first_line_and_the_symptom_stands_once():
    shut = Finding(PORT, "no answer", Where(hosts=("nd1",)), fix="open it", cause=CAUSE)
    report = report_of(shut)
    assert report.summary == CAUSE
    out = lines(report)
    assert out[0] == f"nccl-doctor: FAIL: {CAUSE}"
    assert out[2:4] == ["✗ Title of port-shut [port-shut]", "  where nd1"]
    assert text.render(report).count(PORT.title) == text.render(report).count(CAUSE) == 1
    coloured = text.render(report, color=True).splitlines()
    assert [line for line in coloured if "31m" in line] == [f"\033[1;31m{out[0]}\033[0m"]


def test_of_two_causes_the_first_line_has_one_and_each_is_read_once():
    shut = Finding(PORT, "no answer", Where(hosts=("nd1",)), cause=CAUSE)
    small = Finding(SHM, "1 MiB", Where(hosts=("nd0",)))
    report = report_of(shut, small)
    assert report.summary == f"2 problems on 2 of 2 hosts: {SHM.title} (nd0); {CAUSE}"
    out = lines(report)
    assert out[0] == f"nccl-doctor: FAIL: {SHM.title} (nd0); and 1 more problem"
    assert out[2:4] == ["✗ [shm-small]", "  where nd0"]
    at = out.index(f"✗ {CAUSE} [port-shut]")
    assert out[at + 1] == f"  what  {PORT.title}"


def test_a_command_is_bold_and_what_is_no_command_is_not():
    fix = Fix(Step(shell("nft delete rule x"), on=("nd1",)), alternatives=["ask for it"])
    out = text.render(report_of(Finding(PORT, "m", Where(hosts=("nd1",)), fix=fix)), color=True)
    assert "\033[1mnft delete rule x\033[0m" in out
    assert "  fix   # on nd1" in out
    assert "  fix   or: ask for it" in out


def test_ascii():
    report = report_of(
        Finding(PORT, "caf\u00e9 ≥ 1", Where(links=(("nd1", "nd0"),))),
        Finding(GROUP, "hung", Where(ranks=(0, 1, 2, 3))),
    )
    out = text.render(report, ascii=True, verbose=2)
    assert out.isascii()
    assert "x [port-shut]" in out
    assert "where nd1 -> nd0" in out
    assert "caf\\xe9 >= 1" in out
    assert "ranks 0-1 on nd0" in out


HOSTILE = "a\033[2J\033]0;x\007\n\rb\u202ec\u2028d\x9b31me\x7f\ud800"


def test_nothing_from_outside_reaches_the_terminal():
    host = "nd\033[31m1"
    raised = Outcome(OutcomeStatus.RAISED, reason=HOSTILE)
    bad = kind("bad-words", Layer.HOST)
    report = report_of(
        Finding(bad, HOSTILE, Where(hosts=(host,), interfaces=(HOSTILE,)), fix=HOSTILE),
        Finding(RISK, HOSTILE, Where(hosts=(host,))),
        Finding(NOTE, HOSTILE, Where(hosts=(host,))),
        hosts=("nd0", host),
        by_host={"nd0": OK, host: raised},
    )
    for ascii_ in (False, True):
        out = text.render(report, verbose=2, ascii=ascii_)
        out.encode("utf-8")
        for char in "\033\007\r\u202e\u2028\x9b\x7f":
            assert char not in out
        for line in out.splitlines():
            assert line.isprintable()
    assert "a\\x1b[2J\\x1b]0;x\\x07 b\\u202ec d\\x9b31me\\x7f\\ud800" in out


@pytest.mark.parametrize(
    ("count", "words"), [(1, "check0"), (2, "check0, check1"), (9, "9 other checks")]
)
def test_many_checks_that_were_not_tested_are_only_counted(count: int, words: str) -> None:
    names = [f"check{number}" for number in range(count)]
    assert checks_in_words(names) == words


def test_a_variant_of_a_kind_is_told_in_its_own_words():
    gone = SHM.variant(title="no shm", why="it is gone", fix="mount it")
    assert (gone.code, gone.layer, gone.severity) == (SHM.code, SHM.layer, SHM.severity)
    assert SHM.variant(title="no shm").fix == SHM.fix
    report = report_of(
        Finding(SHM, "1 MiB", Where(hosts=("nd0",))), Finding(gone, "none", Where(hosts=("nd1",)))
    )
    shown = lines(report)
    titles = [line for line in shown if "[shm-small]" in line]
    assert [SHM.title in shown[0], "no shm" in titles[1]] == [True, True]
    assert shown.index(titles[1]) < next(i for i, line in enumerate(shown) if "mount it" in line)
    assert "no shm" in report.summary
