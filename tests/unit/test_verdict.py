"""Judge, fold, explain, conclude: pure rules on made-up clusters."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_doctor import kinds as engine
from nccl_doctor.api import (
    Cluster,
    Confidence,
    Finding,
    Layer,
    Outcome,
    OutcomeStatus,
    Round,
    Scope,
    Severity,
    Where,
)
from nccl_doctor.model import Status
from nccl_doctor.verdict import conclude, judge_all
from nccl_doctor.verdict.causes import explain, fold
from nccl_doctor.verdict.status import check_results
from tests.clusters import change_rank, make_cluster
from tests.reports import RUN, kind, made_check, through_json

HOST = kind("low-host", Layer.HOST)
NAME = kind("low-name", Layer.NAME)
ROUTE = kind("mid-route", Layer.ROUTE)
PORT = kind("mid-port", Layer.PORT)
RANKS = kind("host-gone", Layer.RANKS)
DEVICE = kind("up-device", Layer.DEVICE)
GROUP = kind("top-group", Layer.GROUP)
SPEED = kind("slow-link", Layer.SPEED, Severity.WARN)
NOTE = kind("a-note", Layer.SPEED, Severity.INFO)
RISK = kind("a-risk", Layer.ROUTE, Severity.WARN)


def at(*hosts: str, ranks: tuple[int, ...] = (), links: tuple[tuple[str, str], ...] = ()) -> Where:
    return Where(hosts=hosts, ranks=ranks, links=links)


def explained(*findings: Finding, cluster: Cluster | None = None) -> dict[str, str | None]:
    cluster = cluster or make_cluster(("nd0", "nd1", "nd2"))
    return {f.code: f.explained_by for f in explain(findings, cluster)}


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


# --- fold ---


def test_the_same_fault_on_many_ranks_is_one_finding():
    parts = [Finding(HOST, "64 MiB", at(f"nd{i // 2}", ranks=(i,)), {"rank": i}) for i in range(4)]
    (one,) = fold(reversed(parts))
    assert one.where == at("nd0", "nd1", ranks=(0, 1, 2, 3))
    assert one.evidence == {"each": [{"rank": i} for i in range(4)]}


def test_equal_evidence_is_kept_once():
    (one,) = fold([Finding(HOST, "m", at(h), {"free": 1}) for h in ("nd0", "nd1")])
    assert one.evidence == {"free": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"message": "other"},
        {"severity": Severity.WARN},
        {"fix": "other"},
        {"confidence": Confidence.LIKELY},
        {"explained_by": "mid-port"},
        {"kind": PORT},
    ],
)
def test_findings_that_say_something_else_stay_apart(change):
    one = Finding(HOST, "m", at("nd0"))
    assert len(fold([one, one.replaced(where=at("nd1"), **change)])) == 2


def test_evidence_that_is_not_json_is_not_a_reason_to_lose_a_finding():
    (one,) = fold([Finding(HOST, "m", evidence={"when": {1, 2}})])
    assert "1" in json.dumps(one.evidence)


# --- explain ---


@pytest.mark.parametrize(
    ("low", "high"),
    [
        pytest.param(Where(), at("nd1"), id="nowhere is everywhere"),
        pytest.param(at("nd1"), at("nd1"), id="host covers itself"),
        pytest.param(at("nd1"), at("nd1", ranks=(2, 3)), id="host covers its ranks"),
        pytest.param(at("nd1"), at(ranks=(3,)), id="rank is known to be there"),
        pytest.param(at(ranks=(2, 3)), at("nd1"), id="all ranks cover the host"),
        pytest.param(at("nd1"), at(links=(("nd0", "nd1"),)), id="host covers its links"),
        pytest.param(at(links=(("nd0", "nd1"),)), at(links=(("nd1", "nd0"),)), id="link both ways"),
        pytest.param(Where(nodes=(1,)), at("nd1"), id="node is the host"),
    ],
)
def test_a_lower_failure_explains_what_lies_in_its_place(low, high):
    got = explained(Finding(HOST, "", low), Finding(DEVICE, "", high))
    assert got == {"low-host": None, "up-device": "low-host"}


@pytest.mark.parametrize(
    ("low", "high"),
    [
        pytest.param(at("nd1"), at("nd0"), id="other host"),
        pytest.param(at("nd1"), at("nd0", "nd1"), id="one of two hosts"),
        pytest.param(at("nd1"), Where(), id="everywhere"),
        pytest.param(at("nd1", ranks=(2,)), at("nd1", ranks=(3,)), id="host beside a rank"),
        pytest.param(at("nd1", ranks=(2,)), at("nd1"), id="one rank of a host"),
        pytest.param(at(links=(("nd0", "nd1"),)), at("nd1"), id="a link is not its end"),
        pytest.param(at(links=(("nd0", "nd1"),)), at(links=(("nd0", "nd2"),)), id="other link"),
    ],
)
def test_a_lower_failure_elsewhere_explains_nothing(low, high):
    got = explained(Finding(HOST, "", low), Finding(DEVICE, "", high))
    assert got == {"low-host": None, "up-device": None}


def test_one_bad_member_explains_its_whole_group():
    got = explained(
        Finding(HOST, "", at("nd1")), Finding(GROUP, "", at("nd0", "nd1", ranks=(0, 1, 2, 3)))
    )
    assert got["top-group"] == "low-host"


def test_a_group_elsewhere_is_not_explained():
    got = explained(Finding(HOST, "", at("nd2")), Finding(GROUP, "", at(ranks=(0, 1))))
    assert got["top-group"] is None


def test_the_lowest_layer_is_the_cause():
    got = explained(
        Finding(PORT, "", at("nd1")), Finding(GROUP, "", at("nd1")), Finding(NAME, "", at("nd1"))
    )
    assert got == {"low-name": None, "mid-port": "low-name", "top-group": "low-name"}


def test_the_same_layer_explains_nothing():
    other = kind("other-host", Layer.HOST)
    assert explained(Finding(HOST, "", at("nd1")), Finding(other, "", at("nd1"))) == {
        "low-host": None,
        "other-host": None,
    }


def test_a_warning_never_explains_a_failure_and_only_symptoms_otherwise():
    risk = Finding(RISK, "", at("nd1"))
    assert explained(risk, Finding(GROUP, "", at("nd1")))["top-group"] is None
    warned = kind("up-warn", Layer.DEVICE, Severity.WARN)
    assert explained(risk, Finding(warned, "", at("nd1")))["up-warn"] is None
    assert explained(risk, Finding(SPEED, "", at("nd1")))["slow-link"] == "a-risk"
    assert explained(Finding(RISK, ""), Finding(SPEED, "", at("nd1")))["slow-link"] is None


def test_what_is_only_worth_knowing_neither_explains_nor_is_explained():
    low_note = kind("low-note", Layer.LAUNCH, Severity.INFO)
    got = explained(
        Finding(HOST, "", at("nd1")),
        Finding(NOTE, "", at("nd1")),
        Finding(low_note, "", at("nd1")),
    )
    assert got == {"low-note": None, "low-host": None, "a-note": None}


def test_a_judge_knows_better_than_the_layers():
    got = explained(
        Finding(HOST, "", at("nd1")),
        Finding(PORT, "", at("nd1")),
        Finding(GROUP, "", at("nd1"), explained_by="mid-port"),
    )
    assert got["top-group"] == "mid-port"


def test_a_cause_that_nobody_found_is_no_cause():
    assert explained(Finding(PORT, "", explained_by="gone"))["mid-port"] is None


def test_a_cause_is_at_least_as_severe():
    got = explained(Finding(RISK, "", at("nd0")), Finding(PORT, "", explained_by="a-risk"))
    assert got["mid-port"] is None


def test_causes_never_go_in_a_circle():
    got = explained(
        Finding(PORT, "", at("nd1"), explained_by="top-group"),
        Finding(GROUP, "", at("nd1")),
    )
    assert got == {"mid-port": "top-group", "top-group": None}
    assert explained(Finding(PORT, "", explained_by="mid-port")) == {"mid-port": None}


# --- what became of each check ---

OK = {"x": 1}


def result_of(check, cluster, findings=(), **more):
    (result,) = check_results(cluster, [check], list(findings), **more)
    return result


def test_pass_needs_everybody():
    check = made_check("shm")
    cluster = make_cluster(check="shm", by_host={"nd0": OK, "nd1": OK})
    result = result_of(check, cluster)
    assert (result.status, result.tested, result.reason) == (Status.PASS, ("nd0", "nd1"), "")
    cluster = make_cluster(check="shm", by_host={"nd0": OK})
    result = result_of(check, cluster)
    assert (result.status, result.tested) == (Status.UNKNOWN, ("nd0",))
    assert result.reason == "no outcome (nd1)"


@pytest.mark.parametrize("status", ["raised", "hung", "died", "silent", "untested"])
def test_what_was_not_observed_is_unknown(status):
    bad = Outcome(
        OutcomeStatus(status), reason="because", breadcrumbs=({"step": "barrier", "at_s": 1.0},)
    )
    check = made_check("gpu", scope=Scope.RANK)
    cluster = make_cluster(check="gpu", by_rank={0: OK, 1: OK, 2: bad, 3: bad})
    result = result_of(check, cluster)
    assert result.status is Status.UNKNOWN
    assert result.tested == ("0", "1")
    assert "ranks 2–3" in result.reason
    assert "because" in result.reason
    assert ("barrier" in result.reason) == (status in ("hung", "died"))


def test_what_a_lower_failure_covers_is_blocked_by_it():
    check = made_check("gpu", Layer.DEVICE, Scope.RANK)
    hung = Outcome(OutcomeStatus.HUNG)
    cluster = make_cluster(check="gpu", by_rank={0: OK, 1: OK, 2: hung, 3: hung})
    result = result_of(check, cluster, [Finding(HOST, "", at("nd1"))])
    assert (result.status, result.reason) == (Status.BLOCKED, "blocked by low-host")
    result = result_of(check, cluster, [Finding(HOST, "", at("nd0"))])
    assert result.status is Status.UNKNOWN
    result = result_of(check, cluster, [Finding(RISK, "", at("nd1"))])
    assert result.status is Status.UNKNOWN


def test_an_absent_host_blocks_what_should_have_run_there():
    check = made_check("shm")
    cluster = make_cluster(check="shm", by_host={"nd0": OK}, absent_nodes=[1])
    assert result_of(check, cluster).reason == "never signed in (node 1)"
    gone = Finding(RANKS, "", Where(nodes=(1,)))
    result = result_of(check, cluster, [gone])
    assert (result.status, result.reason) == (Status.BLOCKED, "blocked by host-gone")
    assert result.tested == ("nd0",)


def test_a_group_is_blocked_by_one_bad_member():
    check = made_check(
        "coll", Layer.COLLECTIVE, Scope.RANK, rounds=[Round("all", ((0, 1, 2, 3),), 5.0)]
    )
    hung = Outcome(OutcomeStatus.HUNG)
    cluster = make_cluster(check="coll", by_rank=dict.fromkeys(range(4), hung), round_name="all")
    result = result_of(check, cluster, [Finding(HOST, "", at("nd1", ranks=(3,)))])
    assert (result.status, result.reason) == (Status.BLOCKED, "blocked by low-host")


def test_a_round_that_was_never_held_is_unknown():
    check = made_check("coll", Layer.COLLECTIVE, Scope.RANK, rounds=[Round("all", ((0, 1),), 5.0)])
    cluster = make_cluster(check="coll", by_rank={0: OK, 1: OK}, round_name="first")
    result = result_of(check, cluster)
    assert (result.status, result.reason) == (Status.UNKNOWN, "no outcome of all (ranks 0–1)")


def test_together_with_nobody_is_skipped_but_not_where_somebody_is_absent():
    check = made_check("wall", rounds=[])
    assert result_of(check, make_cluster(("nd0",))).status is Status.SKIPPED
    assert result_of(check, make_cluster(absent_nodes=[1])).status is Status.UNKNOWN


def test_a_plan_that_breaks_is_unknown():
    check = made_check("coll", rounds=[])
    type(check).plan = lambda self, cluster: 1 / 0
    result = result_of(check, make_cluster())
    assert result.status is Status.UNKNOWN
    assert "plan raised ZeroDivisionError" in result.reason


def test_skipped_only_where_all_is_skipped():
    skip = Outcome(OutcomeStatus.SKIPPED, reason="no GPU")
    check = made_check("gpu")
    result = result_of(check, make_cluster(check="gpu", by_host={"nd0": skip, "nd1": skip}))
    assert (result.status, result.reason) == (Status.SKIPPED, "no GPU")
    result = result_of(check, make_cluster(check="gpu", by_host={"nd0": skip, "nd1": OK}))
    assert (result.status, result.tested) == (Status.PASS, ("nd1",))


def test_what_the_engine_did_not_run():
    check = made_check("shm")
    assert result_of(check, make_cluster(), skipped={"shm": "needs --level full"}) == replace(
        result_of(check, make_cluster()), status=Status.SKIPPED, reason="needs --level full"
    )
    result = result_of(check, make_cluster(), blocked={"shm": "port-blocked"})
    assert (result.status, result.reason) == (Status.BLOCKED, "blocked by port-blocked")


def test_a_group_held_back_by_the_engine_is_blocked_by_what_it_names():
    held = Outcome(OutcomeStatus.UNTESTED, reason="blocked by mid-port")
    check = made_check("coll", Layer.COLLECTIVE, Scope.RANK, rounds=[Round("a", ((0, 1),), 5)])
    cluster = make_cluster(check="coll", by_rank={0: held, 1: held}, round_name="a")
    result = result_of(check, cluster, [Finding(PORT, "", at(links=(("x", "y"),)))])
    assert (result.status, result.reason) == (Status.BLOCKED, "blocked by mid-port")
    assert result_of(check, cluster).status is Status.UNKNOWN


def test_unknown_outweighs_a_warning_and_a_failure_outweighs_both():
    cluster = make_cluster(check="shm", by_host={"nd0": OK})
    warn = Finding(RISK, "", at("nd0"), check="shm")
    assert result_of(made_check("shm"), cluster, [warn]).status is Status.UNKNOWN
    fail = Finding(HOST, "", at("nd0"), check="shm")
    result = result_of(made_check("shm"), cluster, [warn, fail])
    assert result.status is Status.FAIL
    assert "low-host" in result.reason
    assert "no outcome (nd1)" in result.reason


def test_a_broken_judge_is_unknown():
    cluster = make_cluster(check="shm", by_host={"nd0": OK, "nd1": OK})
    result = result_of(made_check("shm"), cluster, broken={"shm": "KeyError: 'x'"})
    assert (result.status, result.reason) == (Status.UNKNOWN, "KeyError: 'x'")


def test_time_is_the_slowest_of_each_round():
    check = made_check("shm")
    slow = Outcome(OutcomeStatus.OK, facts=OK, duration_s=2.0)
    fast = Outcome(OutcomeStatus.OK, facts=OK, duration_s=0.5)
    cluster = make_cluster(check="shm", by_host={"nd0": slow, "nd1": fast})
    assert result_of(check, cluster).duration_s == 2.0


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
    assert report.summary == "4 ranks on 2 hosts are fit to train with gloo"
    assert report.findings == report.root_causes == ()


def test_one_rank_is_fit_too():
    report = report_of(hosts=("nd0",), nproc=1, by_host={"nd0": OK})
    assert report.summary == "1 rank on 1 host is fit to train with gloo"


def test_a_failure():
    report = report_of(Finding(HOST, "64 MiB", at("nd1")), Finding(RISK, "risky", at("nd0")))
    assert (report.verdict, report.exit_code) == ("fail", 1)
    assert report.summary == "1 problem on 1 of 2 hosts: Title of low-host"
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


def test_worth_knowing_is_no_warning():
    report = report_of(Finding(NOTE, "fyi"), strict=True)
    assert (report.verdict, report.root_causes) == ("pass", ())


@pytest.mark.parametrize("kind_", engine.ENGINE_KINDS, ids=lambda k: k.code)
@pytest.mark.parametrize("strict", [False, True])
def test_an_examination_that_was_not_completed_is_unknown(kind_, strict):
    report = report_of(problems=[Finding(kind_, "m", at("nd1"))], strict=strict)
    assert (report.verdict, report.exit_code) == ("unknown", 3)
    assert [f.code for f in report.root_causes] == [kind_.code]
    assert kind_.title in report.summary


def test_a_host_on_its_own_never_passes():
    report = report_of(complete=False)
    assert (report.verdict, report.exit_code) == ("unknown", 3)
    assert "only one host's own view" in report.summary
    assert report_of(Finding(HOST, "m", at("nd0")), complete=False).verdict == "fail"


def test_a_host_that_was_to_be_examined_alone_may_pass_but_is_not_called_fit():
    cluster = make_cluster(("nd0",), check="shm", by_host={"nd0": OK}, complete=False)
    report = through_json(conclude(cluster, [made_check("shm")], run=RUN, alone=True))
    assert (report.verdict, report.exit_code) == ("pass", 0)
    assert report.summary == "Nothing stops this host by itself; no other host was met"
    risky = made_check("shm", finds=[Finding(RISK, "m")])
    report = through_json(conclude(cluster, [risky], run=RUN, alone=True))
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


# --- properties, on made-up clusters ---

LAYERS = (HOST, ROUTE, PORT, RANKS, DEVICE, GROUP, SPEED, NOTE, RISK)
NAMES = ("nd0", "nd1", "nd2", "nd3")


@st.composite
def wheres(draw):
    nowhere = draw(st.integers(0, 4)) == 0
    names = st.sampled_from((*NAMES, "elsewhere"))
    if nowhere:
        return Where()
    return Where(
        hosts=tuple(sorted(draw(st.sets(names, max_size=2)))),
        ranks=tuple(sorted(draw(st.sets(st.integers(0, 9), max_size=3)))),
        links=tuple(sorted(draw(st.sets(st.tuples(names, names), max_size=2)))),
        nodes=tuple(sorted(draw(st.sets(st.integers(0, 4), max_size=1)))),
    )


@st.composite
def found(draw):
    return Finding(
        draw(st.sampled_from(LAYERS)),
        draw(st.sampled_from(("a", "b"))),
        draw(wheres()),
        evidence=draw(st.sampled_from(({}, {"v": 1}, {"v": 2}))),
        severity=draw(st.sampled_from((None, *Severity))),
        explained_by=draw(
            st.sampled_from((None, None, None, "no-such-code", *(kind.code for kind in LAYERS)))
        ),
    )


@st.composite
def clusters(draw):
    hosts = NAMES[: draw(st.integers(1, 4))]
    nproc = draw(st.integers(1, 2))
    absent = draw(st.sets(st.sampled_from(range(len(hosts))), max_size=2))
    cluster = make_cluster(hosts, nproc, absent_nodes=sorted(absent))
    names = draw(st.lists(st.sampled_from(("one", "two", "three")), unique=True, max_size=3))
    checks = [
        made_check(
            name,
            draw(st.sampled_from(list(Layer))),
            draw(st.sampled_from(list(Scope))),
            finds=draw(st.lists(found(), max_size=4)),
            error=draw(st.sampled_from((None, None, None, ValueError("x")))),
        )
        for name in names
    ]
    statuses = st.sampled_from((None, *["ok"] * 8, *(status.value for status in OutcomeStatus)))
    for check in checks:
        for rank in cluster.present:
            status = draw(statuses)
            if status is not None:
                facts = {check.name: {"alone": {"status": status, "duration_s": 0.1}}}
                seat = rank.seat
                if check.scope is Scope.RANK:
                    mine = {**cluster.ranks[seat].facts, **facts}
                    cluster = change_rank(cluster, seat, facts=mine)
                else:
                    host = cluster.ranks[seat].host
                    told = replace(host, facts={**host.facts, **facts})
                    cluster = replace(
                        cluster,
                        hosts=tuple(told if h.id == host.id else h for h in cluster.hosts),
                        ranks=tuple(
                            replace(r, host=told) if r.host.id == host.id else r
                            for r in cluster.ranks
                        ),
                    )
    return cluster, checks


def contains(outer: Where, inner: Where) -> bool:
    return (outer | inner) == (outer | outer)


@settings(deadline=None, max_examples=60)
@given(st.lists(found(), max_size=12), st.randoms(use_true_random=False))
def test_folding_does_not_depend_on_order_and_is_done_once(findings, rng: random.Random):
    shuffled = list(findings)
    rng.shuffle(shuffled)
    once = fold(findings)
    assert fold(shuffled) == once
    assert fold(once) == once
    half = len(findings) // 2
    assert fold([*fold(findings[:half]), *fold(findings[half:])]) == once


@settings(deadline=None, max_examples=60)
@given(st.lists(found(), max_size=12), clusters())
def test_explaining_loses_nothing_and_always_ends(findings, made):
    cluster, _ = made
    out = explain(findings, cluster)
    assert fold(f.replaced(explained_by=None) for f in out) == fold(
        f.replaced(explained_by=None) for f in findings
    )
    causes: dict[str, set[str]] = {}
    for finding in out:
        if finding.explained_by is not None:
            causes.setdefault(finding.code, set()).add(finding.explained_by)
    assert {c for cause in causes.values() for c in cause} <= {f.code for f in out}
    while causes:  # take away whatever is explained only by what is not explained itself
        ends = [code for code, why in causes.items() if not why & set(causes)]
        assert ends, f"a circle among {causes}"
        for code in ends:
            del causes[code]


@settings(deadline=None, max_examples=60)
@given(clusters())
def test_a_verdict_never_says_more_than_was_seen(made):
    cluster, checks = made
    raw, broken = judge_all(cluster, checks)
    report = through_json(conclude(cluster, checks, run=RUN))
    for finding in raw:
        assert any(
            out.code == finding.code
            and out.message == finding.message
            and contains(out.where, finding.where)
            for out in report.findings
        )
    assert [rank["seat"] for rank in report.ranks] == [rank.seat for rank in cluster.ranks]
    failed = any(f.level is Severity.FAIL for f in report.findings)
    assert (report.verdict == "fail") == failed
    assert (report.exit_code == 0) == (report.verdict in ("pass", "warn"))
    measured = {Status.PASS, Status.WARN, Status.FAIL}
    if report.exit_code == 0:
        assert {result.status for result in report.checks} & measured
        assert all(r.status in {*measured, Status.SKIPPED} for r in report.checks)
        assert not broken
    for check, result in zip(
        sorted(checks, key=lambda c: (c.layer.order, c.name)), report.checks, strict=True
    ):
        assert result.name == check.name
        if result.status is Status.PASS:
            units = cluster.hosts if check.scope is Scope.HOST else cluster.ranks
            for unit in units:
                alone = unit.facts.get(check.name, {}).get("alone", {})
                assert alone.get("status") in ("ok", "skipped"), "somebody is not accounted for"
            assert result.tested
    unexplained_fail = [
        f for f in report.findings if f.level is Severity.FAIL and not f.explained_by
    ]
    assert bool(unexplained_fail) == failed
    if failed:
        assert list(report.root_causes) == sorted(unexplained_fail, key=[*report.findings].index)
