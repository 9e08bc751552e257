"""Each NIC by itself: which rank sends through which one, and which are slow. Pure.

NCCL joins the NIC of a number, in its order, to the one of the same number on the other host; so
are they tried here.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Where,
    look,
    shell,
)
from nccl_doctor.toolkit.groups.timed import slow_pairs
from nccl_doctor.toolkit.outliers import Edge, in_rounds, second_try, slow_ones
from nccl_doctor.toolkit.units import rate_text

from .lanes import Lane, Lanes, lane_of, of_usual_kind, quiet

RAIL_SLOW = Kind(
    "rail-slow",
    Layer.SPEED,
    "A NIC is much slower than the others of its kind",
    "NCCL spreads every collective over all NICs of a host, and waits for the slowest.",
    Fix(
        look(shell("ibstat"), "error counters, cable and switch port of the NIC that is named"),
        look(shell("lspci -vv | grep -e LnkCap: -e LnkSta:"), "its slot"),
        alternatives=["until it is repaired: NCCL_IB_HCA without it on every host"],
    ),
    Severity.WARN,
    effects=(Effect.TIMED_OUT,),  # a port that is slow or loses packets explains it
)
RAILS, AGAIN = "rails", "again-rails"
"""How the names of rounds begin; a number of the pass follows, and one of the round."""
_MOST_PASSES = 4
"""Passes at most; the rest of the NICs of a host is left out: each pass takes two or three
rounds.
"""
_LEAST_HOSTS = 3
"""With fewer, it is not known which end is slow."""


class RailLane(NamedTuple):
    """A lane through one NIC of each end: what was measured, host → NIC, local rank.

    `by`: what wrote without NCCL (`ib_write_bw`, `pyverbs`); empty where NCCL was timed.
    """

    lane: Lane
    nics: Mapping[int, str]
    local: int
    by: str = ""


Measured = dict[int, dict[Edge, RailLane]]
"""Number of a rail → pair of hosts → its lane."""


class Rails:
    """The NICs that can be tried one by one, and the ranks that do it."""

    def __init__(self, cluster: Cluster, lanes: Lanes) -> None:
        """Hosts take part that use verbs, and have as many NICs as most of them."""
        self.lanes = lanes
        roads = {rank.host.id: facts["road"] for rank, facts in cluster.facts("rdma")}
        known = {
            rank.host.id: facts["rails"]
            for rank, facts in cluster.facts("rails")
            if rank.host.id in lanes.seats and roads.get(rank.host.id) == "infiniband"
        }
        usual = Counter(map(len, known.values())).most_common(1)
        self.of: dict[int, Sequence[Mapping[str, Any]]] = {
            host: rails for host, rails in known.items() if len(rails) == usual[0][0]
        }
        self.ports: dict[tuple[int, str], Mapping[str, Any]] = {
            (rank.host.id, port["name"]): {**port, "device": device}
            for rank, facts in cluster.facts("fabric_ports")
            for device in facts["devices"]
            for port in device["ports"]
        }
        """Host and NIC → what check `fabric_ports` knows of the port, and its `device`."""
        self.near = {
            (rank.host.id, rank.local_rank): facts["rdma"]
            for rank, facts in cluster.facts("gpu_affinity")
            if facts.get("rdma")
        }
        self._models = {
            rank.seat: facts["devices"][facts["device"]]["name"]
            for rank, facts in cluster.facts("backend_device")
            if facts["device"] is not None
        }
        self.passes = self._passes()
        self.schedule = lanes.schedule(self.of)

    def _passes(self) -> list[dict[int, int]]:
        """Local rank → the rail that it tries, in one pass after the other.

        Each rail is tried by a rank whose GPU is beside it, as far as that is known of the first
        host; hosts are of one kind, and check `gpu_affinity` names those that are not.
        """
        hosts = list(self.of)
        if not hosts:
            return []
        locals_ = sorted(set.intersection(*(set(self.lanes.seats[host]) for host in hosts)))
        beside = {
            local: list((self.near.get((hosts[0], local)) or {}).get("at") or ())
            for local in locals_
        }
        left = list(range(len(self.of[hosts[0]])))
        passes: list[dict[int, int]] = []
        while locals_ and left and len(passes) < _MOST_PASSES:
            taken: dict[int, int] = {}
            for local in locals_:
                own = next((number for number in beside[local] if number in left), None)
                if own is not None:
                    taken[local] = own
                    left.remove(own)
            if not taken:  # none of them is beside a GPU, as far as it is known
                taken = dict(zip(locals_, left, strict=False))
                left = left[len(taken) :]
            passes.append(taken)
        return passes

    # What is planned

    def first_rounds(self) -> dict[str, tuple[list[tuple[int, ...]], dict[str, int]]]:
        """Name → the groups, and local rank (as text) → its rail."""
        found = {}
        for at, taken in enumerate(self.passes):
            for number, edges in enumerate(self.schedule):
                lanes = [(edge, local) for edge in edges for local in taken]
                if groups := self._groups(lanes, taken):
                    found[f"{RAILS}-{at}-{number}"] = (groups, _as_text(taken))
        return found

    def second_rounds(
        self, low: Collection[tuple[Edge, int]]
    ) -> dict[str, tuple[list[tuple[int, ...]], dict[str, int]]]:
        """The same of the second try, with half as many pairs of hosts at once: slow lanes with
        good partners, and rails slow everywhere.

        Args:
            low: pair of hosts and rail of lanes that are below their floor, too.
        """
        first = self.alike(self.measured(RAILS))
        everywhere = self._slow_rails(first)
        half = max(1, len(self.of) // 4)
        halves = [in_rounds(edges, half) for edges in self.schedule]
        found = {}
        for at, taken in enumerate(self.passes):
            rounds: list[dict[tuple[Edge, int], None]] = []
            for local, rail in taken.items():
                for number, edges in enumerate(second_try(_seconds(first.get(rail, {})))):
                    rounds += [{} for _ in range(number + 1 - len(rounds))]
                    rounds[number] |= dict.fromkeys((edge, local) for edge in edges)
            again = not everywhere.isdisjoint(taken.values())
            repeated = halves[0] if again and halves else []
            rounds += [{(e, local): None for e in edges for local in taken} for edges in repeated]
            held = {(frozenset(e), taken[local]) for each in rounds for e, local in each}
            for edges in chain.from_iterable(halves):
                below = {
                    (edge, local): None
                    for edge in edges
                    for local, rail in taken.items()
                    if (edge, rail) in low and (frozenset(edge), rail) not in held
                }
                rounds += [below] if below else []
            for number, lanes in enumerate(rounds):
                if groups := self._groups(lanes, taken):
                    found[f"{AGAIN}-{at}-{number}"] = (groups, _as_text(taken))
        return found

    def _groups(
        self, lanes: Collection[tuple[Edge, int]], taken: Mapping[int, int]
    ) -> list[tuple[int, ...]]:
        """The groups of these lanes, without lanes with an end that is down."""
        return [
            group
            for (a, b), local in lanes
            if all(self.of[host][taken[local]]["state"] == "ACTIVE" for host in (a, b))
            for group in self.lanes.groups([(a, b)], (local,))
        ]

    # What was measured

    def measured(self, begin: str) -> Measured:
        """The lanes that both ends finished, of rounds whose name begins so: the fastest try."""
        found: Measured = defaultdict(dict)
        for edge, local, attempt in self.lanes.attempts(begin):
            facts = {m.host.id: m.outcome.facts for m in attempt.members}
            rail = int(next(iter(facts.values()))["rail"])
            nics = {host: str(each["nic"]) for host, each in facts.items()}
            by = str(next(iter(facts.values())).get("by", ""))
            new = RailLane(lane_of(attempt), nics, local, by)
            old = found[rail].get(edge, new)
            found[rail][edge] = max(old, new, key=lambda each: each.lane.busbw)
        return found

    def again(self) -> Measured:
        """The lanes of the second try that were measured in the way that was usual in the first."""
        ways = {
            rail: Counter(lane.by for lane in here.values()).most_common(1)[0][0]
            for rail, here in self.measured(RAILS).items()
        }
        return {
            rail: {edge: lane for edge, lane in here.items() if lane.by == ways.get(rail)}
            for rail, here in self.measured(AGAIN).items()
        }

    def best(self) -> Measured:
        """The better of both tries, of lanes that were tried at all."""
        best, again = self.measured(RAILS), self.again()
        for rail, here in best.items():
            for edge, lane in here.items():
                other = again.get(rail, {}).get(edge, lane)
                here[edge] = max(lane, other, key=lambda each: each.lane.busbw)
        return best

    def alike(self, seen: Measured) -> Measured:
        """The lanes of each rail that are of its most frequent kind."""
        return {
            rail: of_usual_kind(here, lambda _, lane: self._kind(lane))
            for rail, here in seen.items()
        }

    def pairs_alike(self, lanes: Mapping[Edge, Mapping[int, Lane]]) -> dict[Edge, Any]:
        """The pairs of hosts of the most frequent kind: as many ranks, equal GPUs and NICs."""
        return of_usual_kind(
            lanes, lambda edge, here: (sorted(here), sorted(repr(self._host(end)) for end in edge))
        )

    def _host(self, host: int) -> Any:
        """The GPUs and NICs of a host."""
        models = {self._models.get(seat) for seat in self.lanes.seats[host].values()}
        active = [rail for rail in self.of.get(host, ()) if rail["state"] == "ACTIVE"]
        rates = [(self.ports.get((host, rail["name"])) or {}).get("gbps") for rail in active]
        return sorted(map(str, models)), sorted(map(str, rates))

    def _slow_rails(self, seen: Measured) -> set[int]:
        """Rails that are slow between most hosts, compared with the others of their kind."""
        kinds: dict[str, dict[int, float]] = defaultdict(dict)
        for rail, here in self.alike(seen).items():
            if here:
                usual = statistics.median(_seconds(here).values())
                kinds[self._kind(next(iter(here.values())))][rail] = usual
        return {rail for alike in kinds.values() for rail in slow_ones(alike)}

    def _kind(self, lane: RailLane) -> str:
        """The way in which a lane was measured, and its limits by design, at both of its ends: rate
        and link layer of the NIC, the model of the GPU, and how near they are.
        """
        ends = []
        for host, nic in lane.nics.items():
            port = self.ports.get((host, nic)) or {}
            near = self.near.get((host, lane.local)) or {}
            beside = near.get("near") if nic in (near.get("names") or ()) else None
            model = self._models.get(self.lanes.seats[host][lane.local])
            ends.append(repr((port.get("gbps"), port.get("link"), model, beside)))
        return f"{lane.by} {sorted(ends)}"

    # Judging

    def judge(self) -> Iterator[Finding]:
        """Findings on NICs of one host, on paths between two, then on rails that are slow at all
        hosts.
        """
        first, again = self.alike(self.measured(RAILS)), self.again()
        hosts: dict[tuple[int, ...], list[tuple[str, list[str], list[Lane]]]] = defaultdict(list)
        named = set()
        for rail, here in sorted(first.items()):
            repeated = again.get(rail, {})
            slow = slow_pairs(_seconds(here), _seconds(repeated), lambda seconds: 1 / seconds)
            for each in slow:
                named.add(rail)
                nics = [
                    lane.nics[end]
                    for end in each.ends
                    for edge, lane in here.items()
                    if end in edge
                ]
                lanes = [repeated[pair].lane for pair in each.pairs if pair in repeated]
                words = f"{_alone(here.values())}: {each.words}"
                hosts[each.ends].append((words, list(dict.fromkeys(nics)), lanes))
        for ends, found in hosts.items():
            nics = [nic for _, names, _ in found for nic in names]
            yield quiet(
                Finding(
                    RAIL_SLOW,
                    f"{', '.join(dict.fromkeys(nics))} {found[0][0]}",
                    self.lanes.where(ends) | Where(interfaces=tuple(sorted(set(nics)))),
                    confidence=Confidence.LIKELY,
                ),
                [lane for _, _, lanes in found for lane in lanes],
            )
        yield from self._judge_everywhere(named)

    def _judge_everywhere(self, named: Collection[int]) -> Iterator[Finding]:
        best, again = self.alike(self.best()), self.again()
        slow = self._slow_rails(best) & self._slow_rails(self.measured(RAILS))
        for rail in sorted(slow - set(named)):
            here, repeated = best[rail], again.get(rail, {})
            if not repeated:
                continue
            alike = [
                lane.lane.busbw
                for other, lanes in best.items()
                if other not in slow
                for lane in lanes.values()
                if self._kind(lane) == self._kind(next(iter(here.values())))
            ]
            rate = max(lane.lane.busbw for lane in here.values())
            nics = {nic for lane in here.values() for nic in lane.nics.values()}
            ends = sorted({host for edge in here for host in edge})
            few = len(self.of) < _LEAST_HOSTS
            text = f"{', '.join(sorted(nics))} {_alone(here.values())}: "
            text += f"{rate_text(rate)} bus bandwidth"
            text += " between the two hosts" if few else f" between all {len(ends)} hosts"
            text += f", measured twice; other NICs: {rate_text(statistics.median(alike))}"
            where = self.lanes.where(ends) if few else Where(hosts=tuple(self._names(ends)))
            yield quiet(
                Finding(
                    RAIL_SLOW,
                    text,
                    where | Where(interfaces=tuple(sorted(nics))),
                    confidence=Confidence.LIKELY,
                ),
                [lane.lane for lane in repeated.values()],
            )

    def _names(self, hosts: Sequence[int]) -> list[str]:
        return [self.lanes.labels[host] for host in hosts]


def _seconds(lanes: Mapping[Edge, RailLane]) -> dict[Edge, float]:
    """Pair of hosts → seconds for one byte."""
    return {edge: 1 / each.lane.busbw for edge, each in lanes.items() if each.lane.busbw}


def _alone(lanes: Iterable[RailLane]) -> str:
    """Words for the way in which NICs of one kind were tried."""
    by = next(iter(lanes)).by
    return f"alone, by {by}" if by else "alone"


def _as_text(taken: Mapping[int, int]) -> dict[str, int]:
    return {str(local): rail for local, rail in taken.items()}
