"""All problems of the variables of a cluster, each once, with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nccl_doctor.api import Cluster, Where, place_of

from .alike import as_the_others
from .differing import differing
from .files import differing_files
from .proxies import differing_proxies
from .rules import problems
from .view import Placed, Problem, Seen, View, look


def judge_variables(cluster: Cluster, check: str) -> Iterator[Placed]:
    """All problems in the facts of `check`, from `gather_variables`, with their places.

    A problem that all ranks of a host share belongs to the host.
    """
    seen = look(cluster, check)
    alike: dict[int, tuple[View, set[int]]] = {}
    for seat, (_, view) in seen.items():
        alike.setdefault(id(view), (view, set()))[1].add(seat)
    found: dict[Problem, set[int]] = {}
    for view, seats in alike.values():
        for problem in problems(view):
            found.setdefault(problem, set()).update(seats)
    hosts: dict[int, set[int]] = {}
    for seat, (rank, _) in seen.items() if found else ():
        hosts.setdefault(rank.host.id, set()).add(seat)
    for problem, seats in found.items():
        yield Placed(as_the_others(seen, problem, seats), _place(seen, hosts, seats))
    yield from differing(seen)
    yield from differing_files(seen)
    yield from differing_proxies(seen)


def _place(seen: Seen, hosts: Mapping[int, set[int]], seats: set[int]) -> Where:
    places = []
    for here in hosts.values():
        mine = place_of(seen[seat][0] for seat in here & seats)
        places.append(Where(hosts=mine.hosts) if here <= seats else mine)
    return Where.union(places)
