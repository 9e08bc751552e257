"""All problems of the variables of a cluster, each once, with its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from nccl_doctor.api import Cluster, Where, place_of
from nccl_doctor.toolkit.variables.table import table

from .differing import as_elsewhere, differing
from .proxies import differing_proxies
from .rules import BAD_VALUE, problems
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
        yield Placed(_as_most(seen, problem, seats), _place(seen, hosts, seats))
    yield from differing(seen)
    yield from differing_proxies(seen)


def _as_most(seen: Seen, problem: Problem, seats: set[int]) -> Problem:
    """The problem; that of a bad value with a fix by which these ranks get what most ranks have, as
    the value that was meant would make them differ.
    """
    name = problem.variable
    if problem.code != BAD_VALUE or not name or table().variables[name].differs == "free":
        return problem
    texts = {seat: (view.is_set(name), view.text(name)) for seat, (_, view) in seen.items()}
    usual, count = Counter(texts.values()).most_common(1)[0]
    is_masked = usual == (True, None)
    if count * 2 <= len(texts) or is_masked or usual in {texts[seat] for seat in seats}:
        return problem
    odd = seen[next(iter(seats))][1]
    good = next(view for seat, (_, view) in seen.items() if texts[seat] == usual)
    return replace(problem, fix=as_elsewhere(odd, good, name))


def _place(seen: Seen, hosts: Mapping[int, set[int]], seats: set[int]) -> Where:
    places = []
    for here in hosts.values():
        mine = place_of(seen[seat][0] for seat in here & seats)
        places.append(Where(hosts=mine.hosts) if here <= seats else mine)
    return Where.union(places)
