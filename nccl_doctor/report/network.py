"""Known facts about the link between every two hosts: the data of network maps. Pure.

Facts of checks are read by their names, and whatever of them is not there, or is not as this
version knows it, is not known.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nccl_doctor.model.cluster import Host, OutcomeStatus
from nccl_doctor.model.findings import Severity
from nccl_doctor.model.report import Report
from nccl_doctor.toolkit.peers.matrix import job_roles

Pair = tuple[int, int]
"""Positions of (the host that calls or sends, the other one) in `Network.hosts`."""

_ENOUGH = 2
"""A call that failed once only is not known to fail."""
_MILD = "mtu"
_WORDS = {
    "dropped": "no answer",
    "refused": "connection refused",
    "rejected": "rejected by a firewall",
    "unreachable": "no route",
    "no-neighbour": "no host has the address",
    "own-address": "the caller has the same address",
    "intercepted": "something else answers",
    "mtu": "large packets are lost",
}


@dataclass(frozen=True)
class Link:
    """One direction between two hosts.

    Attributes:
        start, end: their labels.
        reach: `ok`, `failed`, or the empty string where nobody tried.
        words: how it failed.
        rtt_us: round-trip time in microseconds, None where not measured; the better of two tries.
        rate: bytes per second, 0 where it stood still, None where not measured; likewise.
        segments, lost: of all tries.
        blame: codes of the findings, warnings and failures, that name this link.
    """

    start: str
    end: str
    reach: str = ""
    words: str = ""
    rtt_us: float | None = None
    rate: float | None = None
    segments: int = 0
    lost: int = 0
    blame: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """True if anything was tried on it."""
        return bool(self.reach) or self.rtt_us is not None or self.rate is not None

    def in_words(self) -> str:
        """All of it, on one line."""
        parts = [self.words or {"ok": "reachable"}.get(self.reach, self.reach)]
        parts += [show_latency(self.rtt_us), show_rate(self.rate)]
        if self.lost:
            parts.append(f"{self.lost} of {self.segments} segments lost")
        told = ", ".join(part for part in parts if part) or "not tried"
        return f"{told}; blamed by {', '.join(self.blame)}" if self.blame else told


@dataclass(frozen=True)
class Network:
    """Hosts and the links between them.

    `hosts` are labels, each of them once; `links` are those that were tried or are blamed;
    `blamed` are hosts, by position, with the codes of the root causes that name them; `absent` are
    the hosts that never signed in.
    """

    hosts: tuple[str, ...]
    links: Mapping[Pair, Link]
    blamed: Mapping[int, tuple[str, ...]]
    absent: frozenset[int] = frozenset()

    @cached_property
    def usual_rtt_us(self) -> float | None:
        """Median over the links that no finding blames; over all links, if each one is blamed."""
        return self._usual("rtt_us")

    @cached_property
    def usual_rate(self) -> float | None:
        """Median rate in bytes per second, over the same links as `usual_rtt_us`."""
        return self._usual("rate")

    def at(self, pair: Pair) -> Link:
        """The link of two hosts; an empty one where nothing is known."""
        return self.links.get(pair) or Link(self.hosts[pair[0]], self.hosts[pair[1]])

    def by_code(self) -> dict[str, list[Pair]]:
        """Code of a finding → the links that it names, in order."""
        found: dict[str, list[Pair]] = {}
        for pair, link in sorted(self.links.items()):
            for code in link.blame:
                found.setdefault(code, []).append(pair)
        return found

    def _usual(self, name: str) -> float | None:
        good = [getattr(link, name) for link in self.links.values() if not link.blame]
        every = [getattr(link, name) for link in self.links.values()]
        for values in (good, every):
            if known := [value for value in values if value is not None]:
                return float(statistics.median(known))
        return None


def network_of(report: Report) -> Network:
    """The map of a report: its hosts in their order, then those that only findings know."""
    hosts = report.cluster.hosts
    names = [host.label for host in hosts]
    for finding in report.findings:
        names += [end for link in finding.where.links for end in link if end not in names]
    labels = _unique(names, hosts)
    places: dict[str, list[int]] = defaultdict(list)
    for place, name in enumerate(names):
        places[name].append(place)
    known = _Known(report)
    links: dict[Pair, Link] = {}
    for a, b in known.pairs():
        reach, words = known.reach.get((a, b), ("", ""))
        links[a, b] = replace(
            known.speed.get((a, b), Link("", "")),
            start=labels[a],
            end=labels[b],
            reach=reach,
            words=words,
        )
    for pair, codes in _blamed_links(report, places).items():
        link = links.get(pair) or Link(labels[pair[0]], labels[pair[1]])
        links[pair] = replace(link, blame=tuple(codes))
    blamed: dict[int, list[str]] = {}
    for cause in report.root_causes:
        for name in cause.where.hosts:
            for place in places.get(name, ()):
                codes = blamed.setdefault(place, [])
                codes += [cause.code] if cause.code not in codes else []
    absent = frozenset(i for i, host in enumerate(hosts) if not host.reported)
    return Network(labels, links, {i: tuple(codes) for i, codes in blamed.items()}, absent)


def show_latency(microseconds: float | None) -> str:
    """`85 µs`, `1.2 ms`; the empty string where it is not known."""
    if microseconds is None:
        return ""
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    return f"{microseconds / 1000:.3g} ms"


def show_rate(rate: float | None) -> str:
    """Bytes per second, as those who sell it say it: `9.4 Gbit/s`."""
    if rate is None:
        return ""
    mbit = rate * 8 / 1e6
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def _unique(names: list[str], hosts: Sequence[Host]) -> tuple[str, ...]:
    """Hosts that share a name are told apart by their node rank, or their place."""
    often = Counter(names)
    return tuple(
        name if often[name] == 1 else f"{name} (node {hosts[i].node_rank if i < len(hosts) else i})"
        for i, name in enumerate(names)
    )


def _blamed_links(report: Report, places: Mapping[str, list[int]]) -> dict[Pair, list[str]]:
    found: dict[Pair, list[str]] = {}
    for finding in (*report.root_causes, *report.findings):
        if finding.level is Severity.INFO:
            continue
        for start, end in finding.where.links:
            for a in places.get(start, ()):
                for b in places.get(end, ()):
                    codes = found.setdefault((a, b), [])
                    if finding.code not in codes and a != b:
                        codes.append(finding.code)
    return {pair: codes for pair, codes in found.items() if codes}


class _Known:
    """What the checks `firewall` and `links` measured, by the positions of the hosts."""

    def __init__(self, report: Report) -> None:
        self._hosts = report.cluster.hosts
        by_id = {host.id: place for place, host in enumerate(self._hosts)}
        self._of_seat = {str(rank.seat): by_id[rank.host.id] for rank in report.cluster.ranks}
        self._backend = report.cluster.backend
        self.reach: dict[Pair, tuple[str, str]] = {}
        self.speed: dict[Pair, Link] = {}
        for pair, reach, words in self._calls():
            # Of several results the worse one: it is a road that the job takes too.
            if _badness(reach, words) > _badness(*self.reach.get(pair, ("", ""))):
                self.reach[pair] = reach, words
        for round_name in ("exchange", "confirm"):
            for place, partner, record in self._records("links", round_name, "sent"):
                self._measure((place, partner), record)

    def pairs(self) -> list[Pair]:
        """Everything that was tried."""
        return sorted({*self.reach, *self.speed})

    def _records(self, check: str, round_name: str, key: str) -> Iterator[tuple[int, int, Any]]:
        """(host, partner, record) of facts that are keyed by the partner's seat.

        A partner that was lost in the same round says nothing about the road to it.
        """
        facts = {
            place: found
            for place, host in enumerate(self._hosts)
            if (found := _facts(host, check, round_name)) is not None
        }
        for place, found in facts.items():
            for seat, record in _mapping(found.get(key)).items():
                partner = self._of_seat.get(str(seat))
                if partner is not None and partner != place and partner in facts:
                    yield place, partner, record

    def _calls(self) -> Iterator[tuple[Pair, str, str]]:
        for place, partner, entries in self._records("firewall", "matrix", "peers"):
            theirs = _facts(self._hosts[partner], "firewall", "matrix") or {}
            wanted = job_roles(self._backend, theirs.get("nccl_data") == "sockets")
            calls = [entry for entry in _list(entries) if isinstance(entry, Mapping)]
            job = [call for call in calls if wanted & set(map(str, _list(call.get("roles"))))]
            for call in job or calls:
                attempts = [each for each in _list(call.get("attempts")) if _mapping(each)]
                if not attempts:
                    continue
                outcome = str(attempts[-1].get("outcome"))
                if outcome == "ok":
                    yield (place, partner), "ok", ""
                elif outcome == "own-address" or len(attempts) >= _ENOUGH:
                    back = outcome == _MILD and attempts[-1].get("stalled") == "download"
                    pair = (partner, place) if back else (place, partner)
                    yield pair, "failed", _WORDS.get(outcome, outcome)

    def _measure(self, pair: Pair, record: Any) -> None:
        record = _mapping(record)
        if not record or "problem" in record:
            return
        stood = record.get("stalled") in ("echo", "burst")
        old = self.speed.get(pair, Link("", ""))
        self.speed[pair] = replace(
            old,
            rtt_us=_better(min, old.rtt_us, _number(record.get("rtt_us"))),
            rate=_better(max, old.rate, 0.0 if stood else _number(record.get("rate"))),
            segments=old.segments + int(_number(record.get("segments")) or 0),
            lost=old.lost + int(_number(record.get("lost")) or 0),
        )


def _badness(reach: str, words: str) -> int:
    if reach != "failed":
        return 1 if reach else 0
    return 2 if words == _WORDS[_MILD] else 3


def _better(choose: Any, *values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    best: float | None = choose(known) if known else None
    return best


def _facts(host: Host, check: str, round_name: str) -> Mapping[str, Any] | None:
    outcome = host.facts.get(check, {}).get(round_name)
    return outcome.facts if outcome is not None and outcome.status is OutcomeStatus.OK else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) and value >= 0 else None
    except OverflowError:  # JSON knows whole numbers of any size
        return None
