"""Known facts about the link between every two hosts: the data of network maps. Pure.

Checks say what was measured (`HostLink`), findings say what is blamed.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nccl_doctor.model.cluster import Host
from nccl_doctor.model.findings import Severity
from nccl_doctor.model.report import Report
from nccl_doctor.model.sections import HostLink
from nccl_doctor.report.story import Checks, no_checks, sections_of
from nccl_doctor.toolkit.units import bits_text, time_text

Pair = tuple[int, int]
"""Positions of (the host that calls or sends, the other one) in `Network.hosts`."""

_BADNESS = ("", "ok", "impaired", "failed")
"""Results, the worst last; it counts if there are several: the job uses that path too."""


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
        text = ", ".join(part for part in parts if part) or "not tried"
        return f"{text}; blamed by {', '.join(self.blame)}" if self.blame else text


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


def network_of(report: Report, checks: Checks = no_checks) -> Network:
    """The map of a report: its hosts in their order, then those that only findings know.

    `checks` are asked what they measured; without them only what findings blame is known.
    """
    hosts = report.cluster.hosts
    names = [host.label for host in hosts]
    ends = (end for found in report.findings for link in found.where.links for end in link)
    known = set(names)
    names += [end for end in dict.fromkeys(ends) if end not in known]
    labels = _unique(names, hosts)
    places: dict[str, list[int]] = defaultdict(list)
    for place, name in enumerate(names):
        places[name].append(place)
    links = {
        (a, b): replace(link, start=labels[a], end=labels[b])
        for (a, b), link in sorted(_measured(report, checks).items())
    }
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
    return "" if microseconds is None else time_text(microseconds * 1e-6)


def show_rate(rate: float | None) -> str:
    """A rate in bytes per second, as text in bits: `9.4 Gbit/s`."""
    return "" if rate is None else bits_text(rate)


def _unique(names: list[str], hosts: Sequence[Host]) -> tuple[str, ...]:
    """Names of hosts; a name that several share gets the node rank, or the place."""
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


def _measured(report: Report, checks: Checks) -> dict[Pair, Link]:
    """Facts of the checks on each link, by the positions of its hosts; without any blame."""
    place_of = {host.id: place for place, host in enumerate(report.cluster.hosts)}
    found: dict[Pair, list[HostLink]] = {}
    for each in sections_of(report, checks):
        if isinstance(each, HostLink) and {each.start, each.end} <= place_of.keys():
            found.setdefault((place_of[each.start], place_of[each.end]), []).append(each)
    return {pair: _united(same) for pair, same in found.items()}


def _united(same: Sequence[HostLink]) -> Link:
    worst = max(same, key=lambda each: _BADNESS.index(each.reach))
    return Link(
        "",
        "",
        reach="failed" if worst.reach == "impaired" else worst.reach,
        words=worst.words,
        rtt_us=min((each.rtt_us for each in same if each.rtt_us is not None), default=None),
        rate=max((each.rate for each in same if each.rate is not None), default=None),
        segments=sum(each.segments for each in same),
        lost=sum(each.lost for each in same),
    )
