"""Messages of rank 0 to all, posted so that each participant reads what concerns itself.

In one message, N participants would read N entries each: with 16,384 ranks, gigabytes. Above some
dozens of seats what differs from seat to seat stands on pages, for as many seats each. The list of
all seats says so in the message that all read; of an order there are pages only, so that each
participant reads one message. A large group is posted once in a run, however many rounds it has,
and each of its members reads it once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from nccl_doctor.gather.control_store import OPERATION_S, ControlStore, StoreTimeout
from nccl_doctor.gather.orders import Finish, HostPlaces, Order, Roster
from nccl_doctor.model.json_node import Node

PAGE = 64
"""Seats of one page; with fewer seats in all there are no pages."""
_PAGED, _SHARED, _TABLES = "paged", "shared", "tables"
_FEW_BYTES = 600
"""Parameters of a round, as JSON, that stand on each page: it stays one small packet."""
_BY_SEAT = ("tokens", "places")
_DIGEST = 16


class Postings:
    """Messages that rank 0 posts in one run, and takes away at its end."""

    def __init__(self, box: ControlStore, *, is_near: bool) -> None:
        """`is_near`: whether the store is on this host."""
        self._box, self._is_near = box, is_near
        self._keys: dict[str, None] = {}
        self._pages = 0

    @property
    def keys(self) -> list[str]:
        """Keys of all that was posted."""
        return list(self._keys)

    def put(self, key: str, value: Any) -> None:
        """Post one message."""
        self._box.put(key, value)
        self._keys[key] = None

    def seats(self, key: str, told: Roster | HostPlaces) -> None:
        """Post who is in, and where: each participant reads its own page."""
        data = told.to_json()
        if len(told.tokens) > PAGE:
            by_seat = {name: data.pop(name) for name in _BY_SEAT if name in data}
            pages: dict[int, dict[str, dict[str, Any]]] = {}
            for name, entries in by_seat.items():
                for seat, entry in entries.items():
                    page = pages.setdefault(int(seat) // PAGE, {each: {} for each in by_seat})
                    page[name][seat] = entry
            self._put_pages(key, pages)
            data[_PAGED] = True
            self._pages = max(pages) + 1
        self.put(key, data)

    def order(self, number: int, order: Order) -> None:
        """Post a round: each participant reads its own groups, and large parameters only if it has
        one; of those by seat, the entries of its own page.
        """
        key, data = f"order/{number}", order.to_json()
        if not self._pages:
            self.put(key, data)
            return
        tables = {
            name: data["params"].pop(name)
            for name in order.round.by_seat
            if isinstance(data["params"].get(name), Mapping)
        }
        if len(json.dumps(data["params"])) > _FEW_BYTES:
            self.put(f"{key}/{_SHARED}", {"params": data["params"]})
            data["params"] = None
        pages: list[dict[str, Any]] = [
            {**data, "groups": [], _SHARED: {}, **({_TABLES: {}} if tables else {})}
            for _ in range(self._pages)
        ]
        for name, table in tables.items():
            for page in pages:
                page[_TABLES][name] = {}
            for seat, entry in table.items():
                pages[int(seat) // PAGE][_TABLES][name][seat] = entry
        for group in order.round.groups:
            name = self._shared(group) if len(group) > PAGE else ""
            members: dict[int, list[int]] = {}
            for seat in group:
                members.setdefault(seat // PAGE, []).append(seat)
            for number_of_page, here in members.items():
                page = pages[number_of_page]
                if name:
                    page[_SHARED][name] = here
                else:
                    page["groups"].append(group)
        self._put_pages(key, dict(enumerate(pages)))

    def finish(self, number: int, end: Finish) -> None:
        """Post the end of the run, in place of an order."""
        self._to_all(number, end.to_json())

    def stop(self, box: ControlStore, number: int, message: Any) -> None:
        """Post a last message over another connection, in place of whatever is waited for: the list
        of seats, this order or the next one.
        """
        last = Postings(box, is_near=self._is_near)
        last._pages = self._pages
        for key in ("layout", "roster"):
            last.put(key, message)
        for each in (number, number + 1):
            last._to_all(each, message)

    def _to_all(self, number: int, message: Any) -> None:
        key = f"order/{number}"
        self._put_pages(key, dict.fromkeys(range(self._pages), message))
        if not self._pages:
            self.put(key, message)

    def _shared(self, group: Sequence[int]) -> str:
        """Key of a large group, which is posted once."""
        text = json.dumps(list(group)).encode()
        key = f"group/{hashlib.sha256(text).hexdigest()[:_DIGEST]}"
        if key not in self._keys:
            self.put(key, list(group))
        return key

    def _put_pages(self, key: str, pages: Mapping[int, Any]) -> None:
        messages = {f"{key}/page/{number}": page for number, page in pages.items()}
        if self._is_near:
            self._box.put_many(messages)
            self._keys |= dict.fromkeys(messages)
            return
        for each, page in messages.items():
            self.put(each, page)


def is_paged(data: Any) -> bool:
    """Whether a message of rank 0 has pages, and so has every order that follows."""
    return isinstance(data, dict) and data.get(_PAGED) is True


def page_of(key: str, seat: int) -> str:
    """Key of the page of a message that concerns one seat."""
    return f"{key}/page/{seat // PAGE}"


def whole(box: ControlStore, key: str, data: Any, seat: int) -> Any:
    """The list of all seats, with what its pages tell one; as it is, if it has no pages.

    Raises:
        ValueError: a page is not what it should be.
        StoreLost: the store is gone.
    """
    if not is_paged(data):
        return data
    data = {**{name: {} for name in _BY_SEAT}, **data}
    try:
        page = Node(f"rank 0: {key}", box.get(page_of(key, seat), 0.0))
    except StoreTimeout:  # it tells nobody of this page anything
        return data
    return data | {name: page.data[name] for name in _BY_SEAT if name in page.data}


def own_part(
    box: ControlStore, key: str, data: Any, seat: int, known: MutableMapping[str, list[int]]
) -> Any:
    """The page of an order, as it concerns one seat: with its own groups, and the parameters.

    `known` are the large groups that this participant has read.

    Raises:
        ValueError: it is not what it should be.
        StoreLost: the store is gone.
    """
    page = Node(f"rank 0: {key}", data)
    if _SHARED not in page.data:
        return data
    groups = [list(group) for group in page.many("groups", list) if seat in group]
    large = Node(page.path, page.get(_SHARED, dict))
    for name in large.data:
        if seat in large.many(name, int):
            if name not in known:
                group = Node(f"rank 0: {name}", {"group": box.get(name, OPERATION_S)})
                known[name] = list(group.many("group", int))
            groups.append(known[name])
    if not groups:
        return {**data, "groups": [], "params": {}}
    tables = page.get(_TABLES, dict, {})
    if page.data.get("params") is None:
        page = Node(f"rank 0: {key}", box.get(f"{key}/{_SHARED}", OPERATION_S))
    return {**data, "groups": groups, "params": page.get("params", dict) | tables}
