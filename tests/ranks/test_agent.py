"""An agent and the ranks of its host, over a real store."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nccl_doctor.gather.agent import agent, store
from nccl_doctor.gather.agent.agent import Agent
from nccl_doctor.gather.agent.batches import answers_in, answers_key, sign_ins_in
from nccl_doctor.gather.agent.connection import (
    AgentConnection,
    AgentLost,
    connect,
    listener_at,
    name_of,
)
from nccl_doctor.gather.agent.sharing import Known
from nccl_doctor.gather.agent.store import AgentStore
from nccl_doctor.gather.opening import prefix_of
from nccl_doctor.gather.store import ControlStore, StoreTimeout
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.system import forks

pytestmark = pytest.mark.xdist_group("torch")

RUN, FIRST = "run", 5
"""The name of the run, and the first seat that is free."""


class Host:
    """A host with an agent, whose ranks are threads of the test."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.name = f"\0nccl-doctor-test-{os.getpid()}-{port}"
        listener = listener_at(self.name)
        assert listener is not None
        self.agent = forks.fork_service(
            "agent", lambda: Agent(listener, None).serve(), [listener.fileno()]
        )
        listener.close()
        self.store = self.connection()
        self.store.add("seats", FIRST)

    def connection(self) -> ControlStore:
        return ControlStore("127.0.0.1", self.port, timeout_s=5, prefix=prefix_of(RUN))

    def to_agent(self) -> AgentConnection:
        connection = connect(self.name, 1.0)
        assert connection is not None
        return connection

    def rank(self) -> AgentStore:
        return AgentStore(self.connection(), self.to_agent())

    def ranks(self, count: int = 2) -> list[AgentStore]:
        """Ranks that have signed in, in the order of their seats."""
        ranks = [self.rank() for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            seats = list(pool.map(lambda rank: rank.sign_in(RUN, "who", count), ranks))
        assert sorted(seats) == list(range(FIRST, FIRST + count))
        return [
            rank for _, rank in sorted(zip(seats, ranks, strict=True), key=lambda each: each[0])
        ]

    def order(self, number: int, page: int | None = None, **more: Any) -> str:
        """Post an order. Returns: its key."""
        key = f"order/{number}" + ("" if page is None else f"/page/{page}")
        self.store.put(key, {"number": number, "deadline_s": 20.0, **more})
        return key

    def batch(self, number: int, wait_s: float = 2.0) -> dict[int, Any]:
        """The answers of a round in the agent's batch."""
        seats = range(FIRST, FIRST + 10)
        return answers_in(self.store.get(answers_key(number, FIRST), wait_s), FIRST, seats, Known())

    def is_there(self, key: str) -> bool:
        return self.store.wait([key], 0.0) == {key}


@pytest.fixture
def host(store_port: int) -> Iterator[Host]:
    host = Host(store_port)
    yield host
    forks.stop_service(host.agent)


def side_by_side(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def test_all_ranks_sign_in_by_one_batch_with_seats_in_a_row(host: Host) -> None:
    host.ranks(3)
    batch = host.store.get(f"seat/{FIRST}", 1.0)
    assert sign_ins_in(FIRST, batch, Known()) == [(FIRST + index, "who") for index in range(3)]
    assert host.store.add("seats", 0) == FIRST + 3


def test_who_comes_late_signs_in_alone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    early = host.rank()
    began = time.monotonic()
    assert early.sign_in(RUN, "who", 2) == FIRST
    assert time.monotonic() - began > agent.SIGN_INS_S
    with pytest.raises(AgentLost):
        host.rank().sign_in(RUN, "who", 2)


def test_a_message_is_read_once_for_all(host: Host) -> None:
    ranks = host.ranks()
    host.store.put("roster", {"nonce": "once"})
    assert [rank.get("roster", 2.0) for rank in ranks] == [{"nonce": "once"}] * 2
    host.store.put("roster", {"nonce": "again"})
    assert ranks[0].get("roster", 2.0) == {"nonce": "once"}


def test_what_does_not_come_is_told_in_time(host: Host) -> None:
    rank, _ = host.ranks()
    with pytest.raises(StoreTimeout):
        rank.get("roster/page/7", 0.0)
    began = time.monotonic()
    with pytest.raises(StoreTimeout):
        rank.get("order/0", 0.5)
    assert time.monotonic() - began < 2.0
    host.order(0)
    assert rank.get("order/0", 1.0)["number"] == 0, "it may come later"


def test_who_waits_for_the_next_order_is_in_nobodys_way(host: Host) -> None:
    """One rank takes no part in round 0, and waits for round 1, while the other, whose seat is on
    another page, has yet to read its order of round 0, and a group.
    """
    ahead, behind = host.ranks()
    host.order(0, 0)
    host.order(0, 1)
    host.store.put("group/a", [1, 2])
    ahead.get("order/0/page/0", 2.0)

    def slow() -> None:
        time.sleep(0.3)  # the other one waits by then; if not, it has it easier
        assert behind.get("order/0/page/1", 2.0)["number"] == 0
        assert behind.get("group/a", 2.0) == [1, 2]
        behind.put(f"evidence/0/{FIRST + 1}", "done")
        assert host.batch(0) == {FIRST + 1: "done"}
        host.order(1, 0)

    side_by_side(lambda: ahead.get("order/1/page/0", 10.0), slow)


def test_the_answers_of_a_round_are_one_letter(host: Host) -> None:
    one, other = host.ranks()
    key = host.order(0)
    side_by_side(lambda: one.get(key, 2.0), lambda: other.get(key, 2.0))
    one.put(f"evidence/0/{FIRST}", {"status": "ok"})
    with pytest.raises(StoreTimeout):
        host.batch(0, 0.5)
    other.put(f"evidence/0/{FIRST + 1}", {"status": "hung"})
    assert host.batch(0) == {FIRST: {"status": "ok"}, FIRST + 1: {"status": "hung"}}
    assert not host.is_there(f"evidence/0/{FIRST}")


def test_nobody_waits_for_one_that_is_gone(host: Host) -> None:
    one, other = host.ranks()
    key = host.order(0)
    side_by_side(lambda: one.get(key, 2.0), lambda: other.get(key, 2.0))
    one.put(f"evidence/0/{FIRST}", "done")
    assert other._connection is not None
    other._connection.close()
    assert host.batch(0) == {FIRST: "done"}


def test_an_answer_that_comes_late_stands_alone(host: Host) -> None:
    """The answer of a rank that was stopped, and goes on."""
    one, other = host.ranks()
    key = host.order(0, deadline_s=0.5 - agent.SETTLE_S + agent.MARGIN_S)
    side_by_side(lambda: one.get(key, 2.0), lambda: other.get(key, 2.0))
    one.put(f"evidence/0/{FIRST}", "done")
    assert host.batch(0) == {FIRST: "done"}
    other.put(f"evidence/0/{FIRST + 1}", "late")
    assert host.store.get(f"evidence/0/{FIRST + 1}", 2.0) == "late"


def test_all_say_goodbye_by_one_word(host: Host) -> None:
    ranks = host.ranks()
    side_by_side(
        *(
            lambda rank=rank, seat=seat: rank.put(f"bye/{seat}", True)
            for seat, rank in enumerate(ranks, FIRST)
        )
    )
    assert host.is_there(f"bye/{FIRST}")
    assert not host.is_there(f"bye/{FIRST + 1}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_go_on_by_themselves_where_the_agent_is_lost(
    host: Host, number: signal.Signals
) -> None:
    one, other = host.ranks()
    key = host.order(0)
    side_by_side(lambda: one.get(key, 2.0), lambda: other.get(key, 2.0))
    one.put(f"evidence/0/{FIRST}", "done")  # the agent waits for the other rank
    time.sleep(0.3)  # it waits by then; if not, the rank tells the store itself, as it must
    os.kill(host.agent, number)
    began = time.monotonic()
    host.order(1)
    assert one.get("order/1", 20.0)["number"] == 1
    assert time.monotonic() - began < store.SILENT_S + 1.0
    assert host.store.get(f"evidence/0/{FIRST}", 0.0) == "done"
    other.put(f"evidence/0/{FIRST + 1}", "too")
    assert other.get("order/1", 20.0)["number"] == 1
    assert host.store.get(f"evidence/0/{FIRST + 1}", 0.0) == "too"
    one.put(f"bye/{FIRST}", True)
    assert host.is_there(f"bye/{FIRST}")


@pytest.mark.parametrize(
    "words",
    [
        b"\0\0\0\4oops",
        b"\xff\xff\xff\xff",
        b'\0\0\0\x02{}\0\0\0\x0f{"want": [1, 2]}',
        b"\0\0\0\x01\x31",
        b'\0\0\0\x12{"post": "elsewhe"',
        b"",
    ],
)
def test_one_that_talks_nonsense_costs_nobody_else_the_agent(host: Host, words: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(host.name)
        stranger.sendall(words)
        ranks = host.ranks()
        key = host.order(0)
        assert [rank.get(key, 2.0)["number"] for rank in ranks] == [0, 0]
        assert None not in [rank._connection for rank in ranks]


def test_a_socket_has_the_same_name_for_the_ranks_of_one_start_only() -> None:
    ranks = [Launch("torchrun", rank, 8, rank - 4, 4, 1, 2, "nd0", 29500) for rank in (4, 5)]
    assert len({name_of(rank) for rank in ranks}) == 1
    others = [
        Launch("torchrun", 0, 8, 0, 4, 0, 2, "nd0", 29500),
        Launch("torchrun", 4, 8, 0, 4, 1, 2, "nd0", 29501),
        Launch("torchrun", 4, 8, 0, 4, 1, 2, "nd0", 29500, restart_count=1),
        Launch(OWN, None, None, 0, 4, 1, 2, "nd0", 29500),
    ]
    assert len({name_of(each) for each in (*others, ranks[0])}) == 5
    forked = Launch(OWN, 4, 8, 1, 4, 1, 2, "nd0", 29500)
    assert name_of(forked) == name_of(others[3]), "the first one knows no rank yet"


def test_a_name_is_listened_at_once() -> None:
    name = f"\0nccl-doctor-test-{os.getpid()}-once"
    listener = listener_at(name)
    assert listener is not None
    assert listener_at(name) is None
    listener.close()
    began = time.monotonic()
    assert connect(name, 0.2) is None
    assert time.monotonic() - began < 1.0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_not_talked_to() -> None:
    name = f"\0nccl-doctor-test-{os.getpid()}-user"
    ready, told = os.pipe()

    def squat() -> None:
        os.setuid(65534)
        listener = listener_at(name)
        assert listener is not None
        os.write(told, b"\1")
        time.sleep(30)

    squatter = forks.fork_service("squatter", squat, [told])
    os.read(ready, 1)
    assert connect(name, 1.0) is None
    forks.stop_service(squatter)
    os.close(ready)
    os.close(told)
