"""Messages of a run: sign-ins, orders and what is posted to all; they cross the store as JSON.

`from_json` raises ValueError for what is malformed, and names the sender and the place in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from nccl_doctor.gather.store import OPERATION_S, ControlStore, StoreTimeout
from nccl_doctor.launch import identity
from nccl_doctor.model.cluster import Facts, facts_to_json
from nccl_doctor.model.codec import (
    MAX_LOCAL_RANKS,
    MAX_PID,
    MAX_RANKS,
    MAX_SEATS,
    MOST_MORE_S,
    Node,
    decode,
    encode,
)
from nccl_doctor.model.findings import Round
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.model.layout import HostPlace
from nccl_doctor.model.report import VERDICTS, facts_from_json, joining_from_json, launch_from_json
from nccl_doctor.system.masking import masked_data
from nccl_doctor.toolkit.host import host_name
from nccl_doctor.toolkit.variables.recorded import allowed

_TEXT_MAX = 1024
_CAUSES_MAX = 1_000_000
MOST_REASONS = 3
"""Causes that the end of the run tells."""
MOST_REFUSED = 64
"""Refused sign-ins whose reasons are told."""
_HOSTS_MAX = 64
_BACKENDS = ("nccl", "gloo")


class Reason(NamedTuple):
    """Reason in rank 0's words: code and message of a finding, and the hosts in its place."""

    code: str
    message: str
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Roster:
    """The end of the sign-in: who is in, by seat and token, and what holds for all from here on.

    `nonce` is that of the run, `next_s` the longest time until the first order. `hosts` are some
    hosts of the job, name → addresses: whom to ask if rank 0 is lost. `refused` are the reasons of
    sign-ins that were not taken, by seat.
    """

    tokens: Mapping[int, str]
    nonce: str
    backend: str
    next_s: float
    hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refused: Mapping[int, Reason] = field(default_factory=dict)

    def admits(self, seat: int, token: str) -> bool:
        """True if the participant of this seat and token takes part."""
        return self.tokens.get(seat) == token

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        data = {**asdict(self), "tokens": _by_text(self.tokens)}
        del data["refused"]
        return data | _refused_json(self.refused)

    @classmethod
    def from_json(cls, data: Any) -> Roster:
        """Inverse of `to_json`."""
        node = Node("rank 0: roster", data)
        return cls(
            _tokens(node),
            node.text("nonce", _TEXT_MAX),
            node.one_of("backend", _BACKENDS),
            _next_s(node),
            _hosts(node),
            _refused(node),
        )


@dataclass(frozen=True)
class HostPlaces:
    """The place of every host, by the seat of the participant that signed in for it.

    `next_s` is the longest time until the roster; `hosts` and `refused` are as in the roster.
    """

    places: Mapping[int, HostPlace]
    tokens: Mapping[int, str]
    next_s: float
    hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    refused: Mapping[int, Reason] = field(default_factory=dict)

    def admits(self, seat: int, token: str) -> bool:
        """True if the host of the participant of this seat and token has a place."""
        return self.tokens.get(seat) == token and seat in self.places

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        places = {
            seat: {
                name: number for name, number in asdict(place).items() if name != "nnodes" or number
            }
            for seat, place in self.places.items()
        }
        return {
            "places": _by_text(places),
            "tokens": _by_text(self.tokens),
            "next_s": self.next_s,
            "hosts": dict(self.hosts),
            **_refused_json(self.refused),
        }

    @classmethod
    def from_json(cls, data: Any) -> HostPlaces:
        """Inverse of `to_json`."""
        node = Node("rank 0: layout", data)
        places = Node(f"{node.path}.places", node.get("places", dict))
        return cls(
            {_seat(places, key): _place(places, key) for key in places.data},
            _tokens(node),
            _next_s(node),
            _hosts(node),
            _refused(node),
        )


@dataclass(frozen=True)
class Order:
    """One round to hold. `next_s` is the longest time until the next order; `more_s` are the
    seconds by which the end of the run is put off so far, where no --timeout was given.
    """

    check: str
    round: Round
    next_s: float
    more_s: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "check": self.check,
            "round": self.round.name,
            "groups": self.round.groups,
            "params": dict(self.round.params),
            "deadline_s": self.round.deadline_s,
            "next_s": self.next_s,
            **({"more_s": self.more_s} if self.more_s else {}),
        }


@dataclass(frozen=True)
class Finish:
    """The end of the run, with the exit code of all; the verdict, the number of root causes, the
    host that has the report, and the first causes, as far as they are told.
    """

    code: int
    verdict: str = ""
    causes: int = 0
    host: str = ""
    reasons: tuple[Reason, ...] = ()

    @property
    def words(self) -> str:
        """The last line of a host without the report: `FAIL, see node 0 (ux0): 1 problem`."""
        if not self.verdict:
            return ""
        host = f" ({self.host})" if self.host else ""
        thing = {"fail": "problem", "warn": "warning"}.get(self.verdict)
        many = f": {self.causes} {thing}{'s' if self.causes != 1 else ''}" if thing else ""
        return f"{self.verdict.upper()}, see node 0{host}{many}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        told: dict[str, Any] = {"verdict": self.verdict, "causes": self.causes, "host": self.host}
        told["reasons"] = [each._asdict() for each in self.reasons]
        return {"finish": self.code, **{name: value for name, value in told.items() if value}}


def order_from_json(data: Any) -> Order | Finish:
    """Inverse of `to_json` of both."""
    node = Node("rank 0: order", data)
    if "finish" in node.data:
        return Finish(
            _told(node, "finish", 3),
            node.one_of("verdict", VERDICTS) if "verdict" in node.data else "",
            node.number("causes", 0, _CAUSES_MAX) or 0,
            node.text("host", _TEXT_MAX) if "host" in node.data else "",
            node.each("reasons", _reason)[:MOST_REASONS] if "reasons" in node.data else (),
        )
    groups = (Node(node.path, {"groups[]": group}) for group in node.many("groups", list))
    round_ = Round(
        node.text("round", _TEXT_MAX),
        tuple(_group(group.many("groups[]", int)) for group in groups),
        node.seconds("deadline_s"),
        node.get("params", dict),
    )
    more_s = node.number("more_s", 0, MOST_MORE_S) or 0
    return Order(node.text("check", _TEXT_MAX), round_, _next_s(node), more_s)


def _reason(node: Node) -> Reason:
    hosts = node.many("hosts", str)[:_HOSTS_MAX]
    return Reason(node.text("code", _TEXT_MAX), node.text("message", _TEXT_MAX), hosts)


def _refused_json(refused: Mapping[int, Reason]) -> dict[str, Any]:
    told = {str(seat): reason._asdict() for seat, reason in refused.items()}
    return {"refused": told} if told else {}


def _refused(node: Node) -> dict[int, Reason]:
    told = Node(f"{node.path}.refused", node.get("refused", dict, {}))
    return {
        _seat(told, key): _reason(Node(f"{told.path}.{key}", told.get(key, dict)))
        for key in told.data
    }


def _group(seats: tuple[int, ...]) -> tuple[int, ...]:
    if seats and not (min(seats) >= 0 and max(seats) < MAX_SEATS):
        raise ValueError("rank 0: order.groups has what is not the number of a seat")
    return seats


def _place(places: Node, key: str) -> HostPlace:
    node = Node(f"{places.path}.{key}", places.data[key])
    names = [field.name for field in fields(HostPlace) if field.name != "nnodes"]
    nnodes = node.number("nnodes", 0, MAX_RANKS) or 0
    told = {
        name: _told(node, name, MAX_LOCAL_RANKS if name == "nproc" else MAX_RANKS) for name in names
    }
    return HostPlace(**told, nnodes=nnodes)


def _told(node: Node, key: str, high: int) -> int:
    node.number(key, 0, high)
    return node.get(key, int)


def _tokens(node: Node) -> dict[int, str]:
    tokens = Node(f"{node.path}.tokens", node.get("tokens", dict))
    return {_seat(tokens, key): tokens.get(key, str) for key in tokens.data}


def _hosts(node: Node) -> dict[str, list[str]]:
    hosts = Node(f"{node.path}.hosts", node.get("hosts", dict, {}))
    return {name: list(hosts.many(name, str)) for name in hosts.data}


def _by_text(by_seat: Mapping[int, Any]) -> dict[str, Any]:
    return {str(seat): each for seat, each in by_seat.items()}


def _seat(node: Node, key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10):
        raise ValueError(f'{node.path}: "{key}" is not the number of a seat')
    return int(key)


def _next_s(node: Node) -> float:
    return node.seconds("next_s")


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


# First message of a participant; it crosses the store as JSON.


SIGN_IN_MAX = 4 << 20
"""Largest sign-in, in bytes of JSON: some forty times that of a host of eight GPUs."""
_BACKENDS_SAID = ("", "auto", "nccl", "gloo")


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
            _readable_number(launch, "rank"),
            _readable_number(launch, "node_rank"),
            launch.data.get("launcher") == OWN and launch.data.get("local_rank") == 0,
        )


def _readable_number(node: Node, key: str) -> int | None:
    try:
        return node.number(key, 0, MAX_RANKS)
    except ValueError:
        return None


@dataclass(frozen=True)
class SignIn:
    """One participant: its launch, its host, and the facts that it observed alone.

    `token` is random: by it a participant recognises its own sign-in. `host_key` tells machines
    apart (`identity.host_key`). `alone` is from `alone_as`. The rest is as in `Rank`.
    """

    token: str
    pid: int
    launch: Launch
    host_name: str
    host_key: str
    addresses: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    backend: str = ""
    joining: Mapping[str, float] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
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
        return {
            "token": self.token,
            "pid": self.pid,
            "launch": encode(self.launch),
            "env": dict(self.env),
            "device": self.device,
            "backend": self.backend,
            "alone": self.alone,
            "host": {
                "name": self.host_name,
                "key": self.host_key,
                "addresses": list(self.addresses),
            },
            "joining": dict(self.joining),
            "facts": facts_to_json(self.facts),
        }

    @classmethod
    def from_json(cls, seat: int, data: Any) -> SignIn:
        """Inverse of `to_json`; unknown keys, from a newer version, are ignored.

        Raises:
            ValueError: it is malformed; names the seat that sent it, and the place in it.
        """
        node = Node(f"seat {seat}: sign-in", data)
        host = Node(f"{node.path}.host", node.get("host", dict))
        env = Node(f"{node.path}.env", node.get("env", dict))
        return cls(
            token=node.text("token", _TEXT_MAX),
            pid=node.number("pid", 0, MAX_PID) or 0,
            launch=launch_from_json(node),
            host_name=host.text("name", _TEXT_MAX),
            host_key=host.text("key", _TEXT_MAX),
            addresses=host.many("addresses", str),
            env={name: env.get(name, str) for name in env.data},
            device=None if node.data.get("device") is None else node.text("device", _TEXT_MAX),
            backend=node.one_of("backend", _BACKENDS_SAID, ""),
            joining=joining_from_json(node),
            facts=facts_from_json(node),
            alone=node.get("alone", str, ""),
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
