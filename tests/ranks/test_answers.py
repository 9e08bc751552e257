"""Sign-ins and answers, as rank 0 takes them from a real store: batches of agents, and others."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nccl_doctor.gather.agent.batches import (
    Agents,
    answers_key,
    batch_of_answers,
    batch_of_sign_ins,
)
from nccl_doctor.gather.ends import Deaths, Heartbeats, death_of
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.join import Join
from nccl_doctor.gather.messages import Postings, SignIn
from nccl_doctor.gather.opening import RivalCheck
from nccl_doctor.gather.rounds import Answers
from nccl_doctor.gather.run import prepare
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.model.cluster import Outcome, OutcomeStatus
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.options import Options

pytestmark = pytest.mark.xdist_group("torch")

OK = Outcome(OutcomeStatus.OK, {"seen": True}, duration_s=0.1)
SEATS = (1, 2, 3, 4)
"""Seats 1 to 3 are those of a host with an agent, and 4 that of another host."""


class Head:
    """Rank 0 of five ranks."""

    def __init__(self, port: int) -> None:
        launch = Launch(rank=0, world_size=5)
        self.evidence = EvidenceLog(launch, {}, {})
        for seat in range(5):
            who = SignIn(f"t{seat}", 100 + seat, Launch(rank=seat, world_size=5), "nd", f"k{seat}")
            self.evidence.sign_in(seat, who, 0.0)
        self.box = ControlStore("127.0.0.1", port, timeout_s=5, prefix="answers/")
        run = prepare(Options(), launch, {}, time.monotonic(), logs=False)
        self.deaths = Deaths(self.box, self.evidence)
        quiet = Heartbeats(self.box, self.evidence)
        self.answers = Answers(run, self.box, self.evidence, self.deaths, quiet)
        self.answers.agents.add(1, (1, 2, 3))

    def batch(self, answers: Any, number: int = 0) -> None:
        self.box.put(answers_key(number, 1), answers)

    def single(self, seat: int, answer: Any = None, number: int = 0) -> None:
        self.box.put(f"evidence/{number}/{seat}", OK.to_json() if answer is None else answer)

    def of(self, patience_s: float = 10.0, number: int = 0) -> dict[int, OutcomeStatus]:
        found = self.answers.of(number, SEATS, patience_s, self.deaths.look, {})
        return {seat: outcome.status for seat, outcome in found.items()}

    @property
    def refused(self) -> set[int]:
        return {rank for found in self.evidence.problems() for rank in found.where.ranks}


@pytest.fixture
def head(store_port: int) -> Head:
    return Head(store_port)


def test_one_batch_answers_for_a_host(head: Head) -> None:
    head.batch(batch_of_answers({seat: OK.to_json() for seat in (1, 2, 3)}))
    head.single(4)
    began = time.monotonic()
    assert head.of() == dict.fromkeys(SEATS, OutcomeStatus.OK)
    assert time.monotonic() - began < 1.0
    assert head.answers.agents.of(2) == 1


def test_who_is_not_in_the_batch_answers_alone(head: Head) -> None:
    head.batch(batch_of_answers({seat: OK.to_json() for seat in (1, 3)}))
    head.single(4)
    head.single(2)
    assert head.of() == dict.fromkeys(SEATS, OutcomeStatus.OK)


def test_those_of_an_agent_that_is_lost_are_heard_before_the_round_is_over(head: Head) -> None:
    for seat in SEATS:
        head.single(seat)
    began = time.monotonic()
    assert head.of() == dict.fromkeys(SEATS, OutcomeStatus.OK)
    assert time.monotonic() - began < 3.0
    assert head.answers.agents.of(2) is None, "they are not waited for by the batch again"
    for seat in SEATS:
        head.single(seat, number=1)
    began = time.monotonic()
    assert head.of(number=1) == dict.fromkeys(SEATS, OutcomeStatus.OK)
    assert time.monotonic() - began < 1.0


def test_who_says_nothing_has_no_outcome(head: Head) -> None:
    head.single(4)
    head.single(2)
    assert head.of(2.5) == {2: OutcomeStatus.OK, 4: OutcomeStatus.OK}


def test_nobody_waits_for_one_that_was_killed(head: Head) -> None:
    head.batch(batch_of_answers({seat: OK.to_json() for seat in (1, 3)}))
    head.single(4)
    death = death_of(102, 2, "SIGKILL") | {"host": "k2"}
    head.box.put(f"death/{head.box.add('deaths', 1) - 1}", death)
    began = time.monotonic()
    assert head.of() == dict.fromkeys((1, 3, 4), OutcomeStatus.OK)
    assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("batch", ["nonsense", {"answers": 3}, {}, [1]])
def test_a_batch_that_cannot_be_read_is_refused_for_all_that_it_is_of(
    head: Head, batch: Any
) -> None:
    head.batch(batch)
    head.single(4)
    untested = dict.fromkeys((1, 2, 3), OutcomeStatus.UNTESTED)
    assert head.of() == {4: OutcomeStatus.OK, **untested}
    assert head.refused <= {1, 2, 3}
    assert head.refused


def test_one_bad_answer_in_a_batch_costs_nobody_else_theirs(head: Head) -> None:
    answers = {seat: OK.to_json() for seat in (1, 2, 3)}
    head.batch(batch_of_answers({**answers, 2: {"status": "splendid"}}))
    head.single(4, ["no outcome"])
    assert head.of() == {
        1: OutcomeStatus.OK,
        2: OutcomeStatus.UNTESTED,
        3: OutcomeStatus.OK,
        4: OutcomeStatus.UNTESTED,
    }
    assert head.refused == {2, 4}


def sign_in(rank: int) -> dict[str, Any]:
    return SignIn(f"t{rank}", 100 + rank, Launch(rank=rank, world_size=5), "nd", "k").to_json()


@pytest.mark.parametrize("first", ["the agent", "the rank itself"])
def test_a_rank_that_has_signed_in_by_itself_too_has_the_seat_that_it_knows(
    store_port: int, first: str
) -> None:
    """The agent was stopped, and goes on: its batch may come before that of the rank, or after;
    the third rank has heard of neither.
    """
    launch = Launch(rank=0, world_size=5)
    evidence = EvidenceLog(launch, {}, {})
    box = ControlStore("127.0.0.1", store_port, timeout_s=5, prefix="seats/")
    run = prepare(Options(), launch, {}, time.monotonic(), logs=False)
    deaths, agents = Deaths(box, evidence), Agents()
    doubts = RivalCheck(box, launch, "t0")
    join = Join(
        run, box, evidence, deaths, doubts, posted=Postings(box, is_near=True), agents=agents
    )
    batch, single = batch_of_sign_ins([sign_in(1), sign_in(2)]), sign_in(1)
    batches = [(0, batch), (2, single)] if first == "the agent" else [(0, single), (1, batch)]
    box.add("seats", 3)
    for seat, each in batches:
        box.put(f"seat/{seat}", each)
        assert join.latecomers()
    by_itself = batches[first == "the agent"][0]
    by_batch = 1 if first == "the agent" else 2
    assert {evidence.launches()[seat].rank: seat for seat in evidence.seats} == {
        1: by_itself,
        2: by_batch,
    }
    assert agents.of(by_itself) is None
    assert agents.of(by_batch) == batches[first != "the agent"][0]
    assert deaths.of(by_itself) is None
    assert not list(evidence.problems())
    assert join.latecomers() == set(), "nothing is read twice"
