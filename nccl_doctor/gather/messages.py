"""Messages of a run: sign-ins, orders and what is posted to all; they cross the store as JSON.

The ValueError for what is malformed names the sender and the place in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from nccl_doctor.gather.store import OPERATION_S, ControlStore, StoreTimeout
from nccl_doctor.launch import identity
from nccl_doctor.model.cluster import Facts, facts_to_json
from nccl_doctor.model.codec import (
    MAX_PID,
    MOST_MORE_S,
    Called,
    Node,
    Number,
    Part,
    Seconds,
    at_most,
    between,
    decode,
    encode,
    first,
    one_of,
)
from nccl_doctor.model.findings import Round
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.model.layout import HostPlace
from nccl_doctor.model.report import VERDICTS, facts_from_json, joining_from_json, launch_from_json
from nccl_doctor.system.masking import masked_data
from nccl_doctor.toolkit.host import host_name
from nccl_doctor.toolkit.variables.recorded import allowed

MOST_REASONS = 3
"""Causes that the end of the run tells."""
MOST_REFUSED = 64
"""Refused sign-ins whose reasons are told."""
_TEXT_MAX = 1024
Text = Annotated[str, at_most(_TEXT_MAX)]


class Reason(NamedTuple):
    """Reason in rank 0's words: code and message of a finding, and the hosts in its place."""

    code: Text
    message: Text
    hosts: Annotated[tuple[str, ...], first(64)] = ()


Refused = Annotated[Mapping[int, Reason], Part.SPARSE]
"""Reasons of sign-ins that were not taken, by seat."""


@dataclass(frozen=True)
class Roster:
    """The end of the sign-in: who is in, by seat and token, and what holds for all from here on.

    `nonce` is that of the run, `next_s` the longest time until the first order. `hosts` are some
    hosts of the job, name → addresses: whom to ask if rank 0 is lost. `refused` are the reasons of
    sign-ins that were not taken, by seat.
    """

    tokens: Mapping[int, str]
    nonce: Text
    backend: Annotated[str, one_of(("nccl", "gloo"))]
    next_s: Seconds
    hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refused: Refused = field(default_factory=dict)

    def admits(self, seat: int, token: str) -> bool:
        """True if the participant of this seat and token takes part."""
        return self.tokens.get(seat) == token


@dataclass(frozen=True)
class HostPlaces:
    """The place of every host, by the seat of the participant that signed in for it.

    `next_s` is the longest time until the roster; `hosts` and `refused` are as in the roster.
    """

    places: Mapping[int, HostPlace]
    tokens: Mapping[int, str]
    next_s: Seconds
    hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refused: Refused = field(default_factory=dict)

    def admits(self, seat: int, token: str) -> bool:
        """True if the host of the participant of this seat and token has a place."""
        return self.tokens.get(seat) == token and seat in self.places


@dataclass(frozen=True)
class Order:
    """One round to hold. `next_s` is the longest time until the next order; `more_s` are the
    seconds by which the end of the run is put off so far, where no --timeout was given.
    """

    check: Text
    round: Annotated[Round, Part.APART]
    next_s: Seconds
    more_s: Annotated[int, between(0, MOST_MORE_S), Part.SPARSE] = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data, with that of the round that its members need."""
        round_ = replace(self.round, may_shrink=False, pairs=None, by_seat=())
        return encode(self) | encode(round_)


@dataclass(frozen=True)
class Finish:
    """The end of the run, with the exit code of all; the verdict, the number of root causes, the
    host that has the report, and the first causes, as far as they are told.
    """

    code: Annotated[int, between(0, 3), Called("finish")]
    verdict: Annotated[str, one_of(VERDICTS), Part.SPARSE] = ""
    causes: Annotated[int, between(0, 1_000_000), Part.SPARSE] = 0
    host: Annotated[Text, Part.SPARSE] = ""
    reasons: Annotated[tuple[Reason, ...], first(MOST_REASONS), Part.SPARSE] = ()

    @property
    def words(self) -> str:
        """The last line of a host without the report: `FAIL, see node 0 (ux0): 1 problem`."""
        if not self.verdict:
            return ""
        host = f" ({self.host})" if self.host else ""
        thing = {"fail": "problem", "warn": "warning"}.get(self.verdict)
        many = f": {self.causes} {thing}{'s' if self.causes != 1 else ''}" if thing else ""
        return f"{self.verdict.upper()}, see node 0{host}{many}"


def order_from(data: Any) -> Order | Finish:
    """Order, or the end of the run, of its data."""
    node = Node("rank 0: order", data)
    if "finish" in node.data:
        return decode(Finish, node)
    return decode(Order, node, round=decode(Round, node))


# Messages of rank 0 to all, posted so that each participant reads what concerns itself.
#
# In one message, N participants would read N entries each: with 16,384 ranks, gigabytes. Above
# some dozens of seats what differs from seat to seat stands on pages, for as many seats each. The
# list of all seats says so in the message that all read; of an order there are pages only, so
# that each participant reads one message. A large group is posted once in a run, however many
# rounds it has, and each of its members reads it once.


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
        data = encode(told)
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
        self._to_all(number, encode(end))

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
    """True if a message of rank 0 has pages, and so has every order that follows."""
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
    groups = [
        list(group) for group in page.get("groups", tuple[list[int], ...], ()) if seat in group
    ]
    large = Node(page.path, page.get(_SHARED, dict))
    for name in large.data:
        if seat in large.get(name, tuple[int, ...], ()):
            if name not in known:
                group = Node(f"rank 0: {name}", {"group": box.get(name, OPERATION_S)})
                known[name] = list(group.get("group", tuple[int, ...], ()))
            groups.append(known[name])
    if not groups:
        return {**data, "groups": [], "params": {}}
    tables = page.get(_TABLES, dict, {})
    if page.data.get("params") is None:
        page = Node(f"rank 0: {key}", box.get(f"{key}/{_SHARED}", OPERATION_S))
    return {**data, "groups": groups, "params": page.get("params", dict) | tables}


# First message of a participant; it crosses the store as JSON.


SIGN_IN_MAX = 4 << 20
"""Largest sign-in, in bytes of JSON: some forty times that of a host of eight GPUs."""


@dataclass(frozen=True)
class Claimant:
    """Sender as a message names it, where the message itself cannot be taken."""

    host: str = ""
    rank: int | None = None
    node_rank: int | None = None
    is_host: bool = False

    @property
    def is_known(self) -> bool:
        """True if it says which place in the job it claims."""
        return self.rank is not None or self.node_rank is not None

    def may_be(self, rank: int | None, node: int | None) -> bool:
        """True if it claims this rank, or speaks for all ranks of this node."""
        if self.is_host:
            return node is not None and self.node_rank == node
        return rank is not None and self.rank == rank

    def in_words(self) -> str:
        """Sender in words, as the beginning of a sentence."""
        rank = "" if self.rank is None or self.is_host else f"rank {self.rank}"
        names = " on ".join(word for word in (rank, self.host) if word)
        return f"somebody who says to be {names}: " if names else ""

    @classmethod
    def of(cls, data: Any) -> Claimant:
        """Sender of a sign-in of any version, where it can be read."""
        try:
            node = Node("sign-in", data)
            host, launch = (Node(name, node.data.get(name, {})) for name in ("host", "launch"))
        except ValueError:
            return cls()
        name = host.readable("name", str) or ""
        return cls(
            name if name.isprintable() and len(name) <= _TEXT_MAX else "",
            launch.readable("rank", Number),
            launch.readable("node_rank", Number),
            launch.data.get("launcher") == OWN and launch.data.get("local_rank") == 0,
        )


class _Machine(NamedTuple):
    name: Text
    key: Text
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class SignIn:
    """One participant: its launch, its host, and the facts that it observed alone.

    `token` is random: by it a participant recognises its own sign-in. `host_key` tells machines
    apart (`identity.host_key`). `alone` is from `alone_as`. The rest is as in `Rank`.
    """

    token: Text
    pid: Annotated[int, between(0, MAX_PID)]
    launch: Launch
    host_name: Annotated[str, Part.APART]
    host_key: Annotated[str, Part.APART]
    addresses: Annotated[tuple[str, ...], Part.APART] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    device: Text | None = None
    backend: Annotated[str, one_of(("", "auto", "nccl", "gloo"))] = ""
    joining: Mapping[str, float] = field(default_factory=dict)
    facts: Annotated[Facts, Part.APART] = field(default_factory=dict)
    alone: str = ""

    @property
    def host(self) -> tuple[str, int | None]:
        """Key of a host of the job: the same for all its participants.

        Two node ranks on one machine are two hosts to the job (and a finding to the judge); but a
        node rank that was only derived may be wrong, and must not split a machine.
        """
        return self.host_key, self.launch.given("node_rank")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        host = {"name": self.host_name, "key": self.host_key, "addresses": list(self.addresses)}
        return {**encode(self), "host": host, "facts": facts_to_json(self.facts)}

    @classmethod
    def from_json(cls, seat: int, data: Any) -> SignIn:
        """Inverse of `to_json`; unknown keys, from a newer version, are ignored.

        Raises:
            ValueError: it is malformed; names the seat that sent it, and the place in it.
        """
        node = Node(f"seat {seat}: sign-in", data)
        host = decode(_Machine, Node(f"{node.path}.host", node.get("host", dict)))
        return decode(
            cls,
            node,
            launch=launch_from_json(node),
            host_name=host.name,
            host_key=host.key,
            addresses=host.addresses,
            joining=joining_from_json(node),
            facts=facts_from_json(node),
        )


def introduce(launch: Launch, environ: Mapping[str, str], backend: str) -> SignIn:
    """The sign-in of this process, before it has looked at anything."""
    return SignIn(
        token=secrets.token_hex(8),
        pid=os.getpid(),
        launch=decode(Launch, Node("launch", masked_data(encode(launch)))),
        host_name=host_name(),
        host_key=identity.host_key(),
        addresses=identity.host_addresses(),
        env=allowed(environ),
        device="cuda" if identity.num_gpus(environ) else "cpu",
        backend=backend,
    )
