"""Made-up hosts whose roads lose segments: facts of check `firewall`, and of what `loss` tries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from nccl_doctor.api import Cluster, Finding, Skip
from nccl_doctor.checks.loss import Loss
from nccl_doctor.toolkit.peers.loss import AGAIN, FIRST
from tests.support import peers
from tests.support.clusters import make_cluster, outcome, reread
from tests.support.findings import judge
from tests.support.peers import OK, Link

CHECK = Loss()
ONE, TWO = "one", "two"
BOTH = (ONE, TWO)


def both(a: str, b: str) -> list[Link]:
    return [(a, b), (b, a)]


class LossyWorld:
    """Hosts that call each other, and once more where check `loss` wants it.

    Where `alone`, check `firewall` did not run, and the check made the first calls itself.
    """

    def __init__(self, count: int, backend: str = "gloo", *, alone: bool = False) -> None:
        self.alone = alone
        self.tries = {number: peers.World(count, backend) for number in BOTH}
        self.names = self.tries[ONE].names
        self.drops: dict[str, dict[str, dict[str, int]]] = {}
        self.pairs: list[Link] = list(permutations(self.names, 2))

    def of(self, name: str, way: str = "both") -> list[Link]:
        """Roads of one host, by direction."""
        ends = {"out": (0,), "in": (1,), "both": (0, 1)}[way]
        return [pair for pair in self.pairs if name in {pair[end] for end in ends}]

    def lose(
        self,
        links: Iterable[Link],
        lost: int = 20,
        segments: int = 400,
        tries: Sequence[str] = BOTH,
    ) -> LossyWorld:
        return self.answer(links, {**OK, "segments": segments, "lost": lost}, tries)

    def answer(
        self, links: Iterable[Link], attempt: dict[str, Any], tries: Sequence[str] = BOTH
    ) -> LossyWorld:
        """Let calls on these roads end so, in both attempts."""
        for number in tries:
            self.tries[number].fail(links, attempt)
        return self

    def rounds(self, **fields: Any) -> list[str]:
        """Names of the rounds that are held after the first calls."""
        try:
            return [each.name for each in CHECK.plan(self._first(**fields))]
        except Skip:
            return []

    def cluster(self, **fields: Any) -> Cluster:
        """After all rounds, as re-read from a saved report."""
        first = self._first(**fields)
        try:
            plan = {each.name: each for each in CHECK.plan(first)}
        except Skip:
            return first
        if AGAIN not in plan:
            return first
        (seats,) = plan[AGAIN].groups
        world = self.tries[TWO]
        hosts = []
        for host in first.hosts:
            rounds = dict(host.facts.get("loss", {}))
            if world.seat(host.name or "") in seats:
                facts = world.facts[host.name or ""]
                asked = {s: calls for s, calls in facts["peers"].items() if int(s) in seats}
                drops = self.drops.get(host.name or "", {})
                said = {**facts, "peers": asked, "drops": drops}
                rounds[AGAIN] = outcome(world.outcomes.get(host.name or "", said))
            hosts.append(replace(host, facts={**host.facts, **reread({"loss": rounds})}))
        ranks = [replace(rank, host=hosts[rank.host.id]) for rank in first.ranks]
        return replace(first, hosts=tuple(hosts), ranks=tuple(ranks))

    def judge(self, **fields: Any) -> list[Finding]:
        return judge(CHECK, self.cluster(**fields))

    def _first(self, **fields: Any) -> Cluster:
        world = self.tries[ONE]
        for name, drops in self.drops.items():
            world.facts[name]["drops"] = drops
        if not self.alone:
            return world.cluster(**fields)
        made = make_cluster(self.names, backend=world.backend, **fields)
        hosts = [
            replace(host, facts=reread({"loss": {FIRST: outcome(world.facts[host.name or ""])}}))
            for host in made.hosts
        ]
        ranks = [replace(rank, host=hosts[rank.host.id]) for rank in made.ranks]
        return replace(made, hosts=tuple(hosts), ranks=tuple(ranks))
