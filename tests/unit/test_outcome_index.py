"""Outcomes of a made-up cluster by check and round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nccl_doctor.model.cluster import Cluster, Outcome, OutcomeStatus
from tests.support.clusters import make_cluster

OK, SKIPPED, DIED = OutcomeStatus.OK, OutcomeStatus.SKIPPED, OutcomeStatus.DIED


def of(*outcomes: dict[str, Outcome]) -> Cluster:
    """A cluster of so many ranks, with these rounds of check `groups`."""
    cluster = make_cluster(("nd0",), len(outcomes))
    facts: list[Any] = [{"groups": rounds} if rounds else {} for rounds in outcomes]
    return replace(cluster, ranks=tuple(replace(r, facts=facts[r.seat]) for r in cluster.ranks))


def test_a_round_has_who_is_good_and_who_is_unlike_and_the_longest_time() -> None:
    partly = Outcome(OK, {"is": 1}, reason="no driver", duration_s=0.5)
    cluster = of(
        {"first": Outcome(OK, {"is": 0}, duration_s=2.0), "second": Outcome(SKIPPED)},
        {"first": partly},
        {"first": Outcome(DIED, signal="SIGSEGV", duration_s=3.0)},
        {},
    )
    first = cluster.held("groups")["first"]
    assert [rank.rank for rank in first.ranks] == [0, 1]
    assert list(first.facts) == [{"is": 0}, {"is": 1}]
    assert [(rank.rank, outcome.status) for rank, outcome in first.unlike] == [(1, OK), (2, DIED)]
    assert first.took_s == 3.0
    assert [(r.rank, facts["is"]) for r, facts in cluster.facts("groups", "first")] == [
        (0, 0),
        (1, 1),
    ]
    assert list(cluster.facts("groups", "second")) == list(cluster.facts("unheard", "first")) == []
    assert [(r.rank, *rest[:2]) for r, *rest in cluster.unfinished()] == [(2, "groups", "first")]


def test_what_hung_or_died_is_all_that_has_ended() -> None:
    raised = Outcome(OutcomeStatus.RAISED, reason="KeyError")
    hung, died = Outcome(OutcomeStatus.HUNG), Outcome(DIED)
    partly = Outcome(OK, reason="no driver")
    rounds = [{"first": each} for each in (died, Outcome(OK), partly, raised, hung)]
    cluster = of(*rounds, {"second": died})
    found = [
        (item.rank.rank, item.round, item.outcome) for item in cluster.ended("groups", "first")
    ]
    assert found == [(0, "first", died), (4, "first", hung)]
    assert list(cluster.ended("groups")) == list(cluster.ended("unheard")) == []


def test_a_look_through_all_finds_the_same_as_a_look_at_one_check() -> None:
    cluster = of({"first": Outcome(OK, {"is": 0})}, {"first": Outcome(DIED)})
    alone, at_once = cluster.held("groups")["first"], replace(cluster)
    at_once.look_through()
    together = at_once.held("groups")["first"]
    assert (together.ranks, together.facts) == (alone.ranks, alone.facts)
    assert together.unlike == alone.unlike


def test_more_facts_of_one_check_leave_what_is_known_of_another() -> None:
    cluster = of({"first": Outcome(OK)})
    known = cluster.held("groups")
    assert cluster.with_more({"collectives"}).held("groups") is known
    assert cluster.with_more({"groups"}).held("groups") is not known


def test_what_more_facts_say_is_in_a_look_through_all() -> None:
    cluster = of({"first": Outcome(OK)}, {"first": Outcome(DIED)})
    assert not list(cluster.held("collectives"))
    cluster.look_through()
    assert not list(cluster.held("collectives"))
    for rank in cluster.ranks:
        rank.facts["collectives"] = {"world": Outcome(OutcomeStatus.HUNG)}  # type: ignore[index]
    later = cluster.with_more({"collectives"})
    assert [(r.rank, *rest[:2]) for r, *rest in later.unfinished()] == [
        (1, "groups", "first"),
        (0, "collectives", "world"),
        (1, "collectives", "world"),
    ]
    assert [item.rank.rank for item in later.ended("collectives", "world")] == [0, 1]
