"""Sign-ins as they come, those of agents and those of ranks that have none."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import pytest

from nccl_doctor.gather.agent.batches import Agents, batch_of_sign_ins
from nccl_doctor.gather.ends import Deaths
from nccl_doctor.gather.evidence import EvidenceLog
from nccl_doctor.gather.join import Join
from nccl_doctor.gather.messages import Postings, SignIn
from nccl_doctor.gather.opening import RivalCheck
from nccl_doctor.gather.run import prepare
from nccl_doctor.gather.store import ControlStore
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.options import Options

pytestmark = pytest.mark.xdist_group("torch")

WORLD = 200


def sign_in(rank: int) -> dict[str, Any]:
    launch = Launch(rank=rank, world_size=WORLD)
    return SignIn(f"t{rank}", 100 + rank, launch, f"nd{rank}", f"k{rank}").to_json()


class Hall:
    """Rank 0, which waits for the others."""

    def __init__(self, port: int) -> None:
        launch = Launch(rank=0, world_size=WORLD)
        self.evidence = EvidenceLog(launch, {}, {})
        self.box = ControlStore("127.0.0.1", port, timeout_s=5, prefix="seats/")
        run = prepare(Options(), launch, {}, time.monotonic(), logs=False)
        deaths, doubts = Deaths(self.box, self.evidence), RivalCheck(self.box, launch, "t0")
        posted = Postings(self.box, is_near=True)
        self.agents = Agents()
        self.join = Join(
            run, self.box, self.evidence, deaths, doubts, posted=posted, agents=self.agents
        )

    def come(self, seat: int, ranks: int) -> None:
        batch = batch_of_sign_ins([sign_in(each) for each in range(seat, seat + ranks)])
        self.box.put(f"seat/{seat}", batch if ranks > 1 else sign_in(seat))

    @property
    def seats(self) -> set[int]:
        return set(self.evidence.seats)


@pytest.fixture
def hall(store_port: int) -> Hall:
    return Hall(store_port)


@pytest.mark.parametrize("seed", range(6))
def test_all_are_found_whatever_their_order_and_their_number(hall: Hall, seed: int) -> None:
    """Most batches hold 4 sign-ins; no look is at all seats, once a batch has been read."""
    rule = random.Random(seed)
    batches, seat = [], 0
    while seat < WORLD - 8:
        batches.append((seat, rule.choice([4, 4, 4, 4, 1, 7])))
        seat += batches[-1][1]
    hall.box.add("seats", seat)
    first, *rest = batches
    hall.come(*first)
    assert hall.join._admit()
    hall.join._everywhere_s = math.inf
    rule.shuffle(rest)
    for at in range(0, len(rest), 9):
        for each in rest[at : at + 9]:
            hall.come(*each)
        hall.join._admit()
    hall.join._admit()
    assert hall.seats == set(range(seat))
    assert not hall.join._admit()
    spoken = {at for first, count in batches if count > 1 for at in range(first, first + count)}
    assert {at for at in range(seat) if hall.agents.of(at) is not None} == spoken


def test_seats_of_an_agent_are_not_asked_for_one_by_one(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    wait = hall.box.wait

    def counted(keys: Any, *args: Any) -> set[str]:
        asked.extend(keys)
        return wait(keys, *args)

    hall.box.add("seats", 192)
    hall.come(0, 8)
    hall.join._admit()
    monkeypatch.setattr(hall.box, "wait", counted)
    for seat in range(8, 192, 8):
        hall.come(seat, 8)
    hall.join._admit()
    assert hall.seats == set(range(192))
    assert len(asked) == 192 / 8 - 1


def test_who_is_not_where_most_are_is_found_in_a_look_at_all(hall: Hall) -> None:
    hall.box.add("seats", 30)
    hall.come(0, 8)
    hall.join._admit()
    hall.come(13, 1)
    hall.join._everywhere_s = math.inf
    assert not hall.join._admit()
    assert hall.join._admit(everywhere=True)
    assert 13 in hall.seats


def test_who_came_while_rank_0_was_busy_is_not_late(hall: Hall) -> None:
    """What rank 0 needs to read thousands of batches is nobody's lateness."""
    hall.join._opened = hall.join._not_before = time.monotonic() - 30
    hall.box.add("seats", 24)
    hall.come(0, 8)
    hall.join._admit(everywhere=True)
    hall.come(8, 8)
    hall.join._everywhere_s = math.inf
    hall.join._admit()
    hall.come(16, 8)
    hall.join._admit(everywhere=True)
    came = {rank.seat: rank.signed_in_s for rank in hall.evidence.cluster(Options(), "gloo").ranks}
    assert [came[seat] for seat in range(8)] == [0.0] * 8  # no look was before
    assert all(30 <= came[seat] < 35 for seat in range(8, 24))
