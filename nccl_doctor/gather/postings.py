"""Messages of rank 0 to all, posted so that each participant reads what concerns itself.

In one message, N participants would read N entries each: with 16,384 ranks, gigabytes. Above some
dozens of seats what differs from seat to seat stands on pages, for as many seats each, and the
message that all read only says so. A large group is posted once in a run, however many rounds it
has, and each of its members reads it once. Pages lie in the store before the message does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from nccl_doctor.gather.control_store import OPERATION_S, ControlStore, StoreTimeout
from nccl_doctor.gather.orders import HostPlaces, Order, Roster
from nccl_doctor.model.json_node import Node

PAGE = 64
"""Seats of one page; with fewer seats in all there are no pages."""
_PAGED, _SHARED = "paged", "shared"
_BY_SEAT = ("tokens", "places")
_DIGEST = 16


class Postings:
    """Messages that rank 0 posts in one run, and takes away at its end."""

    def __init__(self, box: ControlStore) -> None:
        self._box = box
        self._keys: dict[str, None] = {}

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
        self.put(key, data)

    def order(self, number: int, order: Order) -> None:
        """Post a round: each participant reads its own group, and the parameters only if it has
        one.
        """
        key, data = f"order/{number}", order.to_json()
        groups = order.round.groups
        if sum(map(len, groups)) > PAGE:
            pages: dict[int, dict[str, Any]] = {}
            for group in groups:
                name = self._shared(group) if len(group) > PAGE else ""
                members: dict[int, list[int]] = {}
                for seat in group:
                    members.setdefault(seat // PAGE, []).append(seat)
                for number_of_page, here in members.items():
                    page = pages.setdefault(number_of_page, {"groups": [], _SHARED: {}})
                    if name:
                        page[_SHARED][name] = here
                    else:
                        page["groups"].append(group)
            self.put(f"{key}/{_SHARED}", {"params": data["params"]})
            self._put_pages(key, pages)
            data |= {"groups": [], "params": {}, _PAGED: True}
        self.put(key, data)

    def _shared(self, group: Sequence[int]) -> str:
        """Key of a large group, which is posted once."""
        text = json.dumps(list(group)).encode()
        key = f"group/{hashlib.sha256(text).hexdigest()[:_DIGEST]}"
        if key not in self._keys:
            self.put(key, list(group))
        return key

    def _put_pages(self, key: str, pages: Mapping[int, Any]) -> None:
        for number, page in pages.items():
            self.put(f"{key}/page/{number}", page)


def whole(
    box: ControlStore, key: str, data: Any, seat: int, known: MutableMapping[str, list[int]]
) -> Any:
    """A message of rank 0 with what its pages tell one seat; as it is, if it has no pages.

    `known` are the large groups that this participant has read.

    Raises:
        ValueError: a page is not what it should be.
        StoreLost: the store is gone.
    """
    if not isinstance(data, dict) or data.get(_PAGED) is not True:
        return data
    data = {**{name: {} for name in _BY_SEAT}, **data}
    try:
        page = Node(f"rank 0: {key}", box.get(f"{key}/page/{seat // PAGE}", 0.0))
    except StoreTimeout:  # it tells nobody of this page anything
        return data
    data |= {name: page.data[name] for name in _BY_SEAT if name in page.data}
    if "groups" not in page.data:
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
        return data
    more = Node(f"rank 0: {key}", box.get(f"{key}/{_SHARED}", OPERATION_S))
    return {**data, "groups": groups, "params": more.get("params", dict)}
