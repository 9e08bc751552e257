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
    `certain` is False where some pair left over has an end that was not seen to work with anybody
    else: then the pairs alone cannot tell a host from a link (always so with two hosts).
    """

    hosts: tuple[P, ...]
    links: tuple[tuple[P, P], ...]
    certain: bool


def blame_links(tested: Iterable[tuple[P, P]], failed: Iterable[tuple[P, P]]) -> LinkBlame[P]:
    """Tell a bad host from a bad link.

    A host is to blame when every pair tested with it in one direction failed, and at least two of
    these partners work in that direction with somebody else. One such partner is not enough: a bad
    link beside a bad host would make a victim of the third. What remains are links.

    Args:
        tested: ordered pairs (from, to) that were tried; failed ones are taken as tested.
        failed: those that failed.

    Returns: a result that does not depend on the order of the pairs. Where everything failed,
    nobody is blamed.
    """
    bad = set(failed)
    outgoing: dict[P, set[P]] = {}
    incoming: dict[P, set[P]] = {}
    for source, target in {*tested, *bad}:
        outgoing.setdefault(source, set()).add(target)
        incoming.setdefault(target, set()).add(source)
    sends = {a for a, targets in outgoing.items() if any((a, b) not in bad for b in targets)}
    receives = {b for b, sources in incoming.items() if any((a, b) not in bad for a in sources)}
    hosts = {
        host
        for own, partners, good in ((sends, outgoing, receives), (receives, incoming, sends))
        for host, others in partners.items()
        if host not in own and len(others & good) >= 2
    }
    left = {pair for pair in bad if hosts.isdisjoint(pair)}
    certain = all(a in sends and b in receives for a, b in left)
    return LinkBlame(tuple(sorted(hosts, key=str)), tuple(sorted(left, key=str)), certain)
