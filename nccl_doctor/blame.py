"""Who is to blame, from comparisons: the odd ones out, and the host or link behind failed pairs.

Pure functions on made-up data as much as on real: property-tested on random clusters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)
V = TypeVar("V", bound=Hashable)


@dataclass(frozen=True)
class Odd(Generic[P, V]):
    """Result of a comparison over places.

    `places` are the odd ones out; on a tie every place is named and `usual` is None.
    """

    places: tuple[P, ...]
    usual: V | None
    tie: bool


def odd_ones_out(values: Mapping[P, V]) -> Odd[P, V] | None:
    """Find the places whose value differs from the majority's.

    Args:
        values: place → observed value.

    Returns: None where all agree. A tie for the most common value is said to be a tie: then nobody
    is the odd one out and all places are returned.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    (usual, most), (_, second) = counts.most_common(2)
    if most == second:
        return Odd(tuple(values), None, True)
    return Odd(tuple(place for place, value in values.items() if value != usual), usual, False)


@dataclass(frozen=True)
class LinkBlame(Generic[P]):
    """What explains a set of failed ordered pairs.

    `hosts` explain every failed pair that touches them; `links` are the pairs left over.
    `certain` is False where the pairs alone cannot tell a host from a link (two hosts).
    """

    hosts: tuple[P, ...]
    links: tuple[tuple[P, P], ...]
    certain: bool


def blame_links(tested: Iterable[tuple[P, P]], failed: Iterable[tuple[P, P]]) -> LinkBlame[P]:
    """Tell a bad host from a bad link.

    A host is to blame when every pair tested with it, in both directions or in one and the same
    direction, failed, with at least two partners of which one is good elsewhere. What remains are
    links.

    Args:
        tested: ordered pairs (from, to) that were tried, failed ones included.
        failed: those that failed.
    """
    tried = set(tested)
    left = set(failed)
    partners = {host: _partners(host, tried) for pair in tried for host in pair}
    hosts: list[P] = []
    suspects = sorted(partners, key=lambda host: (-sum(host in pair for pair in left), str(host)))
    for host in suspects:
        outgoing = {pair for pair in tried if pair[0] == host}
        incoming = {pair for pair in tried if pair[1] == host}
        bad = {
            direction
            for direction in (frozenset(outgoing), frozenset(incoming))
            if direction and direction <= left
        }
        if bad and len(partners[host]) >= 2:
            hosts.append(host)
            left -= outgoing | incoming
    certain = not failed_on_two_hosts_only(partners, left)
    return LinkBlame(tuple(sorted(hosts, key=str)), tuple(sorted(left, key=str)), certain)


def _partners(host: P, pairs: Iterable[tuple[P, P]]) -> set[P]:
    return {b if a == host else a for a, b in pairs if host in (a, b)}


def failed_on_two_hosts_only(partners: Mapping[P, set[P]], left: Iterable[tuple[P, P]]) -> bool:
    """Whether some failed pair has ends that were tried with nobody else."""
    return any(len(partners[a]) < 2 and len(partners[b]) < 2 for a, b in left)
