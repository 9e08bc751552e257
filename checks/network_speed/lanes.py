"""Lanes between hosts: which ranks are timed together, and how fast they were. Pure.

A lane joins ranks of equal number on two hosts, so there is nothing but the network between them.
All lanes of two hosts are timed at once, and so use all their NICs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from nccl_doctor.api import Cluster, Confidence, Finding, Severity, Where
from nccl_doctor.toolkit.groups.attempts import Attempt, attempts_of
from nccl_doctor.toolkit.groups.timed import largest, seconds_of, was_busy
from nccl_doctor.toolkit.hosts import between
from nccl_doctor.toolkit.outliers import Edge, bus_bandwidth, ring

K = TypeVar("K")
V = TypeVar("V")
_ENDS = 2


class Lane(NamedTuple):
    """The largest all-reduce between two ranks: bytes, and bytes per second of bus bandwidth."""

    bytes: int
    busbw: float
    was_busy: bool


class Lanes:
    """The lanes between the hosts of a cluster, and what was measured on them."""

    def __init__(self, cluster: Cluster, check: str) -> None:
        """`check` is the name of the check that held the rounds."""
        self.labels = {host.id: host.label for host in cluster.present_hosts}
        self.seats: dict[int, dict[int, int]] = {}
        """Host → local rank → seat. Hosts are left out where local ranks are not known."""
        for host in cluster.present_hosts:
            ranks = cluster.ranks_on(host)
            here = {rank.local_rank: rank.seat for rank in ranks if rank.local_rank is not None}
            if ranks and len(here) == len(ranks):
                self.seats[host.id] = here
        self._place = {rank.seat: at for at, rank in enumerate(cluster.present)}
        self._at = {
            seat: (host, local) for host, here in self.seats.items() for local, seat in here.items()
        }
        self._attempts = attempts_of(cluster, check)

    def schedule(self, hosts: Collection[int] | None = None) -> list[list[Edge]]:
        """Rounds of pairs of neighbouring hosts: every host with both of its neighbours."""
        members = [host for host in self.seats if hosts is None or host in hosts]
        return [[(members[0], members[1])]] if len(members) == 2 else ring(members)

    def groups(
        self, edges: Iterable[Edge], locals_: Collection[int] | None = None
    ) -> list[tuple[int, ...]]:
        """The lanes of these pairs of hosts, each as its two seats in order of rank."""
        return [
            tuple(sorted((self.seats[a][local], self.seats[b][local]), key=self._place.__getitem__))
            for a, b in edges
            for local in sorted(self.seats[a].keys() & self.seats[b].keys())
            if locals_ is None or local in locals_
        ]

    def were_held(self, names: Iterable[str]) -> bool:
        """True if all these rounds are over."""
        return all(name in self._attempts for name in names)

    def attempts(self, begin: str) -> Iterator[tuple[Edge, int, Attempt]]:
        """Pair of hosts, local rank and attempt of each lane that both ends finished, of rounds
        whose name begins so.
        """
        known = {frozenset(edge): edge for edges in self.schedule() for edge in edges}
        for name, attempts in self._attempts.items():
            for attempt in attempts if name.startswith(f"{begin}-") else ():
                ends = [self._at[seat] for seat in attempt.seats if seat in self._at]
                if attempt.is_good and len(ends) == len(attempt.seats) == _ENDS:
                    (a, local), (b, _) = ends
                    yield known.get(frozenset((a, b)), (a, b)), local, attempt

    def measured(self, begin: str) -> dict[Edge, dict[int, Lane]]:
        """Pair of hosts → local rank → its lane: the faster of several tries.

        Pairs are left out if a lane of theirs was not finished.
        """
        found: dict[Edge, dict[int, Lane]] = {}
        for edge, local, attempt in self.attempts(begin):
            lane, here = lane_of(attempt), found.setdefault(edge, {})
            here[local] = max(lane, here.get(local, lane), key=lambda each: each.busbw)
        return {
            (a, b): lanes
            for (a, b), lanes in found.items()
            if len(lanes) == len(self.seats[a].keys() & self.seats[b].keys())
        }

    def hosts_in(self, where: Where) -> list[int]:
        """The hosts that a place names, itself or as ends of a path."""
        names = {*where.hosts, *(end for link in where.links for end in link)}
        return [host for host, name in self.labels.items() if name in names]

    def where(self, hosts: Iterable[int]) -> Where:
        """The place of one host, or of the path between two."""
        return between([self.labels[host] for host in hosts])


def lane_of(attempt: Attempt) -> Lane:
    """The measurement of an attempt that both ranks finished."""
    size = largest(attempt)
    return Lane(size, bus_bandwidth(size, seconds_of(attempt, size), 2), was_busy(attempt))


def together(lanes: Mapping[Edge, Mapping[int, Lane]]) -> dict[Edge, float]:
    """Pair of hosts → seconds in which all its lanes together move one byte each way."""
    rates = {edge: sum(lane.busbw for lane in here.values()) for edge, here in lanes.items()}
    return {edge: 1 / rate for edge, rate in rates.items() if rate}


def of_usual_kind(found: Mapping[K, V], kind: Callable[[K, V], Any]) -> dict[K, V]:
    """The part of what was measured that is of the most frequent kind: only equals are compared."""
    kinds = {key: repr(kind(key, value)) for key, value in found.items()}
    usual = Counter(kinds.values()).most_common(1)
    return {key: value for key, value in found.items() if kinds[key] == usual[0][0]}


def rates_of(edges: Iterable[Edge], *tries: Mapping[Edge, float]) -> Iterator[list[float | None]]:
    """Bytes per second of each pair in each try, from seconds per byte."""
    for edge in edges:
        yield [1 / each[edge] if edge in each else None for each in tries]


def quiet(found: Finding, lanes: Sequence[Lane]) -> Finding:
    """The finding; only information where the CPU was busy with other work in the second try."""
    if not any(lane.was_busy for lane in lanes):
        return found
    return found.replaced(
        message=found.message + "; measured while the CPU was busy with other work",
        severity=Severity.INFO,
        confidence=Confidence.POSSIBLE,
    )
