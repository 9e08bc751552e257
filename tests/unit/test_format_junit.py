"""JUnit XML: read back by two foreign parsers, in the subset that every CI server reads."""

from __future__ import annotations

import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import Finding, Layer, Outcome, OutcomeStatus, Scope, Where
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.report.formats import junit
from tests.support.ci import GROUP, HOSTILE, NOTE, OK, PORT, RISK, SHM, report_of
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, made_check, read_with

junitparser = pytest.importorskip("junitparser")

KNOWN = {  # element → attributes: those that Ant, Jenkins, GitLab and pytest have in common
    "testsuites": {"name", "tests", "failures", "errors", "time"},
    "testsuite": {
        "name",
        "tests",
        "failures",
        "errors",
        "skipped",
        "time",
        "timestamp",
        "hostname",
    },
    "testcase": {"classname", "name", "time"},
    "failure": {"type", "message"},
    "error": {"type", "message"},
    "skipped": {"type", "message"},
    "system-out": set(),
}

Case = tuple[str, str]


def cases(report) -> dict[str, Case]:
    """Name → outcome and message, after all that holds for every file was asserted."""
    text = junit.render(report)
    assert text.isascii()
    assert text.startswith('<?xml version="1.0" encoding="UTF-8"?>\n<testsuites ')
    root = ElementTree.fromstring(text)
    for element in root.iter():
        assert set(element.attrib) <= KNOWN[element.tag]
    (suite,) = root
    assert all(len(case) <= 2 for case in suite)
    (read,) = list(
        junitparser.JUnitXml.fromroot(ElementTree.parse(io.BytesIO(text.encode())).getroot())
    )
    assert isinstance(read, junitparser.TestSuite)
    out: dict[str, Case] = {}
    counts = {junitparser.Failure: 0, junitparser.Error: 0, junitparser.Skipped: 0}
    for case in read:
        name = f"{case.classname} {case.name}"
        assert name not in out
        result = case.result[0] if case.result else None
        if result is not None:
            counts[type(result)] += 1
        kind = "" if result is None else type(result).__name__.lower()
        out[name] = (kind, "" if result is None else result.message)
    assert len(out) == read.tests >= 1
    assert (read.failures, read.errors, read.skipped) == tuple(counts.values())
    verdict = out["nccl_doctor.verdict verdict"][0]
    assert verdict == {0: "", 1: "failure"}.get(report.exit_code, "error")
    return out


def test_healthy():
    assert cases(report_of()) == {
        "nccl_doctor.verdict verdict": ("", ""),
        "host.shm shm[nd0]": ("", ""),
        "host.shm shm[nd1]": ("", ""),
    }


def test_one_case_for_each_check_and_place():
    finding = Finding(SHM, "64 MiB", Where(hosts=("nd1",)), fix="mount it larger")
    report = report_of(finding, Finding(RISK, "so so", Where(hosts=("nd0",))), Finding(NOTE, "fyi"))
    assert cases(report) == {
        "nccl_doctor.verdict verdict": (
            "failure",
            "FAIL: Title of shm-small (nd1)",
        ),
        "host.shm shm[nd0]": ("", ""),
        "host.shm shm[nd1]": ("failure", "Title of shm-small: 64 MiB"),
        "host.shm shm": ("", ""),
    }
    text = junit.render(report)
    for words in ("where: nd1", "seen: 64 MiB", "fix: mount it larger", "warn: Title of a-risk"):
        assert words in text
    assert 'type="shm-small"' in text
    assert 'timestamp="2026-11-21T07:00:00" hostname="nd0"' in text


@pytest.mark.parametrize(
    ("where", "place"),
    [
        (Where(ranks=(2,)), "[nd1]"),
        (Where(ranks=(0, 3)), "[nd0]"),
        (Where(links=(("nd1", "nd0"),)), "[nd1 → nd0]"),
        (Where(hosts=("nd1",), links=(("nd1", "nd0"),)), "[nd1]"),
        (Where(nodes=(7,)), "[node 7]"),
        (Where(ranks=(99,)), ""),
        (Where(), ""),
    ],
)
def test_places(where, place):
    found = cases(report_of(Finding(SHM, "m", where)))
    assert found[f"host.shm shm{place}"] == ("failure", "Title of shm-small: m")
    failures = [name for name, (kind, _) in found.items() if kind == "failure"]
    assert len(failures) == (3 if len(where.ranks) > 1 else 2)  # the verdict is one


def test_ranks_are_gathered_by_host():
    check = made_check("work", scope=Scope.RANK)
    cluster = make_cluster(("a", "b"), 3, check="work", by_rank=dict.fromkeys(range(6), OK))
    report = conclude(cluster, [check], run=RUN)
    assert [*cases(report)][1:] == ["host.work work[a]", "host.work work[b]"]


def test_hosts_of_one_name_and_findings_of_one_place_share_a_case():
    finding = Finding(SHM, "m", Where(hosts=("nd0",)))
    found = cases(report_of(finding, finding.replaced(message="n"), hosts=("nd0", "nd0")))
    assert found["host.shm shm[nd0]"][0] == "failure"


def test_a_symptom_is_skipped_and_names_its_cause():
    cause = Finding(PORT, "no answer", Where(links=(("nd1", "nd0"),)))
    found = cases(report_of(cause, Finding(GROUP, "hung", Where(ranks=(0, 1, 2, 3)))))
    words = "explained by port-shut: same place, lower layer. Title of group-hang: hung"
    assert found["host.shm shm[nd0]"] == found["host.shm shm[nd1]"] == ("skipped", words)
    assert found["host.shm shm[nd1 → nd0]"][0] == "failure"


def test_a_warning_fails_with_strict_only():
    risk = Finding(RISK, "so so", Where(hosts=("nd0",)))
    assert cases(report_of(risk))["host.shm shm[nd0]"] == ("", "")
    strict = report_of(risk, strict=True)
    assert strict.exit_code == 1
    assert cases(strict)["host.shm shm[nd0]"] == ("failure", "Title of a-risk: so so")


def test_unknown_is_an_error_and_what_was_not_tried_is_skipped():
    hung = Outcome(OutcomeStatus.HUNG, breadcrumbs=({"step": "open /dev/x", "at_s": 0.0},))
    report = report_of(by_host={"nd0": OK, "nd1": hung})
    assert report.exit_code == 3
    found = cases(report)
    assert found["host.shm shm"] == ("error", "hung in open /dev/x (nd1)")
    assert "host.shm shm[nd0]" not in found, "half an answer is no pass"
    skipped = Outcome(OutcomeStatus.SKIPPED, reason="no GPU")
    report = report_of(by_host={"nd0": skipped, "nd1": skipped})
    assert report.exit_code == 3
    assert cases(report)["host.shm shm"] == ("skipped", "no GPU")
    report = report_of(Finding(SHM, "m", Where(hosts=("nd0", "nd1"))), others=(later(),))
    assert cases(report)["collective.late late"] == ("skipped", "blocked by shm-small")


def test_a_check_that_broke_is_an_error():
    broken = made_check("shm", error=RuntimeError("oh"))
    cluster = make_cluster(("nd0",), 1, check="shm", by_host={"nd0": OK})
    report = conclude(cluster, [broken], run=RUN)
    assert report.exit_code == 3
    kind, message = cases(report)["host.shm shm"]
    assert kind == "error"
    assert "RuntimeError" in message


def later():
    return made_check("late", Layer.COLLECTIVE, Scope.RANK)


def test_a_host_without_an_answer_does_not_pass_where_another_one_fails():
    died = Outcome(OutcomeStatus.DIED, reason="r")
    report = report_of(
        Finding(SHM, "m", Where(hosts=("nd1",))),
        hosts=("nd0", "nd1", "nd2"),
        by_host={"nd0": died, "nd1": OK, "nd2": OK},
    )
    found = cases(report)
    assert found["host.shm shm[nd2]"] == ("", "")
    assert found.get("host.shm shm[nd0]", ("skipped", ""))[0] != ""


def test_never_an_empty_suite():
    report = report_of()
    nobody = replace(report.cluster, hosts=(), ranks=())
    report = replace(report, checks=(), findings=(), cluster=nobody, exit_code=3)
    assert [*cases(report)] == ["nccl_doctor.verdict verdict"]
    usage = replace(report_of(), exit_code=2, verdict="unknown")
    assert cases(usage)["nccl_doctor.verdict verdict"][0] == "error"


def test_a_finding_of_no_check_has_a_case():
    report = report_of(absent_nodes=[1])
    assert report.exit_code == 3, "fewer ranks than asked for"
    lost = Finding(kind=GROUP, message="lost", where=Where(hosts=("nd0",)), check="gone_since")
    report = replace(report, findings=(*report.findings, lost, lost.replaced(check="")))
    found = cases(report)
    for name in ("group.gone_since", "group.nccl_doctor"):
        assert found[f"{name} group-hang[nd0]"] == ("failure", "Title of group-hang: lost")


def test_names_are_unique_however_long_they_are():
    hosts = tuple("h" * 300 + str(i) for i in range(3))
    report = report_of(*[Finding(SHM, "m", Where(hosts=(host,))) for host in hosts], hosts=hosts)
    assert len(cases(report)) == 4


def test_a_large_cluster_stays_small():
    report = report_of()
    hosts = tuple(f"node{i:04}" for i in range(200))
    checks = tuple(replace(report.checks[0], name=f"c{i}", tested=hosts) for i in range(40))
    found = tuple(Finding(SHM, "m" * 9999, Where(hosts=(host,)), check="c0") for host in hosts)
    # GitLab reads 30 MB: those of more than 2000 hosts that all fail.
    assert len(junit.render(replace(report, checks=checks, findings=found))) < 3e6


def test_hostile_names_and_messages():
    where = Where(hosts=(HOSTILE,), interfaces=(HOSTILE,))
    report = report_of(
        Finding(SHM, HOSTILE, where, fix=HOSTILE),
        Finding(RISK, HOSTILE, Where(links=((HOSTILE, "nd0"),)), fix=HOSTILE),
        hosts=("nd0", HOSTILE),
        by_host={"nd0": OK, HOSTILE: Outcome(OutcomeStatus.RAISED, reason=HOSTILE)},
    )
    found = cases(read_with(report, started=HOSTILE, duration_s=HOSTILE))
    assert len(found) > 2


@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_any_text_is_valid_xml(text):
    report = report_of()
    finding = Finding(SHM, text, Where(hosts=(text,)), fix=text, check="shm")
    assert len(cases(replace(report, findings=(finding,), summary=text))) > 1
