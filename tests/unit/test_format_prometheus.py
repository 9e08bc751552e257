"""Metrics for the textfile collector: read back by the grammar of the exposition format."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nccl_doctor.api import Finding, Where
from nccl_doctor.report.formats import prometheus
from tests.ci import GROUP, HOSTILE, PORT, RISK, report_of

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL})(?:,{LABEL})*)\}})? (-?\d+(?:\.\d+)?)")


def samples(report) -> dict[tuple[str, ...], float]:
    """(name, label values…) → value; every line of the file is help, type or a sample."""
    text = prometheus.render(report)
    assert text.endswith("\n")
    typed: list[str] = []
    out = {}
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# "):
            word, name, *_ = line[2:].split(" ")
            assert word in ("HELP", "TYPE")
            if word == "TYPE":
                assert name not in typed, "all samples of a metric stand together"
                typed.append(name)
                assert line.endswith(" gauge")
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] == typed[-1]
        key = (match[1], *(value for _, value in re.findall(LABEL, match[2] or "")))
        assert key not in out
        out[key] = float(match[match.lastindex or 0])
    return out


def test_what_is_said():
    report = report_of(
        Finding(PORT, "no answer", Where(links=(("nd1", "nd0"),))),
        Finding(GROUP, "hung", Where(ranks=(0, 1, 2, 3))),
        Finding(RISK, "r", Where(hosts=("nd0",))),
        Finding(RISK, "s", Where(hosts=("nd1",))),
    )
    found = samples(report)
    assert found.pop(("nccl_doctor_info", report.tool["version"])) == 1
    assert found == {
        ("nccl_doctor_verdict", "pass"): 0,
        ("nccl_doctor_verdict", "warn"): 0,
        ("nccl_doctor_verdict", "fail"): 1,
        ("nccl_doctor_verdict", "unknown"): 0,
        ("nccl_doctor_exit_code",): 1,
        ("nccl_doctor_check_status", "shm", "host", "host"): 2,
        ("nccl_doctor_findings", "a-risk", "route", "warn", "false"): 2,
        ("nccl_doctor_findings", "group-hang", "group", "fail", "false"): 1,
        ("nccl_doctor_findings", "port-shut", "port", "fail", "true"): 1,
        ("nccl_doctor_hosts", "expected"): 2,
        ("nccl_doctor_hosts", "reported"): 2,
        ("nccl_doctor_ranks", "expected"): 4,
        ("nccl_doctor_ranks", "reported"): 4,
        ("nccl_doctor_run_timestamp_seconds",): 1795244400,
        ("nccl_doctor_run_duration_seconds",): 3.5,
    }


def test_absent_hosts_are_counted():
    found = samples(report_of(absent_nodes=[1]))
    assert found["nccl_doctor_hosts", "expected"] == 2
    assert found["nccl_doctor_hosts", "reported"] == 1
    assert found["nccl_doctor_ranks", "reported"] == 2


@pytest.mark.parametrize(
    ("started", "seconds"),
    [
        ("2026-11-21T08:00:00+01:00", 1795244400),
        ("2026-11-21T07:00:00.25Z", 1795244400),
        ("2026-13-41T07:00:00+00:00", None),
        ("yesterday", None),
    ],
)
def test_when(started, seconds):
    report = report_of()
    found = samples(replace(report, run={**report.run, "started": started}))
    assert found.get(("nccl_doctor_run_timestamp_seconds",)) == seconds


def test_hostile_text_stays_in_its_label():
    report = report_of()
    (check,) = report.checks
    for name in (HOSTILE, 'a"b\\c\nd'):
        odd = replace(
            report,
            tool={"version": name},
            checks=(check, replace(check, name=name), replace(check, name=name)),
            run={**report.run, "started": name, "duration_s": float("nan")},
        )
        prometheus.render(odd).encode()
        more, fewer = 1, 2  # a check; neither a start nor a duration
        assert len(samples(odd)) == len(samples(report)) + more - fewer
