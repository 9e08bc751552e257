"""Messages of rank 0 to all: what each participant reads grows with its own group alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from nccl_doctor.gather.messages import (
    PAGE,
    Finish,
    HostPlaces,
    Order,
    Postings,
    Roster,
    is_paged,
    order_from,
    own_part,
    page_of,
    whole,
)
from nccl_doctor.gather.store import StoreTimeout
from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.model.findings import Round
from nccl_doctor.model.layout import HostPlace


class Letters:
    """Letters as they lie in a store, and the bytes that were read."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.read = 0

    def put(self, key: str, value: Any) -> None:
        self.texts[key] = json.dumps(value)

    def get(self, key: str, timeout_s: float) -> Any:
        if key not in self.texts:
            raise StoreTimeout(key)
        self.read += len(self.texts[key])
        return json.loads(self.texts[key])


def posted(box: Letters, seats: int = 0) -> Postings:
    """Postings of a run, of so many seats if its roster is posted already; its reading is free."""
    postings = Postings(box, is_near=False)  # type: ignore[arg-type]
    if seats:
        postings.seats("roster", Roster({s: str(s) for s in range(seats)}, "run", "gloo", 5.0))
    return postings


def read(box: Letters, key: str, seat: int) -> Any:
    return whole(box, key, box.get(key, 0.0), seat)  # type: ignore[arg-type]


def read_order(
    box: Letters, number: int, seat: int, known: dict[str, list[int]] | None = None
) -> Any:
    """An order as a participant reads it that has read the roster."""
    key, known = f"order/{number}", {} if known is None else known
    if not is_paged(json.loads(box.texts["roster"])):
        return box.get(key, 0.0)
    page = box.get(page_of(key, seat), 0.0)
    return own_part(box, key, page, seat, known)  # type: ignore[arg-type]


def order(groups: Sequence[Sequence[int]], **params: Any) -> Order:
    return Order("some_check", Round("all", tuple(map(tuple, groups)), 5.0, params), 10.0)


def told(box: Letters, number: int, seat: int) -> Order:
    found = order_from(read_order(box, number, seat))
    assert isinstance(found, Order)
    return found


def test_who_is_in_costs_each_reader_a_page() -> None:
    def bytes_of(count: int) -> int:
        box = Letters()
        tokens = {seat: f"{seat:016x}" for seat in range(count)}
        posted(box).seats("roster", Roster(tokens, "run", "gloo", 5.0))
        for seat in range(0, count, 16):
            roster = decode(Roster, Node("roster", read(box, "roster", seat)))
            assert roster.admits(seat, tokens[seat])
            assert not roster.admits(seat, "another")
            assert len(roster.tokens) <= PAGE
        stranger = decode(Roster, Node("roster", read(box, "roster", count + 1)))
        assert not stranger.admits(count + 1, "")
        return box.read

    assert bytes_of(4096) < 4.2 * bytes_of(1024)


def test_each_host_learns_its_own_place() -> None:
    box = Letters()
    places = {seat: HostPlace(seat, 8 * seat, 8, 1600) for seat in range(200)}
    tokens = {seat: str(seat) for seat in places}
    posted(box).seats("layout", HostPlaces(places, tokens, 5.0, {"nd0": ["192.168.77.1"]}))
    for seat, place in places.items():
        layout = decode(HostPlaces, Node("layout", read(box, "layout", seat)))
        assert layout.admits(seat, str(seat))
        assert layout.places[seat] == place
        assert layout.hosts == {"nd0": ["192.168.77.1"]}
        assert len(layout.places) <= PAGE


def test_few_seats_have_one_message_as_before() -> None:
    box = Letters()
    roster, few = Roster({3: "a", 5: "b"}, "run", "gloo", 5.0), order([[3, 5]], depth=1)
    postings = posted(box)
    postings.seats("roster", roster)
    postings.order(0, few)
    assert postings.keys == ["roster", "order/0"]
    assert json.loads(box.texts["roster"]) == encode(roster)
    assert order_from(json.loads(box.texts["order/0"])) == few


@pytest.mark.parametrize("count", [8, 200])
@pytest.mark.parametrize("more", ["", "x" * 1000])
def test_parameters_by_seat_are_read_by_their_own_page(count: int, more: str) -> None:
    box, seats = Letters(), tuple(range(count))
    table = {str(seat): [f"10.0.0.{seat}"] for seat in seats if seat % 3}
    params = {"reached": table, "more": more}
    posted(box, count).order(
        0, Order("c", Round("r", (seats,), 5.0, params, by_seat=("reached",)), 9.0)
    )
    for seat in seats:
        found = told(box, 0, seat).round.params
        assert found["more"] == more
        assert found["reached"].get(str(seat)) == table.get(str(seat))
        assert len(found["reached"]) <= PAGE


def test_a_parameter_by_seat_that_is_not_known_is_none() -> None:
    box = Letters()
    unknown = Round("r", (tuple(range(200)),), 5.0, {"reached": None}, by_seat=("reached",))
    posted(box, 200).order(0, Order("c", unknown, 9.0))
    assert told(box, 0, 7).round.params == {"reached": None}


@pytest.mark.parametrize("size", [1, 2, 8, 64, 65, 700])
def test_each_seat_learns_its_own_group_and_no_other(size: int) -> None:
    seats = random.Random(size).sample(range(1000), 700)
    groups = [seats[at : at + size] for at in range(0, len(seats), size)]
    box = Letters()
    posted(box, 1000).order(4, order(groups, depth=2))
    for group in groups:
        for seat in group[:3]:
            assert told(box, 4, seat).round == Round("all", (tuple(group),), 5.0, {"depth": 2})
    for seat in set(range(1000)) - set(seats):
        assert told(box, 4, seat).round == Round("all", (), 5.0, {})


def test_a_large_group_is_read_once_in_a_run() -> None:
    box, known = Letters(), dict[str, list[int]]()
    postings = posted(box, 4096)
    world = random.Random(1).sample(range(4096), 4096)
    for number in range(10):
        postings.order(number, order([world]))
    first = read_order(box, 0, 7, known)
    before = box.read
    for number in range(1, 10):
        assert read_order(box, number, 7, known)["groups"] == first["groups"] == [world]
    assert before > 4096 * 4
    assert box.read - before < 9 * 600


def test_pairs_of_many_cost_each_reader_a_page() -> None:
    box = Letters()
    pairs = [(seat, 4095 - seat) for seat in range(2048)]
    posted(box, 4096).order(0, order(pairs))
    for seat in range(0, 4096, 64):
        told(box, 0, seat)
    assert box.read / 64 < 2500


def test_who_has_no_group_does_not_read_the_parameters() -> None:
    box = Letters()
    hosts = list(range(0, 8192, 8))
    posted(box, 8192).order(0, order([hosts], addresses=["192.168.77.1"] * 1024))
    told(box, 0, 1)
    assert box.read < 500
    assert len(told(box, 0, 8).round.params["addresses"]) == 1024


def test_an_order_is_one_message_for_each() -> None:
    box, known = Letters(), dict[str, list[int]]()
    posted(box, 1000).order(0, order([range(1000)], depth=2))
    read_order(box, 0, 5, known)
    gets: list[str] = []
    found = box.get
    box.get = lambda key, timeout_s: gets.append(key) or found(key, timeout_s)  # type: ignore
    assert read_order(box, 0, 5, known)["params"] == {"depth": 2}
    assert gets == ["order/0/page/0"]


@pytest.mark.parametrize("seats", [3, 1000])
def test_each_reads_the_end(seats: int) -> None:
    box = Letters()
    end = Finish(1, "fail", 2, "nd0")
    posted(box, seats).finish(7, end)
    for seat in (0, seats - 1):
        assert order_from(read_order(box, 7, seat)) == end


@pytest.mark.parametrize(
    "page",
    [[], {"groups": 1}, {"groups": [], "shared": [1]}, {"groups": [], "shared": {"a": 1}}, "w"],
)
def test_a_page_that_is_none_names_rank_0(page: Any) -> None:
    box = Letters()
    posted(box, 100).order(0, order([range(100)]))
    box.put("order/0/page/0", page)
    with pytest.raises(ValueError, match="rank 0"):
        order_from(read_order(box, 0, 5))
