"""Faults that nobody chose: drawn by seed and number, such as can be set up and scored."""

from __future__ import annotations

from collections import Counter

import pytest

from nccl_doctor import registry
from tests.lab.corpus import LAUNCHERS, Case, Cause
from tests.lab.corpus.blind import MECHANISMS, SEED, case, cases
from tests.lab.corpus.figures import Share, figures
from tests.lab.corpus.inject import check
from tests.lab.corpus.score import Score, score


def test_a_case_depends_on_seed_and_number_alone() -> None:
    drawn = list(cases(SEED, 5, first=7))
    assert drawn == [case(SEED, number) for number in range(7, 12)]
    assert drawn != list(cases(SEED + 1, 5, first=7))


def test_every_case_can_be_set_up_and_scored() -> None:
    codes = set(registry.load().kinds)
    drawn = list(cases(1, 400))
    for each in drawn:
        assert each.expect, each.id
        assert set().union(*(cause.codes for cause in each.expect)) <= codes, each
        places = [host for cause in each.expect for host in cause.hosts]
        assert len(places) == len(set(places)), f"two faults on one host: {each}"
        for step in each.inject:
            check(step)
            assert step.get("on", each.names[0]) in each.names
    assert {each.launcher for each in drawn} == set(LAUNCHERS)
    assert Counter(len(each.expect) for each in drawn)[2] > 60
    assert any(each.during for each in drawn)


def test_every_mechanism_is_drawn() -> None:
    alone = [each for each in cases(2, 600) if len(each.expect) == 1]
    titles = {each.title.partition(": ")[2] for each in alone}
    assert len(titles) > len(MECHANISMS)  # each has at least one wording, many have several


def test_what_never_began_is_no_cause() -> None:
    cut = Cause(frozenset(["host-cut-off"]), links=frozenset([("nd1", "nd2")]))
    late = Case("a", "power; shm", expect=(cut, HOST, Cause(frozenset(["x"]), frozenset(["nd0"]))))
    came = late.without(("nd2",))
    assert [cause.hosts for cause in came.expect] == [{"nd0"}]
    assert came.title == "power; shm (did not begin on nd2)"
    assert late.without(()) is late


LINK = Cause(frozenset(["x"]), links=frozenset([("nd0", "nd1")]))
HOST = Cause(frozenset(["y", "z"]), hosts=frozenset(["nd2"]))
BOTH = Cause(frozenset(["y"]), hosts=frozenset(["nd2", "nd1"]))
FAULT = Case("a", "", expect=(LINK, HOST))


def test_precision_recall_and_place() -> None:
    right = (FAULT, Score((LINK, HOST), (), (), ()))
    half = (FAULT, Score((LINK,), (HOST,), (), ()))
    too_much = (FAULT, Score((LINK, BOTH), (), (BOTH,), ("nd1",)))
    alarm = (Case("b", ""), Score((HOST,), (), (HOST,), ("nd2",)))
    found = figures([right, half, too_much, alarm])
    assert found.precision == Share(5, 6)
    assert found.recall == Share(5, 6)
    assert found.place == Share(4, 5)


def test_nothing_is_perfect_and_says_little() -> None:
    found = figures([])
    assert (found.precision.value, found.precision.interval) == (1.0, (0.0, 1.0))


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [(10, 10, 0.7225, 1.0), (0, 10, 0.0, 0.2775), (81, 263, 0.2553, 0.3662)],
)
def test_intervals_are_wilsons(hits: int, of: int, low: float, high: float) -> None:
    """The last row is that of Newcombe 1998, Statistics in Medicine 17, p. 857, method 3."""
    assert Share(hits, of).interval == pytest.approx((low, high), abs=1e-4)


def test_ends_that_nothing_tells_apart_may_stand_for_a_host() -> None:
    links = frozenset([("nd0", "nd1"), ("nd1", "nd0")])
    lost = Cause(frozenset(["x"]), hosts=frozenset(["nd1"]), or_links=links)
    said = Cause(frozenset(["x"]), links=links)
    where = {"hosts": [], "links": [["nd0", "nd1"], ["nd1", "nd0"]], "nodes": []}
    found = {"code": "x", "where": where, "severity": "fail", "explained_by": None}
    report = {"findings": [found]}
    assert score(Case("c", "", expect=(lost,)), report).is_right
    assert figures([(Case("c", "", expect=(lost,)), Score((said,), (), (), ()))]).recall.value == 1
