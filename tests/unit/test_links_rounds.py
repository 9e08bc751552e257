"""The links check: whom it lets meet, what it measures, and what its findings explain."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from nccl_doctor.api import (
    Cluster,
    Context,
    Launch,
    Level,
    Round,
    Skip,
    Untested,
)
from nccl_doctor.checks.links.timed import Pace, hold_meetings
from nccl_doctor.checks.links.wire import Gate
from tests.support.clusters import make_cluster
from tests.support.exchanges import CHECK, World, both
from tests.support.peers import DROPPED
from tests.support.peers import World as Calls

# Planning


def rounds_of(cluster: Cluster) -> list[Round]:
    return list(CHECK.plan(cluster))


def test_one_participant_of_each_host_that_is_there() -> None:
    (first,) = rounds_of(make_cluster(["nd0", "nd1", "nd2"], absent_nodes=[2]))
    assert (first.name, first.groups, first.may_shrink) == ("exchange", ((0, 2),), True)
    assert rounds_of(make_cluster(["nd0", "nd1"], absent_nodes=[0, 1])) == []


def test_many_hosts_take_no_longer_than_sixteen() -> None:
    names = [f"nd{i}" for i in range(200)]
    (few,) = rounds_of(make_cluster(names[:16]))
    (many,) = rounds_of(make_cluster(names))
    assert many.deadline_s < few.deadline_s
    (every,) = rounds_of(make_cluster(names, level=Level.FULL))
    assert every.deadline_s > many.deadline_s


def test_nobody_has_two_partners_at_once_when_trying_again() -> None:
    world = World(8)
    world.slow([*world.of("nd3"), *both("nd0", "nd1")])
    *_, last = rounds_of(world.cluster())
    for slot in last.params["slots"]:
        busy = [seat for meeting in slot for seat in meeting]
        assert len(busy) == len(set(busy))
    assert {seat for slot in last.params["slots"] for m in slot for seat in m} == set(
        last.groups[0]
    )


def called(count: int, failing: Iterable[tuple[str, str]], backend: str = "nccl") -> Cluster:
    """Hosts that called each other in check `firewall`, of which some had no answer."""
    return Calls(count, backend).fail(failing, DROPPED).cluster()


def test_a_shut_link_does_not_keep_the_others_from_being_measured() -> None:
    cluster = called(4, [("nd3", "nd1")])
    (first,) = rounds_of(cluster)
    held = {frozenset(meeting) for slot in first.params["slots"] for meeting in slot}
    assert first.groups == ((0, 2, 4, 6),)
    assert len(held) == 5
    assert frozenset((2, 6)) not in held
    assert {frozenset(pair) for pair in first.pairs or ()} == held


def test_a_host_that_nobody_reaches_is_left_out() -> None:
    (first,) = rounds_of(called(3, [("nd0", "nd2"), ("nd1", "nd2")]))
    assert (first.groups, first.params["slots"]) == (((0, 2),), [[(0, 2)]])


def test_where_every_link_is_shut_the_round_needs_them_all() -> None:
    (first,) = rounds_of(called(2, [("nd0", "nd1")]))
    assert (first.groups, first.pairs) == (((0, 2),), None)
    assert "slots" not in first.params


def test_gloo_is_measured_from_the_side_that_it_connects_from() -> None:
    """The greater address calls, so that the job runs, and so does the measurement."""
    (first,) = rounds_of(called(2, [("nd0", "nd1")], "gloo"))
    assert (first.groups, first.params["slots"]) == (((0, 2),), [[(2, 0)]])
    (first,) = rounds_of(called(3, [("nd0", "nd2"), ("nd1", "nd2")], "gloo"))
    meetings = {meeting for slot in first.params["slots"] for meeting in slot}
    assert {(4, 0), (4, 2)} < meetings
    assert len(meetings) == 3
    (first,) = rounds_of(called(3, [("nd2", "nd0"), ("nd0", "nd1")], "gloo"))
    meetings = {meeting for slot in first.params["slots"] for meeting in slot}
    assert (2, 0) in meetings
    assert frozenset((0, 4)) not in {frozenset(meeting) for meeting in meetings}


def test_without_calls_all_are_measured() -> None:
    (first,) = rounds_of(make_cluster(["nd0", "nd1", "nd2"]))
    assert len(set(first.pairs or ())) == 3


# Observing


class OtherHost:
    """A peer behind its own gate."""

    def __init__(self, posts: Mapping[int, Any]) -> None:
        self.posts = posts
        self.posted: Any = None

    def post(self, tag: str, value: Any) -> None:
        self.posted = json.loads(json.dumps(value))

    def collect(self, tag: str, timeout_s: float, of: Any = None) -> dict[int, Any]:
        return {**self.posts, 0: self.posted}

    def store(self) -> Any:
        raise AssertionError("no process group is needed")


def context(group: tuple[int, ...], peers: OtherHost | None, **params: Any) -> Context:
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_CONF_FILE": "/nonexistent"}
    return Context(
        launch=Launch(), env=env, round="exchange", group=group, params=params, peers=peers
    )


def test_observing_measures_both_ways() -> None:
    theirs: dict[int, Any] = {}
    with Gate("127.0.0.2") as gate:
        peers = OtherHost({4: gate.door.to_json()})

        def other() -> None:
            end = time.monotonic() + 10
            doors = {0: gate.door.to_json()}  # who is called needs to know only that it listens
            theirs.update(hold_meetings([[(0, 4)]], 4, gate, doors, pace=Pace(), deadline=end))

        thread = threading.Thread(target=other)
        thread.start()
        facts = json.loads(json.dumps(CHECK.observe(context((0, 4), peers))))
        thread.join(10)
    assert facts["sent"]["4"]["rate"] > 1e6
    assert theirs[0]["rate"] > 1e6
    for door in (gate.door.to_json(), peers.posted):
        assert door["token"] not in json.dumps(facts)
        assert door["answer"] not in json.dumps(facts)


def test_nothing_measured_is_not_known() -> None:
    with pytest.raises(Untested, match="was not listening"):
        CHECK.observe(context((0, 4), OtherHost({})))


def test_one_host_has_no_links() -> None:
    with pytest.raises(Skip, match="one host"):
        CHECK.plan(make_cluster(["nd0"]))


def test_one_host_of_several_has_not_been_tested() -> None:
    with pytest.raises(Untested, match="no other host"):
        CHECK.observe(context((0,), None))
