"""Faults that nobody chose: drawn from mechanisms, hosts, directions and launchers by a seed.

The numbers of a release are run once, and their results are kept as they came. What goes wrong in
them is mended afterwards, and proven by the numbers of the next release: so each release has a
seed of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab.corpus import LAUNCHERS, Case, Cause

SEED = 17
"""Seed of the faults of this release (0.1.0), chosen before the first of them was run."""


@dataclass(frozen=True)
class Fault:
    """One fault in a case.

    Attributes:
        title: in words, with its hosts.
        steps: for `inject`.
        causes: that a right answer names.
        hosts: that the fault is about; two faults of one case have no host in common.
        waits: some host cannot join.
    """

    title: str
    steps: Sequence[Mapping[str, Any]]
    causes: Sequence[Cause]
    hosts: frozenset[str]
    waits: bool = False


@dataclass(frozen=True)
class Cluster:
    """A cluster that a mechanism draws a fault for.

    Attributes:
        random: the generator.
        names: of all hosts.
        victim: the host that the fault is on.
        launcher: one of `LAUNCHERS`.
        nproc: ranks of each host.
    """

    random: random.Random
    names: Sequence[str]
    victim: str
    launcher: str
    nproc: int

    def other(self, *but: str) -> str:
        """Another host than the victim and these; srun itself is on the first one, and needs it."""
        but = (*but, self.names[0]) if self.launcher == "srun" else but
        return self.random.choice([n for n in self.names if n not in (self.victim, *but)])


@dataclass(frozen=True)
class Mechanism:
    """A way of breaking a cluster.

    Attributes:
        draw: a fault of a cluster.
        stage: `join`, where a host cannot take part; `shut`, where its groups cannot form; `facts`,
            where the facts of a host say it; `calls`, `speed`, and `during` for what begins in the
            run.
        launchers: that can have it.
        least: number of hosts that it needs.
        first: whether it may be on node 0.
        ranks: of each host, that it needs.
    """

    draw: Callable[[Cluster], Fault]
    stage: str
    launchers: Sequence[str] = LAUNCHERS
    least: int = 2
    first: bool = True
    ranks: int = 1


Draw = Callable[[Cluster], Fault]
MECHANISMS: dict[str, Mechanism] = {}
_WITH_ALL = ("join", "shut", "calls", "speed", "during", "facts")
TOGETHER = {("facts", other) for other in _WITH_ALL}
TOGETHER |= {("join", "join"), ("join", "shut"), ("shut", "shut"), ("shut", "calls")}
TOGETHER |= {("calls", "calls")}
"""Stages of two faults that one run can show. Where a host cannot take part, no speed is measured
with it, and no group is held that something could happen to.
"""


def mechanism(stage: str, **more: Any) -> Callable[[Draw], Draw]:
    """Register a mechanism under the name of its function."""

    def register(function: Draw) -> Draw:
        MECHANISMS[function.__name__] = Mechanism(function, stage, **more)
        return function

    return register


def cases(seed: int, count: int, first: int = 0) -> Iterator[Case]:
    """The cases of a seed, from number `first` on; each depends on the seed and its number only."""
    for number in range(first, first + count):
        yield case(seed, number)


def case(seed: int, number: int) -> Case:
    """One case of a seed: about a third have two faults, on different hosts."""
    draw = random.Random(f"{seed} blind {number}")
    launcher = draw.choices(LAUNCHERS, (6, 3, 2, 3, 1))[0]
    # Under srun nothing is done to the first host.
    hosts = draw.choices((2, 3, 4), (3 if launcher != "srun" else 0, 5, 2))[0]
    names = [f"nd{index}" for index in range(hosts)]
    nproc = 1 if launcher == "plain" or hosts == 4 else draw.choice((1, 1, 2))
    wanted = 2 if hosts > 2 and draw.random() < 0.45 else 1
    faults: list[Fault] = []
    stages: list[str] = []
    for name in draw.choices(sorted(MECHANISMS), k=100):
        kind = MECHANISMS[name]
        if launcher not in kind.launchers or hosts < kind.least or nproc < kind.ranks:
            continue
        if any(not {(kind.stage, each), (each, kind.stage)} & TOGETHER for each in stages):
            continue
        victim = draw.choice(names if kind.first and launcher != "srun" else names[1:])
        fault = kind.draw(Cluster(draw, names, victim, launcher, nproc))
        if any(fault.hosts & each.hosts for each in faults):
            continue
        faults.append(fault)
        stages.append(kind.stage)
        if len(faults) == wanted:
            break
    return Case(
        id=f"blind-{seed}-{number}",
        title="; ".join(each.title for each in faults),
        hosts=hosts,
        nproc=nproc,
        launcher=launcher,
        inject=tuple(step for each in faults for step in each.steps),
        expect=tuple(cause for each in faults for cause in each.causes),
        waits=any(each.waits for each in faults),
        stock=False,
    )


from tests.lab.corpus import between, mechanisms  # noqa: E402, F401 - they register them
