"""Speeds of groups as figures, to be compared with other runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import Cluster, Figure, Setup, Where, place_of
from nccl_doctor.toolkit.cpu_wait import was_starved
from nccl_doctor.toolkit.groups.attempts import Attempt, attempts_of
from nccl_doctor.toolkit.outliers import bus_bandwidth
from nccl_doctor.toolkit.units import amount_text, size_text

from .measured import HOSTS, MESH, NVLS, PAIRS, WORLD

_BULK = 4096
"""Bytes; below, the time of an all-reduce is that of its round trips, not a bandwidth."""
_LEAST_US = 50.0
_OF_ALL = "all-reduce of all "
"""Beginning of the names of the figures of the group of all ranks."""


def speed_figures(cluster: Cluster, check: str) -> Iterator[Figure]:
    """Latency or bus bandwidth of each size, for every group that finished its first try; and the
    computing time of each rank.

    Args:
        cluster: what was gathered.
        check: name of the check that held the rounds, with facts as `Stopwatch` returns them.
    """
    for name, attempts in attempts_of(cluster, check).items():
        for attempt in attempts:
            if attempt.is_good:
                if name == WORLD:
                    yield from _computing(attempt)
                yield from _all_reduce(name, attempt)


def world_speed(cluster: Cluster, check: str) -> Iterator[Setup]:
    """The same of the group of all ranks, in words: its latency, and its largest size."""
    found = [each for each in speed_figures(cluster, check) if each.name.startswith(_OF_ALL)]
    numbers = [(each, each.value) for each in found if isinstance(each.value, float)]
    measured = [(each, amount_text(value, each.unit)) for each, value in numbers]
    times = [f"latency {text}" for each, text in measured if each.unit == "µs"]
    rates = [
        f"{text} of bus bandwidth ({each.name.rpartition(', ')[2]})"
        for each, text in measured
        if each.unit == "GB/s"
    ]
    words = [*rates[-1:], *times[:1]]
    if words:
        ranks = found[0].name.removeprefix(_OF_ALL).partition(",")[0]
        yield Setup("speed", f"all-reduce of {ranks}: {', '.join(words)}", cluster.hosts[0].id)


def _computing(attempt: Attempt) -> Iterator[Figure]:
    for member in attempt.members:
        found = member.outcome.facts.get("compute")
        if found:
            yield Figure(
                f"time to compute, local rank {member.rank.local_rank}",
                round(found["seconds"] * 1e3, 4),
                place_of([member.rank]),
                "ms",
                better="lower",
                counts=not was_starved(found["cpu"]),
            )


def _all_reduce(name: str, attempt: Attempt) -> Iterator[Figure]:
    """Figures of the sizes that every member had time for, by the slowest member."""
    kind, where = _group(name, attempt)
    tries: dict[int, list[Mapping[str, Any]]] = {}
    for member in attempt.members:
        for each in member.outcome.facts.get("all_reduce", ()):
            tries.setdefault(each["bytes"], []).append(each)
    for size, found in sorted(tries.items()):
        if not kind or len(found) < len(attempt.members):
            continue
        seconds = max(float(each["seconds"]) for each in found)
        counts = not any(was_starved(each["cpu"]) for each in found)
        what = f"all-reduce {kind}, {size_text(size)}"
        if size < _BULK:
            micro = round(seconds * 1e6, 1)
            yield Figure(what, micro, where, "µs", "lower", _LEAST_US, counts)
        else:
            rate = round(bus_bandwidth(size, seconds, len(found)) / 1e9, 5)
            yield Figure(what, rate, where, "GB/s", "higher", 0.0, counts)


def _group(name: str, attempt: Attempt) -> tuple[str, Where]:
    """The kind of a group as text, and its place; an empty text if it is not compared."""
    ranks = f"{len(attempt.members)} ranks"
    hosts = list(dict.fromkeys(member.host.label for member in attempt.members))
    if name == WORLD:
        return f"of all {ranks}", Where()
    if name == HOSTS:
        return f"inside a host, {ranks}", Where(hosts=(hosts[0],))
    if name == NVLS:
        return f"inside a host by NVLink SHARP alone, {ranks}", Where(hosts=(hosts[0],))
    if name.startswith(f"{PAIRS}-") and len(hosts) == 2:
        a, b = sorted(hosts)
        return "between two hosts", Where(links=((a, b), (b, a)))
    if name.startswith(f"{MESH}-"):
        of = name.removeprefix(f"{MESH}-")
        return f"of {of} groups, {ranks}", place_of(m.rank for m in attempt.members)
    return "", Where()
