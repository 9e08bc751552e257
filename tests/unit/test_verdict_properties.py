"""What holds of every verdict, whatever is found on whatever cluster."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.api import Finding, Layer, Outcome, OutcomeStatus, Scope, Severity, Where
from nccl_doctor.judge.causes import explain, fold
from nccl_doctor.judge.checks import judge_all
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.findings import Status
from tests.support.clusters import change_rank, make_cluster
from tests.support.reports import RUN, made_check, through_json
from tests.support.verdicts import DEVICE, GROUP, HOST, NOTE, PORT, RANKS, RISK, ROUTE, SPEED

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
    statuses = st.sampled_from((None, *[OutcomeStatus.OK] * 8, *OutcomeStatus))
    for check in checks:
        for rank in cluster.present:
            status = draw(statuses)
            if status is not None:
                facts = {check.name: {"alone": Outcome(status, duration_s=0.1)}}
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


@given(st.lists(found(), max_size=12), st.randoms(use_true_random=False))
def test_folding_does_not_depend_on_order_and_is_done_once(findings, rng: random.Random):
    shuffled = list(findings)
    rng.shuffle(shuffled)
    once = fold(findings)
    assert fold(shuffled) == once
    assert fold(once) == once
    half = len(findings) // 2
    assert fold([*fold(findings[:half]), *fold(findings[half:])]) == once


@given(st.lists(found(), max_size=12), clusters())
def test_explaining_loses_nothing_and_always_ends(findings, made):
    cluster, _ = made
    out = explain(findings, cluster)
    assert fold(f.replaced(explained_by=None, explained_why="") for f in out) == fold(
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
    assert [rank.seat for rank in report.cluster.ranks] == [rank.seat for rank in cluster.ranks]
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
                alone = unit.facts.get(check.name, {}).get("alone")
                assert alone is not None, "somebody is not accounted for"
                assert alone.status in (OutcomeStatus.OK, OutcomeStatus.SKIPPED)
            assert result.tested
    unexplained_fail = [
        f for f in report.findings if f.level is Severity.FAIL and not f.explained_by
    ]
    assert bool(unexplained_fail) == failed
    if failed:
        assert list(report.root_causes) == sorted(unexplained_fail, key=[*report.findings].index)
