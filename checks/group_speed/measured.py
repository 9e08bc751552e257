"""Times of groups in several rounds: what is compared, and what is measured again. Pure."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from nccl_doctor.api import Cluster, Level
from nccl_doctor.toolkit.cpu_wait import ran_share, was_starved
from nccl_doctor.toolkit.groups.attempts import Attempt, attempts_of
from nccl_doctor.toolkit.groups.timed import largest, seconds_of, was_busy
from nccl_doctor.toolkit.mesh import mesh_groups
from nccl_doctor.toolkit.outliers import TIMES, bus_bandwidth, ring, second_try, slow_ones
from nccl_doctor.toolkit.peers.loss import lossy_data_roads
from nccl_doctor.toolkit.peers.matrix import first_calls
from nccl_doctor.toolkit.peers.pairs import by_partner, mapping, number

WORLD, HOSTS, PAIRS, MESH, AGAIN = "world", "each-host", "pairs", "mesh", "again"
"""Rounds, or how their names begin: all ranks, the ranks of each host, first ranks of neighbouring
hosts, the groups of each dimension of the mesh; and the second try of the outliers.
"""
AGAIN_PAIRS = f"{AGAIN}-{PAIRS}"
"""How the names of the second try of the pairs begin."""
AGAIN_LOW = f"{AGAIN}-low"
"""The second try of hosts that are below their floor, and no outliers."""
NVLS, AGAIN_NVLS = "nvls", f"{AGAIN}-nvls"
"""The ranks of each host, by NVLink SHARP alone; and the second try."""
CONTROLS = 3
"""Number of good ones that are measured again together with the outliers."""


class Try(NamedTuple):
    """The largest all-reduce among the ranks of one host: bytes, and bytes per second."""

    bytes: int
    busbw: float
    was_busy: bool


class Measured:
    """The measurements of a check that times groups, and the outliers among them."""

    def __init__(self, cluster: Cluster, check: str) -> None:
        """`check` is the name of the check that held the rounds."""
        self.cluster = cluster
        self.ranks = {rank.seat: rank for rank in cluster.present}
        self.hosts = {
            host.id: tuple(rank.seat for rank in cluster.ranks_on(host))
            for host in cluster.present_hosts
        }
        self.lead_of = {seats[0]: host for host, seats in self.hosts.items()}
        self.labels = {host.id: host.label for host in cluster.present_hosts}
        self._place = {rank.seat: at for at, rank in enumerate(cluster.present)}
        self._attempts = attempts_of(cluster, check)
        # Asked for again and again, and each time all ranks would be looked through.
        self.good, self.size = functools.cache(self._good), functools.cache(self._size)

    def order(self, seat: int) -> int:
        """Position in the order of ranks."""
        return self._place[seat]

    def _good(self, begin: str) -> list[Attempt]:
        """Attempts that every member finished, of rounds whose name begins with `begin`."""
        return [
            each
            for name, found in self._attempts.items()
            if name.startswith(begin)
            for each in found
            if each.is_good and not refusal(each)
        ]

    def attempts(self, name: str) -> list[Attempt]:
        """All attempts of a round."""
        return self._attempts.get(name, [])

    # What is compared

    def computing(self, begin: str) -> dict[int, float]:
        """Seat → seconds of computing."""
        return {
            member.rank.seat: member.outcome.facts["compute"]["seconds"]
            for attempt in self.good(begin)
            for member in attempt.members
            if "compute" in member.outcome.facts
        }

    def inside(self, begin: str, first: str = HOSTS) -> dict[int, float]:
        """Host → seconds of an all-reduce among its ranks, of `size` of the `first` such round."""
        size = self.size(first)
        return {a.members[0].host.id: seconds_of(a, size) for a in self.good(begin)}

    def tries_inside(self, least_bytes: int = 0) -> dict[int, list[Try]]:
        """Host → every try among its ranks with so many bytes at least; of a job of one host, all
        ranks are those.
        """
        found: dict[int, list[Try]] = defaultdict(list)
        alone = (WORLD,) if len(self.hosts) == 1 else (HOSTS,)
        for begin in (*alone, f"{AGAIN}-hosts", AGAIN_LOW):
            for attempt in self.good(begin):
                if len(attempt.members) > 1 and (size := largest(attempt)) >= least_bytes:
                    rate = bus_bandwidth(size, seconds_of(attempt, size), len(attempt.members))
                    host = attempt.members[0].host.id
                    found[host].append(Try(size, rate, was_busy(attempt)))
        return found

    def slowing(self, hosts: Iterable[int]) -> dict[str, str]:
        """Settings on these hosts that make collectives slower: variable → value."""
        wanted, found = set(hosts), dict[str, str]()
        for begin in (WORLD, HOSTS):
            for attempt in self.good(begin):
                for member in attempt.members:
                    if member.host.id in wanted:
                        found |= member.outcome.facts.get("slowing") or {}
        return dict(sorted(found.items()))

    def pairs(self, begin: str) -> dict[tuple[int, int], float]:
        """First ranks of two hosts → seconds of an all-reduce of `size` between them."""
        leads, size = self.leads(), self.size(PAIRS)
        known = {frozenset(pair): pair for pairs in ring(leads) for pair in pairs}
        found: dict[tuple[int, int], float] = {}
        for attempt in self.good(begin):
            a, b = attempt.seats
            pair = known.get(frozenset((a, b)), (a, b))
            seconds = seconds_of(attempt, size)
            found[pair] = min(found.get(pair, seconds), seconds)
        return found

    def _size(self, begin: str) -> int:
        """Bytes of the largest all-reduce that every group of these rounds had time for."""
        return min((largest(attempt) for attempt in self.good(begin)), default=0)

    def leads(self) -> list[int]:
        """The first rank of each host."""
        return [seats[0] for seats in self.hosts.values()]

    def equals(self, times: Mapping[int, float]) -> list[dict[int, float]]:
        """Times of hosts with the same number of ranks: only these can be compared."""
        kinds: dict[int, dict[int, float]] = {}
        for host, seconds in times.items():
            kinds.setdefault(len(self.hosts[host]), {})[host] = seconds
        return list(kinds.values())

    # What is planned

    def ring_of_hosts(self) -> dict[str, list[tuple[int, ...]]]:
        """Rounds in which the first ranks of neighbouring hosts meet; none where check `links` has
        timed what gloo would do there: bytes over the same sockets. NCCL may take another way.
        """
        if self.cluster.backend == "gloo" and self.cluster.level is not Level.FULL:
            timed = Counter(
                host.id
                for host, _, sent in by_partner(self.cluster, "links", "exchange", "sent")
                if number(mapping(sent).get("rate"))
            )
            open_to = Counter(dict.fromkeys(self.hosts, len(self.hosts) - 1)) - self._shut()
            if all(timed[host] >= min(2, open_to[host]) for host in self.hosts):
                return {}
        rounds = enumerate(ring(self.leads()))
        return {f"{PAIRS}-{at}": list(pairs) for at, pairs in rounds}

    def _shut(self) -> Counter[int]:
        """Host → number of hosts that it cannot call, or be called by: no group can form there."""
        _, calls = first_calls(self.cluster)
        links = {
            frozenset(self.ranks[seat].host.id for seat in pair if seat in self.ranks)
            for pair in calls.bad
        }
        return Counter(host for link in links for host in link)

    def mesh_groups(self) -> dict[str, list[tuple[int, ...]]]:
        """`mesh-NAME` → the groups of that dimension, if the mesh fits these ranks."""
        world = [rank.seat for rank in self.cluster.present]
        mesh = self.cluster.job.mesh
        if math.prod(size for _, size in mesh) != len(world):
            return {}
        return {
            f"{MESH}-{name}": [tuple(world[at] for at in group.ranks) for group in groups]
            for name, groups in mesh_groups(mesh).items()
            if len(groups[0].ranks) > 1
        }

    def doubtful(self) -> dict[str, list[tuple[int, ...]]]:
        """Rounds of the second try."""
        again: dict[str, list[tuple[int, ...]]] = {}
        times = self.computing(WORLD)
        if slow := slow_ones(times):
            again[f"{AGAIN}-ranks"] = [(seat,) for seat in with_controls(slow, times)]
        hosts = []
        for equal in self.equals(self.inside(HOSTS)):
            if slow := slow_ones(equal):
                hosts += [self.hosts[host] for host in with_controls(slow, equal)]
        if hosts:
            again[f"{AGAIN}-hosts"] = hosts
        first = self.pairs(PAIRS)
        if len(first) == sum(map(len, ring(self.leads()))):  # once all of them are known
            for number, pairs in enumerate(second_try(first)):
                again[f"{AGAIN_PAIRS}-{number}"] = list(pairs)
        return again

    def without_losses(
        self, planned: Mapping[str, list[tuple[int, ...]]]
    ) -> dict[str, list[tuple[int, ...]]]:
        """The rounds without the groups whose data takes a road that loses packets: their speed
        would be that of the losses. Of all ranks together, each one still computes.
        """
        roads = lossy_data_roads(self.cluster)

        def is_clean(group: tuple[int, ...]) -> bool:
            return not any(road <= {self.ranks[s].host.id for s in group} for road in roads)

        kept = {
            name: [group for group in groups if is_clean(group)] for name, groups in planned.items()
        }
        if not kept.get(WORLD):
            kept[WORLD] = [(seat,) for group in planned[WORLD] for seat in group]
        return {name: groups for name, groups in kept.items() if groups}

    # What is known of a second try

    def is_for_lack_of_cpu(self, seats: Iterable[int], times: float) -> bool:
        """True if ranks that took so many times as long as usual may have lacked only CPU time.

        The share of the second try in which they ran counts twice, as each pause costs more than
        itself.
        """
        wanted, ran = set(seats), 1.0
        for attempt in self.good(AGAIN):
            for member in attempt.members:
                facts = member.outcome.facts
                parts = [*facts.get("all_reduce", ())[-1:], *filter(None, [facts.get("compute")])]
                cpu = [part["cpu"] for part in parts if was_starved(part["cpu"])]
                if member.rank.seat in wanted and cpu:
                    ran = min(ran, *map(ran_share, cpu))
        return ran < 1.0 and times * ran**2 < TIMES


def measured(cluster: Cluster, check: str) -> Measured:
    """The measurements of a check, the same for `plan` and for `judge`."""
    read = (
        *(check, "backend_device", "clock", "collectives", "firewall"),
        *("gpu_state", "gpu_work", "links", "loss", "uplink"),
    )
    return cluster.once((measured, check), read, lambda: Measured(cluster, check))


def refusal(attempt: Attempt) -> str:
    """The error of NCCL that a member got and survived; empty if there is none."""
    said = (member.outcome.facts.get("failed") for member in attempt.members)
    return next((str(each) for each in said if each), "")


def stand_out_again(
    slow: Mapping[int, float], first: Mapping[int, float], again: Mapping[int, float]
) -> list[int]:
    """The outliers that are outliers again, comparing the better of two tries with all others."""
    best = {key: min(value, again.get(key, value)) for key, value in first.items()}
    return [key for key in slow_ones(best) if key in slow and key in again]


def with_controls(slow: Collection[int], all_: Mapping[int, float]) -> list[int]:
    """The outliers, and a few others near the median."""
    good = sorted((each for each in all_ if each not in slow), key=lambda each: all_[each])
    middle = len(good) // 2
    return [*slow, *good[middle:][:CONTROLS]]
