"""Messages of rank 0 to the participants; they cross the store as JSON.

`from_json` raises ValueError for what is malformed, and names the sender and the place in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from nccl_doctor.model.findings import Round
from nccl_doctor.model.json_node import Node
from nccl_doctor.model.layout import HostPlace
from nccl_doctor.model.limits import MAX_LOCAL_RANKS, MAX_RANKS, MAX_SEATS, MOST_MORE_S
from nccl_doctor.model.report import VERDICTS

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
