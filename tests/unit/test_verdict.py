"""Judge and conclude: pure rules on made-up clusters."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from nccl_doctor.api import Finding, Layer, Outcome, OutcomeStatus, Where
from nccl_doctor.checks.ranks import Ranks
from nccl_doctor.judge.checks import judge_all
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model import kinds as engine
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, made_check, through_json
from tests.support.rows import each_row
from tests.support.verdicts import DEVICE, GROUP, HOST, NAME, NOTE, OK, PORT, RISK, at

INCOMPLETE = [kind for kind in engine.ENGINE_KINDS if kind is not engine.HOSTS_NOT_EXAMINED]

# --- judge ---


def test_a_broken_judge_loses_nothing_it_found_before_and_nobody_elses():
    first = Finding(HOST, "one")
    second = Finding(PORT, "two")
    checks = [
        made_check("bad", finds=[first], error=KeyError("mtu")),
        made_check("good", finds=[second]),
    ]
    findings, broken = judge_all(make_cluster(), checks)
    assert [(f.code, f.check) for f in findings] == [
        ("low-host", "bad"),
        ("check-broke", "bad"),
        ("mid-port", "good"),
    ]
    assert broken == {"bad": "KeyError: 'mtu'"}
    assert findings[1].evidence["at"].startswith("reports.py:")


def test_a_judge_that_yields_no_finding_is_broken():
    findings, broken = judge_all(make_cluster(), [made_check("odd", finds=["text"])])
    assert [f.code for f in findings] == ["check-broke"]
    assert "odd" in broken


ODD: dict[str, tuple[Any, str]] = {
    "a text": ("text", "yielded a value of type str, not a Finding"),
    "nothing": (None, "yielded None, not a Finding"),
    "hosts that are numbers": (Finding(HOST, "m", Where(hosts=(7,))), "in where.hosts, not str"),
    "a host in place of hosts": (Finding(HOST, "m", Where(hosts="nd0")), "where.hosts is a value"),
    "ranks that are texts": (Finding(HOST, "m", Where(ranks=("0",))), "in where.ranks, not int"),
    "links with one end": (Finding(HOST, "m", Where(links=(("nd0",),))), "where.links, not two"),
    "a place that is none": (Finding(HOST, "m", "nd0"), "whose where is a value of type str"),
    "a kind that is none": (Finding("low-host", "m"), "whose kind is a value of type str"),
    "a kind without a layer": (Finding(replace(HOST, layer="host"), "m"), "kind.layer is a value"),
    "a message that is none": (Finding(HOST, 5), "whose message is a value of type int"),
    "a severity that is none": (Finding(HOST, "m", severity="bad"), "whose severity is"),
    "a fix that is none": (Finding(HOST, "m", fix=None), "whose fix is None, not str"),
}
EVIDENCE: dict[str, Any] = {
    "an object": {"x": object()},
    "a set": {"x": {1, 2}},
    "keys of two types": {1: "a", "b": 2},
    "a key that is a pair": {(1, 2): 3},
    "no number": {"x": float("nan")},
    "itself": {"x": 1},
}
EVIDENCE["itself"]["loop"] = EVIDENCE["itself"]


@each_row(("odd", "words"), ODD.values())
def test_a_finding_of_a_wrong_type_costs_nothing_but_itself(odd, words):
    found = [Finding(PORT, "before", at("nd1")), odd, odd, Finding(NAME, "after", at("nd1"))]
    checks = [made_check("odd", finds=found), made_check("good", finds=[Finding(HOST, "m")])]
    cluster = make_cluster(check="odd", by_host={"nd0": OK, "nd1": OK})
    report = through_json(conclude(cluster, checks, run=RUN))
    codes = sorted((finding.code, finding.check) for finding in report.findings)
    assert codes == [
        ("check-broke", "odd"),
        ("low-host", "good"),
        ("low-name", "odd"),
        ("mid-port", "odd"),
    ]
    (broke,) = [finding for finding in report.findings if finding.code == "check-broke"]
    assert broke.message.startswith("`judge` of check odd yielded ")
    assert words in broke.message
    assert report.exit_code == 1  # of what else was found
    alone = conclude(cluster, [made_check("odd", finds=[odd])], run=RUN)
    assert (alone.verdict, alone.exit_code) == ("unknown", 3)


@pytest.mark.parametrize("evidence", EVIDENCE.values(), ids=EVIDENCE)
def test_a_finding_whose_evidence_json_cannot_hold_stands_without_it(evidence):
    finding = Finding(HOST, "m", at("nd1"), evidence)
    cluster = make_cluster(check="odd", by_host={"nd0": OK, "nd1": OK})
    report = through_json(conclude(cluster, [made_check("odd", finds=[finding])], run=RUN))
    by_code = {found.code: found for found in report.findings}
    assert set(by_code) == {"low-host", "check-broke"}
    assert by_code["low-host"].evidence == {}
    assert "low-host with evidence that JSON cannot hold" in by_code["check-broke"].message


def test_places_in_lists_are_as_good():
    place = Where(hosts=["nd0"], links=[["nd0", "nd1"]])
    found, broken = judge_all(
        make_cluster(), [made_check("odd", finds=[Finding(HOST, "m", place)])]
    )
    assert not broken
    assert found[0].where == Where(hosts=("nd0",), links=(("nd0", "nd1"),))


# --- the verdict ---


def report_of(*findings: Finding, problems=(), by_host=None, strict=False, **more):
    facts = {"nd0": OK, "nd1": OK} if by_host is None else by_host
    cluster = make_cluster(check="shm", by_host=facts, **more)
    check = made_check("shm", finds=findings)
    return through_json(
        conclude(cluster, [check], run=RUN, problems=problems, strict=strict),
    )


def test_healthy():
    report = report_of()
    assert (report.verdict, report.exit_code) == ("pass", 0)
    assert report.summary == "No failure found for 4 ranks on 2 hosts; no collective was run"
    assert report.findings == report.root_causes == ()


def test_one_rank():
    report = report_of(hosts=("nd0",), nproc=1, by_host={"nd0": OK})
    assert report.summary == "No failure found for 1 rank on 1 host; no collective was run"


def test_a_failure():
    report = report_of(Finding(HOST, "64 MiB", at("nd1")), Finding(RISK, "risky", at("nd0")))
    assert (report.verdict, report.exit_code) == ("fail", 1)
    assert report.summary == "Title of low-host (nd1)"
    assert [f.code for f in report.root_causes] == ["low-host"]


def test_a_warning_passes_unless_strict():
    warn = Finding(RISK, "risky", at("nd0"))
    report = report_of(warn)
    assert (report.verdict, report.exit_code) == ("warn", 0)
    assert (
        report.summary == "4 ranks on 2 hosts can train with gloo, with 1 warning: Title of a-risk"
    )
    report = report_of(warn, strict=True)
    assert (report.verdict, report.exit_code) == ("fail", 1)
    assert [f.code for f in report.root_causes] == ["a-risk"]


def test_after_select_nobody_is_told_that_the_cluster_is_fit():
    cluster = make_cluster(check="shm", by_host={"nd0": OK, "nd1": OK})
    together = made_check("rounds", Layer.COLLECTIVE, rounds=[])
    run = replace(RUN, options={"select": ["shm"]})
    report = through_json(conclude(cluster, [made_check("shm"), together], run=run))
    assert report.verdict == "pass"
    assert report.summary == "1 check passed for 4 ranks on 2 hosts; the others were not run"
    risky = made_check("shm", finds=[Finding(RISK, "m")])
    report = through_json(conclude(cluster, [risky], run=run))
    assert report.verdict == "warn"
    assert report.summary == (
        "1 warning of 1 check for 4 ranks on 2 hosts: Title of a-risk; the others were not run"
    )
    broken = made_check("shm", finds=[Finding(HOST, "m")])
    assert conclude(cluster, [broken], run=run).summary == "Title of low-host"


def test_worth_knowing_is_no_warning():
    report = report_of(Finding(NOTE, "fyi"), strict=True)
    assert (report.verdict, report.root_causes) == ("pass", ())


@each_row(("kind_", "strict"), product(INCOMPLETE, [False, True]))
def test_an_examination_that_was_not_completed_is_unknown(kind_, strict):
    report = report_of(problems=[Finding(kind_, "m", at("nd1"))], strict=strict)
    assert (report.verdict, report.exit_code) == ("unknown", 3)
    assert [f.code for f in report.root_causes] == [kind_.code]
    assert kind_.title in report.summary


@each_row(("kind_", "strict"), product(engine.BESIDE_KINDS, [False, True]))
def test_what_others_did_beside_the_run_is_a_warning_and_changes_no_verdict(kind_, strict):
    report = through_json(report_of(problems=[Finding(kind_, "m")], strict=strict))
    assert (report.verdict, report.exit_code) == ("pass", 0)
    assert [(f.code, f.level.value) for f in report.root_causes] == [(kind_.code, "warn")]


def test_a_run_that_was_stopped_blames_nobody_and_says_what_is_certain():
    words = "stopped after 5.7 s by SIGINT; node 1 had not signed in yet"
    problems = [Finding(engine.RUN_INTERRUPTED, words)]
    cluster = replace(make_cluster(("nd0",), check="shm", by_host={"nd0": OK}, complete=False))
    cluster = replace(cluster, nnodes=2, world_size=4)
    checks = [made_check("shm"), Ranks()]
    report = through_json(conclude(cluster, checks, run=RUN, problems=problems))
    assert (report.verdict, report.exit_code) == ("unknown", 3)
    assert report.summary == f"The examination could not be completed: {words}"
    assert [(f.code, f.where) for f in report.findings] == [("run-interrupted", Where())]
    checks[0] = made_check("shm", finds=[Finding(HOST, "m", at("nd0"))])
    report = through_json(conclude(cluster, checks, run=RUN, problems=problems))
    assert (report.verdict, report.exit_code) == ("fail", 1)
    assert [(f.code, f.where.hosts) for f in report.root_causes] == [(HOST.code, ("nd0",))]
    assert words in [f.message for f in report.findings]


def test_a_host_on_its_own_never_passes():
    report = report_of(complete=False)
    assert (report.verdict, report.exit_code) == ("unknown", 3)
    assert "the partial report of one host" in report.summary
    assert report_of(Finding(HOST, "m", at("nd0")), complete=False).verdict == "fail"


def test_a_host_that_was_to_be_examined_alone_may_pass_but_is_not_called_fit():
    cluster = make_cluster(("nd0",), check="shm", by_host={"nd0": OK}, complete=False)
    report = through_json(conclude(cluster, [made_check("shm")], run=replace(RUN, alone=True)))
    assert (report.verdict, report.exit_code) == ("pass", 0)
    assert report.summary == "No failure found on this host alone; other hosts were not examined"
    risky = made_check("shm", finds=[Finding(RISK, "m")])
    report = through_json(conclude(cluster, [risky], run=replace(RUN, alone=True)))
    assert report.verdict == "warn"
    assert "but 1 warning: Title of a-risk" in report.summary


def test_nothing_measured_is_not_a_pass():
    report = conclude(make_cluster(), [], run=RUN)
    assert (report.verdict, report.exit_code) == ("unknown", 3)
    assert "nothing was measured" in report.summary
    skip = Outcome(OutcomeStatus.SKIPPED, reason="no GPU")
    assert report_of(by_host={"nd0": skip, "nd1": skip}).verdict == "unknown"


def test_a_gap_is_unknown_and_said_in_one_line():
    raised = Outcome(OutcomeStatus.RAISED, reason="OSError: [Errno 5]\nInput/output error")
    report = report_of(by_host={"nd0": OK, "nd1": raised})
    assert (report.verdict, report.exit_code) == ("unknown", 3)
    assert "shm: raised: OSError" in report.summary
    assert "\n" not in report.summary
    text = 'Traceback (most recent call last):\n  File "a.py", line 1\nOSError: [Errno 5]'
    raised = Outcome(OutcomeStatus.RAISED, reason=text)
    report = report_of(by_host={"nd0": OK, "nd1": raised})
    assert "shm: raised: OSError: [Errno 5] (nd1)" in report.summary


def test_what_was_ignored_is_neither_a_cause_nor_an_explanation():
    cluster = make_cluster(check="shm", by_host={"nd0": OK, "nd1": OK})
    checks = [
        made_check("shm", finds=[Finding(HOST, "", at("nd1"))]),
        made_check("coll", Layer.GROUP, finds=[Finding(GROUP, "", at("nd1"))]),
    ]
    report = conclude(cluster, checks, run=RUN, wanted=lambda code: code != "low-host")
    assert [(f.code, f.explained_by) for f in report.findings] == [("top-group", None)]


def test_root_causes_come_most_important_first():
    report = report_of(
        Finding(PORT, "b", at("nd0")),
        Finding(HOST, "a", at("nd1")),
        Finding(DEVICE, "c", at("nd0", "nd1")),
    )
    assert [f.code for f in report.root_causes] == ["low-host", "mid-port", "up-device"]
