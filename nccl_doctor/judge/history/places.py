"""Places that have become slower: many figures, few places. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from nccl_doctor.judge.history.sheet import hosts_of
from nccl_doctor.judge.history.usual import Change
from nccl_doctor.model.findings import Confidence, Where
from nccl_doctor.toolkit.blame import blame_links

Link = tuple[str, str]

_APART = 3
"""Most slower links without a host to blame that get a finding each; more share one finding."""


@dataclass(frozen=True)
class Slower:
    """One place, and what is slower there, the worst first.

    An `echo` is a group of which a part is slower too: that is the same fault once more.
    """

    where: Where
    changes: tuple[Change, ...]
    echo: bool = False

    @property
    def confidence(self) -> Confidence:
        """Confidence of the surest figure."""
        return min(
            (each.confidence for each in self.changes if each.confidence),
            key=list(Confidence).index,
            default=Confidence.POSSIBLE,
        )


def slower_places(judged: Sequence[Change]) -> list[Slower]:
    """Places of figures that are worse; if all links at one end are slow, they become a host,
    provided that enough others show it (see `blame_links`).

    Args:
        judged: every figure that earlier runs let one judge, good ones too.
    """
    found: dict[Hashable, list[tuple[Where, Change]]] = defaultdict(list)
    by_name: dict[tuple[str, str], list[Change]] = defaultdict(list)
    for change in judged:
        if change.now.where.links:
            by_name[change.check, change.now.name].append(change)
        elif change.is_worse:
            found[_same(change.now.where)].append((change.now.where, change))
    slow_links = [item for group in by_name.values() for item in _of_links(group)]
    blamed = {where.hosts[0] for where, _ in slow_links if where.hosts}
    for where, change in slow_links:
        host = next((h for h in sorted(blamed) if all(h in link for link in where.links)), None)
        if host is not None and where.links:
            where = Where(hosts=(host,))
        found[_same(where)].append((where, change))
    places = [_united(each) for each in found.values()]
    echoes = [replace(place, echo=_is_echo(place, places)) for place in places]
    return sorted(echoes, key=lambda place: (place.echo, -place.changes[0].loss))


def _united(found: Sequence[tuple[Where, Change]]) -> Slower:
    """Changes for the worse at one place; of several links the narrowest names the place."""
    where = min((where for where, _ in found), key=lambda where: len(where.links))
    if not where.links:
        for other, _ in found:
            where = where | other
    return Slower(where, tuple(sorted((change for _, change in found), key=lambda c: -c.loss)))


def _is_echo(place: Slower, places: Sequence[Slower]) -> bool:
    others = [other for other in places if other is not place and other.where]
    if not place.where:
        return bool(others)
    here = hosts_of(place.where)
    many = len(place.where.hosts) > 1
    return many and any(hosts_of(other.where) <= here for other in others)


def _of_links(group: Sequence[Change]) -> Iterator[tuple[Where, Change]]:
    """Figures of links that are worse, each under the host or the links to blame for it."""
    worse: dict[Link, Change] = {}
    tested: set[Link] = set()
    for change in group:
        tested |= set(change.now.where.links)
        if change.is_worse:
            worse |= dict.fromkeys(change.now.where.links, change)
    causes = blame_links(tested, worse).causes
    links = [cause for cause in causes if not cause.is_host]
    rest = frozenset(pair for cause in links for pair in cause.pairs)
    seen: set[tuple[Where, Link]] = set()
    for cause in causes:
        pairs = rest if len(links) > _APART and not cause.is_host else cause.pairs
        where = Where(hosts=cause.ends) if cause.is_host else Where(links=tuple(sorted(pairs)))
        for pair in sorted(cause.pairs):
            first = worse[pair].now.where.links[0]
            if (where, first) not in seen:
                seen.add((where, first))
                yield where, worse[pair]


def _same(where: Where) -> Hashable:
    """Two places are one if they name the same hosts, or join the same hosts."""
    edges = frozenset(frozenset(link) for link in where.links)
    return edges or (where.hosts, where.devices) if where else ""
