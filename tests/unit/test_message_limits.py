"""Numbers in messages of the store, against the limits of `nccl_doctor.model.codec`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nccl_doctor.gather.agent.sharing import Known
from nccl_doctor.gather.ends import Death, Departure
from nccl_doctor.gather.messages import HostPlaces, SignIn, order_from
from nccl_doctor.gather.visitors import unknown
from nccl_doctor.model.codec import (
    MAX_LOCAL_RANKS,
    MAX_PID,
    MAX_RANKS,
    MAX_SEATS,
    MAX_SECONDS,
    Node,
    decode,
)
from nccl_doctor.model.report import outcome_from_json
from tests.support.rows import each_row

SIGN_IN = {"token": "t", "pid": 7, "launch": {}, "host": {"name": "nd1", "key": "k"}}
DEATH = {"host": "k", "pid": 7, "rank": 1, "signal": "SIGKILL"}
ORDER = {"check": "c", "round": "r", "groups": [[0, 1]], "deadline_s": 1.0, "next_s": 1.0}
PLACE = {"node_rank": 0, "first_rank": 0, "nproc": 8, "world_size": 8}


def sign_in(data: Any) -> object:
    return SignIn.from_json(1, {**SIGN_IN, "env": {}, **data})


def launch(data: Any) -> object:
    return sign_in({"launch": data})


def order(data: Any) -> object:
    return order_from({**ORDER, "params": {}, **data})


def place(data: Any) -> object:
    places = {"0": {**PLACE, **data}}
    return decode(HostPlaces, Node("layout", {"places": places, "tokens": {}, "next_s": 1.0}))


def death(data: Any) -> object:
    return decode(Death, Node("death", {**DEATH, **data}))


def departure(data: Any) -> object:
    return decode(Departure, Node("departure", {"seat": 1, "signal": "SIGINT", **data}))


def outcome(data: Any) -> object:
    return outcome_from_json(Node("outcome", {"status": "ok", **data}))


@each_row(
    ("read", "key", "value"),
    [
        (launch, "local_world_size", MAX_LOCAL_RANKS + 1),
        (launch, "local_rank", MAX_LOCAL_RANKS),
        (launch, "rank", MAX_RANKS + 1),
        (sign_in, "pid", MAX_PID + 1),
        (sign_in, "joining", {"torch_s": MAX_SECONDS * 2}),
        (order, "groups", [[0, MAX_SEATS]]),
        (order, "groups", [[-1, 0]]),
        (order, "deadline_s", MAX_SECONDS * 2),
        (order, "more_s", 10**6),
        (place, "nproc", MAX_LOCAL_RANKS + 1),
        (place, "world_size", MAX_RANKS + 1),
        (death, "pid", MAX_PID + 1),
        (death, "rank", MAX_RANKS + 1),
        (departure, "seat", MAX_SEATS + 1),
        (departure, "seat", -1),
        (outcome, "duration_s", MAX_SECONDS * 2),
        (outcome, "duration_s", float("nan")),
        (outcome, "duration_s", -1.0),
    ],
)
def test_numbers_beyond_the_limits_are_refused(
    read: Callable[[Any], object], key: str, value: Any
) -> None:
    read({})
    with pytest.raises(ValueError, match=key.removesuffix("_s").partition("[")[0]):
        read({key: value})


def test_times_that_are_none_stay_as_they_came() -> None:
    for time_s in (10**400, float("inf"), -1):
        crumbs = {"steps": 0, "at_s": [time_s]}
        said = {"status": "ok", "breadcrumbs": crumbs}
        Known().unpack([said], ['[{"step": "a"}]'])
        assert said["breadcrumbs"] is crumbs
        with pytest.raises(ValueError, match="breadcrumbs"):
            outcome(said)


def test_callers_that_are_no_hosts_of_the_job_are_told_by_their_addresses() -> None:
    callers = ["10.0.0.2", "10.0.0.9", "127.0.0.1", "::1", "10.0.0.9", "fd00::7"]
    assert unknown(callers, ["10.0.0.2"]) == ("10.0.0.9", "fd00::7")
