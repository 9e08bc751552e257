"""Batches of agents, as rank 0 reads them; whatever is in them."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from nccl_doctor.gather.agent.batches import (
    AGENT_RANKS_MAX,
    Agents,
    answers_in,
    batch_of_answers,
    batch_of_sign_ins,
    is_of_agent,
    refused_in,
    sign_ins_in,
)
from nccl_doctor.gather.agent.sharing import Known
from nccl_doctor.gather.envelope import BadMessage, NotAuthentic
from nccl_doctor.model.cluster import Outcome, OutcomeStatus, Trail
from nccl_doctor.model.codec import Node
from nccl_doctor.model.report import outcome_from_json


def test_a_batch_holds_the_sign_ins_of_seats_in_a_row() -> None:
    assert sign_ins_in(7, batch_of_sign_ins(["a", "b"]), Known()) == [(7, "a"), (8, "b")]


@pytest.mark.parametrize("batch", [{"token": "x"}, [], None, 3, "sign_ins"])
def test_what_is_no_batch_of_several_is_one_sign_in(batch: Any) -> None:
    assert sign_ins_in(7, batch, Known()) == [(7, batch)]


@pytest.mark.parametrize("sign_ins", [[], ["a"] * (AGENT_RANKS_MAX + 1), {"0": "a"}, None])
def test_a_batch_of_nobody_or_of_too_many_is_refused(sign_ins: Any) -> None:
    with pytest.raises(ValueError, match="seat 7"):
        sign_ins_in(7, {"sign_ins": sign_ins}, Known())


def test_all_that_a_batch_claims_are_refused_with_it() -> None:
    error = NotAuthentic("no key", batch_of_sign_ins([{"rank": 1}, {"rank": 2}]))
    refused = refused_in(7, error)
    assert [(seat, type(each), each.value) for seat, each in refused] == [
        (7, NotAuthentic, {"rank": 1}),
        (8, NotAuthentic, {"rank": 2}),
    ]
    assert {str(each) for _, each in refused} == {"no key"}
    assert refused_in(7, BadMessage("damaged"))[0][0] == 7
    many = BadMessage("no", {"sign_ins": [{}] * 1000})
    assert refused_in(7, many) == [(7, many)]


def test_a_batch_answers_for_some_seats() -> None:
    batch = batch_of_answers({7: {"status": "ok"}, 9: {"status": "hung"}, 200: {}})
    assert answers_in(batch, 7, (7, 8, 9), Known()) == {7: {"status": "ok"}, 9: {"status": "hung"}}


@pytest.mark.parametrize("batch", [None, [], {}, {"answers": []}, {"answers": None}, "answers"])
def test_what_is_no_batch_of_answers_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="seat 7"):
        answers_in(batch, 7, (7, 8), Known())


def test_an_agent_may_have_one_rank() -> None:
    assert is_of_agent(batch_of_sign_ins(["a"]))
    assert not is_of_agent({"token": "a"})
    assert not is_of_agent(["sign_ins"])


def test_those_of_a_removed_agent_answer_by_themselves() -> None:
    agents = Agents()
    agents.add(4, (4, 5, 6))
    agents.add(9, (9,))
    assert [agents.of(seat) for seat in (3, 4, 6, 9)] == [None, 4, 4, 9]
    agents.remove(4)
    assert [agents.of(seat) for seat in (4, 6)] == [None, None]


# -- what ranks say in the same words ------------------------------------------------------------

CRUMBS = [{"step": "connect", "at_s": 0.5}, {"step": "all_reduce", "bytes": 8, "at_s": 1}]
OUTCOME = {"status": "ok", "facts": {"mtu": 1500, "names": ["a"]}, "breadcrumbs": CRUMBS}


def of_host(number: int, **facts: Any) -> dict[str, Any]:
    """Sign-in of a host, with facts of its own."""
    return {"rank": number, "facts": {"link": {"alone": {**OUTCOME, "facts": facts}}}}


def crossed(batch: Any) -> Any:
    """A batch as it comes out of the store."""
    return json.loads(json.dumps(batch))


def read(data: Any) -> Outcome:
    return outcome_from_json(Node("seat 7", data))


def test_what_all_say_stands_once_in_a_batch_and_in_memory() -> None:
    batches = [batch_of_sign_ins([of_host(1, mtu=9000), of_host(2, mtu=9000)]) for _ in range(2)]
    assert all(json.dumps(batch).count("9000") == 1 for batch in batches)
    known = Known()
    found = [
        read(data["facts"]["link"]["alone"])
        for batch in batches
        for _, data in sign_ins_in(7, crossed(batch), known)
    ]
    assert [each.facts for each in found] == [{"mtu": 9000}] * 4
    assert len({id(each.facts) for each in found}) == 1
    assert [list(each.breadcrumbs) for each in found] == [CRUMBS] * 4
    assert found[0] == Outcome.from_json({**OUTCOME, "facts": {"mtu": 9000}})


def test_what_one_alone_says_in_a_round_is_no_text() -> None:
    others = {seat: {**OUTCOME, "facts": {"rank": seat}} for seat in (7, 8)}
    batch = batch_of_answers({**others, 9: OUTCOME, 10: OUTCOME, 11: None, 12: {"status": 3}})
    assert [type(batch["answers"][str(seat)]["facts"]) for seat in (7, 9, 10)] == [dict, int, int]
    found = answers_in(crossed(batch), 7, range(7, 13), Known())
    assert [read(found[seat]).facts for seat in (7, 8, 9)] == [
        {"rank": 7},
        {"rank": 8},
        OUTCOME["facts"],
    ]
    assert (found[11], found[12]) == (None, {"status": 3})


@pytest.mark.parametrize("facts", [7, -1, True, 0, 1, "0", 0.0])
@pytest.mark.parametrize("texts", [None, [], [3, "[" * 90], ["3", "["], {"0": "{}"}])
def test_a_number_of_no_facts_is_refused_where_it_is_read(facts: Any, texts: Any) -> None:
    batch = {"answers": {"7": {"status": "ok", "facts": facts}}, "texts": texts}
    (data,) = answers_in(batch, 7, (7,), Known()).values()
    with pytest.raises(ValueError, match=r"seat 7\.facts is"):
        read(data)


@pytest.mark.parametrize(
    "crumbs",
    [
        {"steps": 0},
        {"steps": 0, "at_s": [1.0]},
        {"steps": 0, "at_s": [1.0, "2"]},
        {"steps": 1, "at_s": [1.0]},
        {"steps": 2, "at_s": []},
        {"steps": 9, "at_s": []},
        {"steps": None, "at_s": None},
        3,
    ],
)
def test_steps_without_their_times_are_refused_where_they_are_read(crumbs: Any) -> None:
    texts = ['[{"step": "a"}, {"step": "b"}]', "[1]", "{}"]
    batch = {"answers": {"7": {"status": "ok", "breadcrumbs": crumbs}}, "texts": texts}
    (data,) = answers_in(batch, 7, (7,), Known()).values()
    with pytest.raises(ValueError, match=r"seat 7\.breadcrumbs is"):
        read(data)


def test_a_trail_is_read_like_a_list_of_breadcrumbs() -> None:
    trail = Trail([{"step": "a"}, {"step": "b", "bytes": 8}], [0, 2.5])
    assert trail == ({"step": "a", "at_s": 0.0}, {"step": "b", "bytes": 8, "at_s": 2.5})
    assert list(trail[1:]) == [trail[-1]] == [{"step": "b", "bytes": 8, "at_s": 2.5}]
    assert trail != Trail([{"step": "a"}], [0])
    assert trail != "ab"
    ended = Outcome(OutcomeStatus.HUNG, breadcrumbs=trail)
    assert ended.last_step == "b"
    assert Outcome.from_json(ended.to_json()) == ended
    assert pickle.loads(pickle.dumps(ended)) == ended


@pytest.mark.parametrize("status", [[], {}, ["ok"], None, 3, True, "splendid"])
def test_an_ending_that_is_none_is_refused_in_words(status: Any) -> None:
    with pytest.raises(ValueError, match=r"seat 7\.status is"):
        read({"status": status, "duration_s": 0.1})
    with pytest.raises(ValueError):  # noqa: PT011  # its own words, of the enumeration
        Outcome.from_json({"status": status})
