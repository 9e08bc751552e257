"""Messages of the control store: the same after their way through it, refused if malformed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.gather.messages import (
    Claimant,
    Finish,
    HostPlaces,
    Order,
    Reason,
    Roster,
    SignIn,
    order_from,
)
from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.model.findings import Round
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.layout import HostPlace
from tests.support.rows import each_row

HOSTS = {"nd0": ["10.0.0.1"], "nd1": []}
ROSTER = Roster({0: "a", 12: "b"}, "0123", "gloo", 15.0, HOSTS)
PLACES = HostPlaces({12: HostPlace(1, 2, 2, 4)}, {0: "a", 12: "b"}, 25, HOSTS)
ORDER = Order("links", Round("pairs", ((0, 1), (3, 2)), 7.5, {"port": 1}), 22.5)
SIGN_IN = SignIn("t", 1, Launch(rank=3), "nd0", "key", ("10.0.0.1",), {"A": "b"}, "cpu", "gloo")

REASON = Reason("node-rank-duplicate", "2 hosts claim node rank 0", ("nd0", "nd1"))


def roster_of(data: Any) -> Roster:
    return decode(Roster, Node("rank 0: roster", data))


def places_of(data: Any) -> HostPlaces:
    return decode(HostPlaces, Node("rank 0: layout", data))


def through_json(message: Any) -> Any:
    own = isinstance(message, (Order, SignIn))
    return json.loads(json.dumps(message.to_json() if own else encode(message)))


READERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "roster": (ROSTER, roster_of),
    "layout": (PLACES, places_of),
    "roster that refuses": (replace(ROSTER, refused={3: REASON}), roster_of),
    "layout that refuses": (replace(PLACES, refused={3: REASON}), places_of),
    "finish with reasons": (Finish(1, "fail", 1, "ux0", (REASON,)), order_from),
    "order": (ORDER, order_from),
    "finish": (Finish(3), order_from),
    "finish in words": (Finish(1, "fail", 2, "ux0"), order_from),
    "sign-in": (SIGN_IN, lambda data: SignIn.from_json(3, data)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_message_is_the_same_after_its_way_through_the_store(name: str) -> None:
    message, read = READERS[name]
    data = through_json(message)
    assert read({**data, "of a newer version": 1}) == message


def test_the_number_of_hosts_of_an_elastic_job_crosses_the_store() -> None:
    places = HostPlaces({0: HostPlace(0, 0, 2, 4, 2)}, {0: "a"}, 25, HOSTS)
    assert places_of(through_json(places)) == places


def test_the_format_is_that_of_other_versions() -> None:
    assert encode(ROSTER) == {
        "tokens": {"0": "a", "12": "b"},
        "nonce": "0123",
        "backend": "gloo",
        "next_s": 15.0,
        "hosts": HOSTS,
    }
    assert encode(PLACES) == {
        "places": {"12": {"node_rank": 1, "first_rank": 2, "nproc": 2, "world_size": 4}},
        "tokens": {"0": "a", "12": "b"},
        "next_s": 25,
        "hosts": HOSTS,
    }
    assert through_json(ORDER) == {
        "check": "links",
        "round": "pairs",
        "groups": [[0, 1], [3, 2]],
        "params": {"port": 1},
        "deadline_s": 7.5,
        "next_s": 22.5,
    }
    longer = {**ORDER.to_json(), "more_s": 43}
    assert replace(ORDER, more_s=43).to_json() == longer
    assert order_from(json.loads(json.dumps(longer))) == replace(ORDER, more_s=43)
    assert encode(Finish(3)) == {"finish": 3}
    assert Finish(3).words == ""
    assert Finish(1, "fail", 1, "ux0").words == "FAIL, see node 0 (ux0): 1 problem"
    assert Finish(0, "warn", 2).words == "WARN, see node 0: 2 warnings"
    assert Finish(0, "pass", 0, "ux0").words == "PASS, see node 0 (ux0)"
    assert Finish(3, "unknown", 1, "ux0").words == "UNKNOWN, see node 0 (ux0)"


def test_only_the_participant_of_seat_and_token_is_admitted() -> None:
    assert ROSTER.admits(12, "b")
    assert PLACES.admits(12, "b")
    assert not ROSTER.admits(12, "a")
    assert not ROSTER.admits(1, "a")
    assert not PLACES.admits(0, "a"), "it signed in, but not for a host"


@each_row(
    ("name", "key", "value", "words"),
    [
        ("roster", "tokens", KeyError, 'rank 0: roster has no "tokens"'),
        ("roster", "tokens", ["a"], "rank 0: roster.tokens is a list, not an object"),
        ("roster", "tokens", {"x": "a"}, 'rank 0: roster.tokens: "x" is not the number of a seat'),
        ("roster", "tokens", {"-1": "a"}, 'rank 0: roster.tokens: "-1" is not the number'),
        ("roster", "tokens", {"1": 2}, "rank 0: roster.tokens.1 is a whole number, not a text"),
        ("roster", "nonce", None, "rank 0: roster.nonce is null, not a text"),
        ("roster", "next_s", "soon", "rank 0: roster.next_s is a text, not a number"),
        ("roster", "hosts", ["nd0"], "rank 0: roster.hosts is a list, not an object"),
        ("roster", "hosts", {"nd0": [1]}, "rank 0: roster.hosts.nd0[] is a whole number, not a"),
        ("layout", "hosts", {"nd0": "x"}, "rank 0: layout.hosts.nd0 is a text, not a list"),
        ("layout", "places", None, "rank 0: layout.places is null, not an object"),
        ("layout", "places", {"1": 2}, "rank 0: layout.places.1 is a whole number"),
        ("layout", "places", {"1": {}}, 'rank 0: layout.places.1 has no "node_rank"'),
        ("layout", "tokens", None, "rank 0: layout.tokens is null"),
        ("layout", "next_s", KeyError, 'rank 0: layout has no "next_s"'),
        ("order", "check", 1, "rank 0: order.check is a whole number, not a text"),
        ("order", "round", KeyError, 'rank 0: order has no "round"'),
        ("order", "groups", [1], "rank 0: order.groups[] is a whole number, not a list"),
        ("order", "groups", [["1"]], "rank 0: order.groups[][] is a text, not a whole number"),
        ("order", "params", [], "rank 0: order.params is a list, not an object"),
        ("order", "deadline_s", None, "rank 0: order.deadline_s is null, not a number"),
        ("order", "more_s", 1.5, "rank 0: order.more_s is a number, not a whole number"),
        ("finish", "finish", "0", "rank 0: order.finish is a text, not a whole number"),
        ("sign-in", "token", KeyError, 'seat 3: sign-in has no "token"'),
        ("sign-in", "pid", "1", "seat 3: sign-in.pid is a text, not a whole number"),
        ("sign-in", "launch", [], "seat 3: sign-in.launch is a list, not an object"),
        ("sign-in", "launch", {"problems": [1]}, "seat 3: sign-in.launch is not a launch record"),
        ("sign-in", "host", {"name": 1}, "seat 3: sign-in.host.name is a whole number"),
        ("sign-in", "env", "A=b", "seat 3: sign-in.env is a text, not an object"),
        ("sign-in", "facts", {"port": []}, "seat 3: sign-in.facts.port is a list"),
        ("sign-in", "facts", {"port": {"alone": {"status": "x"}}}, "port.alone.status is"),
    ],
)
def test_a_malformed_message_names_its_sender_and_the_place(
    name: str, key: str, value: object, words: str
) -> None:
    message, read = READERS[name]
    data = {**through_json(message), key: value}
    if value is KeyError:
        del data[key]
    with pytest.raises(ValueError, match=r"^(rank 0|seat 3): ") as error:
        read(data)
    assert words in str(error.value)


@each_row(
    ("name", "key", "value", "words"),
    [
        ("finish", "finish", 4, "rank 0: order.finish is 4, outside 0–3"),
        ("order", "deadline_s", 1e300, "rank 0: order.deadline_s is no time from 0 to 1000000 s"),
        ("order", "deadline_s", float("nan"), "rank 0: order.deadline_s is no time"),
        ("order", "next_s", -1, "rank 0: order.next_s is no time"),
        ("order", "more_s", 481, "rank 0: order.more_s is 481, outside 0–480"),
        ("order", "more_s", -1, "rank 0: order.more_s is -1, outside 0–480"),
        ("order", "round", "r" * 2000, "rank 0: order.round has 2000 characters"),
        ("roster", "backend", "mpi", 'rank 0: roster.backend is "mpi", not one of nccl, gloo'),
        ("roster", "tokens", {"1" * 40: "a"}, "is not the number of a seat"),
        ("layout", "places", {"1": {"node_rank": 10**9}}, "node_rank is 1000000000, outside"),
        ("sign-in", "token", "t" * 2000, "seat 3: sign-in.token has 2000 characters"),
        ("sign-in", "pid", 2**40, "seat 3: sign-in.pid is 1099511627776, outside"),
        ("sign-in", "env", {"A": 1}, "seat 3: sign-in.env.A is a whole number, not a text"),
        ("sign-in", "backend", "mpi", 'seat 3: sign-in.backend is "mpi", not one of'),
        ("sign-in", "launch", {"node_rank": 10**9}, "launch.node_rank is 1000000000, outside"),
    ],
)
def test_a_message_with_a_number_that_cannot_be_is_refused(
    name: str, key: str, value: object, words: str
) -> None:
    message, read = READERS[name]
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words differ
        read({**through_json(message), key: value})
    assert words in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_whatever_comes_is_a_message_or_a_value_error(name: str, data: st.DataObject) -> None:
    message, read = READERS[name]
    value = through_json(message)
    inner = value
    for _ in range(data.draw(st.integers(0, 3))):  # somewhere in it
        keys = [key for key, each in inner.items() if isinstance(each, dict) and each]
        if not keys:
            break
        inner = inner[data.draw(st.sampled_from(keys))]
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(JSON)
    with contextlib.suppress(ValueError):
        read(value)


@given(JSON)
def test_whoever_writes_something_else_is_named_or_nobody(value: Any) -> None:
    for data in (value, {"host": value, "launch": value}, {"host": {"name": value}}):
        who = Claimant.of(data)
        assert len(who.in_words()) < 1200
        assert who.rank is None or who.rank >= 0


@each_row(("data", "name"), product([None, [], "x", 3], READERS))
def test_what_is_no_object_is_no_message(name: str, data: object) -> None:
    with pytest.raises(ValueError, match="not an object"):
        READERS[name][1](data)
