"""Blame by comparison: the odd ones out, and the hosts or links that explain failed pairs.

Pure functions on made-up data as much as on real: property-tested on random clusters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Generic, Literal, TypeVar

from nccl_doctor.model.findings import Confidence

P = TypeVar("P", bound=Hashable)
V = TypeVar("V", bound=Hashable)

Way = Literal["in", "out", "both", "one"]

_WITNESSES = 2
"""Number of hosts that must be seen to work, and fail with a host, for it to be blamed."""
_MOST_HOSTS = 8
"""Number of hosts that depend on each other up to which all covers are compared."""
_WAYS: tuple[Way, Way] = ("in", "out")


@dataclass(frozen=True)
class Odd(Generic[P, V]):
    """The result of comparing places.

    `places` are the odd ones out; on a tie all places, and `usual` is None.
    """

    places: tuple[P, ...]
    usual: V | None
    tie: bool


def odd_ones_out(values: Mapping[P, V]) -> Odd[P, V] | None:
    """The places whose value differs from the majority's.

    Args:
        values: place → observed value.

    Returns: None if all agree. If two values are equally common, it is a tie: then all places are
    returned, and none of them is odd.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    (usual, most), (_, second) = counts.most_common(2)
    if most == second:
        return Odd(tuple(values), None, True)
    return Odd(tuple(place for place, value in values.items() if value != usual), usual, False)


@dataclass(frozen=True)
class Cause(Generic[P]):
    """A host or a link that explains failed pairs.

    Attributes:
        ends: one host, or both ends of a link; (from, to) for a link that fails in one direction.
        way: for a host the direction that fails, `in`, `out` or `both`; for a link `both` or `one`.
        pairs: every failed ordered pair that it explains. Two causes may explain the same pair.
        confidence: for a host, `certain` if all other hosts of these pairs are seen to work, else
            `likely`. For a link, `certain` if both ends work with others, `likely` if one is not
            seen to, `possible` if neither is, or if several links may also be one host.
    """

    ends: tuple[P, ...]
    way: Way
    pairs: frozenset[tuple[P, P]]
    confidence: Confidence

    @property
    def is_host(self) -> bool:
        """True if a host is to blame, rather than a link."""
        return len(self.ends) == 1


@dataclass(frozen=True)
class LinkBlame(Generic[P]):
    """The causes of a set of failed ordered pairs: hosts first, then links, each sorted."""

    causes: tuple[Cause[P], ...] = ()

    @property
    def hosts(self) -> tuple[P, ...]:
        """The hosts to blame."""
        return tuple(cause.ends[0] for cause in self.causes if cause.is_host)

    @property
    def links(self) -> tuple[tuple[P, P], ...]:
        """The ordered pairs that no host explains."""
        pairs = {pair for cause in self.causes if not cause.is_host for pair in cause.pairs}
        return tuple(sorted(pairs, key=str))

    @property
    def certain(self) -> bool:
        """True if every cause is certain."""
        return all(cause.confidence is Confidence.CERTAIN for cause in self.causes)


def blame_links(tested: Iterable[tuple[P, P]], failed: Iterable[tuple[P, P]]) -> LinkBlame[P]:
    """The fewest causes that explain every failed pair: bad hosts, and bad links.

    A cause is a host, its incoming or its outgoing direction, a link, or one direction of a link.
    It is ruled out if it would break a pair that works. Of the covers with the fewest causes, only
    what they have in common is blamed on hosts, so that a victim is never named; a host also needs
    two others that it fails with and that are seen to work, so that no host is blamed among only
    two, or if nothing works. What remains are links.

    An end is anything that can fail on its own: a host, or (host, interface).

    Args:
        tested: ordered pairs (from, to) that were tried; failed ones are taken as tested.
        failed: those that failed.

    Returns: a result that does not depend on the order of the pairs. It is exact, unless more than
    eight hosts depend on each other (many hosts that fail with one another, and almost no others to
    compare with): then too few hosts may be named, and links instead.
    """
    bad = frozenset(failed)
    if not bad:
        return LinkBlame()
    matrix = _SetCover(frozenset(tested), bad)
    hosts = tuple(matrix.hosts())
    left = matrix.failed.difference(*(cause.pairs for cause in hosts))
    return LinkBlame((*hosts, *matrix.links(left)))


class _SetCover(Generic[P]):
    """The failed pairs as a set cover.

    To count causes, one per host is enough: `reach` has the failed pairs of a host in each of its
    directions in which nothing works. A link explains an edge, the failed pairs between two hosts.
    So a choice of hosts costs its size, plus one for each edge that it does not explain completely.
    """

    def __init__(self, tested: frozenset[tuple[P, P]], failed: frozenset[tuple[P, P]]) -> None:
        self.failed = failed
        self.tried = _roles_of(tested | failed)
        self.well = _roles_of(tested - failed)
        self.reach: dict[P, set[tuple[P, P]]] = {}
        for pair in failed:
            for role in _roles(pair):
                if role not in self.well:
                    self.reach.setdefault(role[1], set()).add(pair)

    def explains(self, host: P, pairs: Collection[tuple[P, P]]) -> bool:
        """True if this host may be the cause of all these pairs."""
        return self.reach.get(host, set()).issuperset(pairs)

    def is_suspect(self, host: P) -> bool:
        """True if enough other hosts that it fails with are seen to work."""
        roles = {role for pair in self.reach[host] for role in _roles(pair)} & self.well
        return len({other for _, other in roles} - {host}) >= _WITNESSES

    @cached_property
    def guilty(self) -> frozenset[P]:
        """Hosts of every smallest cover.

        A host is certainly one if two edges lie wholly in its reach, and not wholly in that of the
        other end: whatever else is chosen, it costs less than these two links.
        """
        edges = _edges(self.failed)
        found: set[P] = set()
        while True:
            alone = Counter(
                host
                for edge, pairs in edges.items()
                for host in edge
                if self.explains(host, pairs)
                and not any(self.explains(other, pairs) for other in edge - {host})
            )
            more = {h for h, count in alone.items() if count > 1 and self.is_suspect(h)}
            if not more:
                return frozenset(found | self._guilty_together(edges))
            found |= more
            known = {pair for host in more for pair in self.reach[host]}
            edges = _edges(pair for pairs in edges.values() for pair in pairs - known)

    def _guilty_together(self, edges: Mapping[frozenset[P], set[tuple[P, P]]]) -> set[P]:
        """Hosts of every smallest cover that depend on the other hosts in it: by comparing all."""
        counts = Counter(
            host
            for edge, pairs in edges.items()
            for host in edge
            if not pairs.isdisjoint(self.reach.get(host, ()))
        )
        # A host that would replace only one link is never needed.
        hosts = {host for host, count in counts.items() if count > 1}
        suspects = {host for host in hosts if self.is_suspect(host)}
        found: set[P] = set()
        for group in _connected(hosts, edges) if suspects else ():
            if len(group) <= _MOST_HOSTS and suspects & group:
                own = [pairs for edge, pairs in edges.items() if edge & group]
                found |= suspects & self._in_every_cover(group, own)
        return found

    def _in_every_cover(self, group: set[P], edges: Collection[set[tuple[P, P]]]) -> set[P]:
        costs: dict[tuple[P, ...], int] = {}
        for size in range(len(group) + 1):
            for chosen in combinations(group, size):
                known = {pair for host in chosen for pair in self.reach[host]}
                costs[chosen] = size + sum(not pairs <= known for pairs in edges)
        least = min(costs.values())
        return group.intersection(*(chosen for chosen, cost in costs.items() if cost == least))

    def hosts(self) -> Iterator[Cause[P]]:
        """The guilty hosts, each for no more directions than are needed."""
        for host in sorted(self.guilty, key=str):
            reach = self.reach[host]
            ways = {_way(host, pair) for pair in reach if not self._others_explain(host, pair)}
            pairs = frozenset(pair for pair in reach if _way(host, pair) in ways)
            rest = {(way, host) for way in _WAYS if way not in ways} & self.tried
            sure = rest <= self.well and all(
                role in self.well or role[1] == host or self._others_explain(host, pair)
                for pair in pairs
                for role in _roles(pair)
            )
            confidence = Confidence.CERTAIN if sure else Confidence.LIKELY
            yield Cause((host,), ways.pop() if len(ways) == 1 else "both", pairs, confidence)

    def _others_explain(self, host: P, pair: tuple[P, P]) -> bool:
        return any(end != host and end in self.guilty and pair in self.reach[end] for end in pair)

    def links(self, pairs: Iterable[tuple[P, P]]) -> Iterator[Cause[P]]:
        """A link for each edge of these pairs."""
        edges = _edges(pairs)
        doubts = {
            edge: {role for pair in pairs for role in _roles(pair)} - self.well
            for edge, pairs in edges.items()
        }
        counts = Counter(role for roles in doubts.values() for role in roles)
        for edge, found in sorted(edges.items(), key=lambda item: str(min(item[1], key=str))):
            hosts = {host for _, host in doubts[edge]}
            confidence = Confidence.POSSIBLE
            if not hosts:
                confidence = Confidence.CERTAIN
            elif len(hosts) == 1 and all(counts[role] == 1 for role in doubts[edge]):
                confidence = Confidence.LIKELY
            way: Way = "both" if len(found) > 1 else "one"
            yield Cause(min(found, key=str), way, frozenset(found), confidence)


def _roles(pair: tuple[P, P]) -> tuple[tuple[Way, P], tuple[Way, P]]:
    return ("out", pair[0]), ("in", pair[1])


def _roles_of(pairs: Collection[tuple[P, P]]) -> set[tuple[Way, P]]:
    senders: set[tuple[Way, P]] = {("out", end) for end in {pair[0] for pair in pairs}}
    return senders | {("in", end) for end in {pair[1] for pair in pairs}}


def _way(host: P, pair: tuple[P, P]) -> Way:
    return "out" if pair[0] == host else "in"


def _edges(pairs: Iterable[tuple[P, P]]) -> dict[frozenset[P], set[tuple[P, P]]]:
    edges: dict[frozenset[P], set[tuple[P, P]]] = {}
    for pair in pairs:
        edges.setdefault(frozenset(pair), set()).add(pair)
    return edges


def _connected(hosts: set[P], edges: Iterable[frozenset[P]]) -> Iterator[set[P]]:
    """Groups of these hosts that edges join."""
    next_to: dict[P, set[P]] = {host: set() for host in hosts}
    for edge in edges:
        if edge <= hosts:
            for host in edge:
                next_to[host] |= edge
    left = set(hosts)
    while left:
        group: set[P] = set()
        todo = {left.pop()}
        while todo:
            host = todo.pop()
            group.add(host)
            todo |= next_to[host] - group
        left -= group
        yield group
