"""Chaos: runs of the doctor that something strikes at a random moment.

A plan is a pure function of a seed and a number, so that a run can be repeated. `strikes` carries
it out on a lab, `warden` watches the run from outside, `judging` says what was wrong with it, and
`records` keeps one line for each.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

SEED = 14
"""Seed of the runs on record, chosen before the first of them was made."""
LAUNCHERS = ("own", "torchrun", "plain")
SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP", "stop-go": "SIGSTOP", "term": "SIGTERM"}
SIGNALS |= {"int": "SIGINT", "hup": "SIGHUP"}
"""Strikes that send a signal to a process; `stop-go` sends SIGCONT later."""
STRIKES = (
    *("none", "none", "kill", "kill", "stop", "stop", "stop-go", "term", "int", "hup"),
    *("cable", "flap", "drop", "reject", "path", "shm", "tmp", "folder", "clock", "memory"),
)
"""A block of runs: each strike as often as it stands here, in random order."""
WORDS = {
    "none": "nothing",
    "kill": "SIGKILL of a process",
    "stop": "SIGSTOP of a process",
    "stop-go": "SIGSTOP of a process, SIGCONT later",
    "term": "SIGTERM to a process",
    "int": "SIGINT to a process",
    "hup": "SIGHUP to a process",
    "cable": "cable out: the NIC has no carrier",
    "flap": "flapping cable",
    "drop": "firewall of a host drops",
    "reject": "firewall of a host rejects",
    "path": "firewall on the path drops",
    "shm": "/dev/shm full",
    "tmp": "/tmp full",
    "folder": "output folder deleted",
    "clock": "uptime clock differs (time namespace)",
    "memory": "memory limit of a cgroup",
}
ROLES = {
    "own": ("launcher", "supervisor", "rank", "child"),
    "torchrun": ("launcher", "supervisor", "rank", "child"),
    "plain": ("supervisor", "rank", "child"),
}
"""Processes of a run. `launcher` is what the user started, where that is not the supervisor of one
rank; `rank` does the work of one, `child` makes one observation.
"""
_BIRTHS = {"quick": 44, "standard": 130}
"""How many processes and threads a host saw in a run, about, when the seed was chosen.

A strike that is due later misses.
"""


@dataclass(frozen=True)
class Plan:
    """One run. `strike` hits the host `victim` once it has seen `births` processes and threads
    come since the doctor began there, and `delay_s` later.

    Attributes:
        seed: of all runs.
        number: of this run.
        launcher: `own`, `torchrun` or `plain` variables.
        hosts: number of hosts, nd0, nd1, …
        nproc: ranks of each host.
        level: of the examination.
        shared: whether all hosts leave their partial reports in one folder (`--output-dir`).
        strike: one of `STRIKES`.
        victim: the host; for `path` one end of it.
        other: for `path`, its other end; empty where the victim loses all others.
        role: the process that gets a signal.
        pick: which one of those there are, from 0 to 1.
        births: moment of the strike.
        delay_s: moment of the strike.
        for_s: until SIGCONT, or until the cable changes again.
        scope: what a firewall is about: `all` packets, or `new` connections.
        amount: limit of memory in MiB, or seconds that the clock differs.
    """

    seed: int
    number: int
    launcher: str
    hosts: int
    nproc: int
    level: str
    shared: bool
    strike: str
    victim: str
    other: str
    role: str
    pick: float
    births: int
    delay_s: float
    for_s: float
    scope: str
    amount: int

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts."""
        return tuple(f"nd{index}" for index in range(self.hosts))

    def ranks_of(self, host: str) -> tuple[int, ...]:
        """Ranks of a host."""
        first = self.names.index(host) * self.nproc
        return tuple(range(first, first + self.nproc))

    def host_of(self, rank: int) -> str:
        """Host of a rank; empty if there is no such rank."""
        return self.names[rank // self.nproc] if 0 <= rank < self.hosts * self.nproc else ""

    def births_at(self, level: str) -> int:
        """Moment of the strike in a run of some level: as far into it as at the plan's own one."""
        return self.births * _BIRTHS[level] // _BIRTHS[self.level]

    def __str__(self) -> str:
        run = f"{self.launcher}, {self.hosts} × {self.nproc}, {self.level}"
        if self.strike == "none":
            return f"{run}: nothing"
        what = self.strike
        if self.strike in SIGNALS:
            what += f" {self.role}"
        elif self.strike in ("drop", "reject"):
            what += f" {self.scope}"
        elif self.strike in ("clock", "memory"):
            what += f" {self.amount}"
        where = f"{self.victim} ↔ {self.other}" if self.other else self.victim
        return f"{run}: {what} on {where} after {self.births} births and {self.delay_s:.2f} s"


def plan(seed: int, number: int) -> Plan:
    """The plan of one run, whatever other runs there are."""
    block, place = divmod(number, len(STRIKES))
    strikes = list(STRIKES)
    random.Random(f"{seed} block {block}").shuffle(strikes)
    draw = random.Random(f"{seed} run {number}")
    strike = strikes[place]
    hosts = draw.choices((2, 3, 4), (5, 4, 2))[0]
    nproc = draw.choice((1, 2)) if hosts < 4 else 1
    launcher = draw.choice(LAUNCHERS)
    level = draw.choices(("quick", "standard"), (2, 1))[0]
    names = [f"nd{index}" for index in range(hosts)]
    victim = draw.choice(names)
    others = [name for name in names if name != victim]
    other = draw.choice(["", *others] if hosts > 2 else others)
    role = draw.choice(ROLES[launcher])
    shift = draw.choice((-1, 1)) * int(10 ** draw.uniform(0, 3))
    return Plan(
        seed=seed,
        number=number,
        launcher=launcher,
        hosts=hosts,
        nproc=nproc,
        level=level,
        shared=draw.random() < 0.5,
        strike=strike,
        victim=victim,
        other=other if strike == "path" else "",
        role=role if strike in SIGNALS else "",
        pick=draw.random(),
        births=0 if strike == "clock" else int(draw.random() * _BIRTHS[level]),
        delay_s=round(draw.choice((0.0, draw.uniform(0, 0.3), draw.uniform(0, 2))), 3),
        for_s=round(draw.uniform(0.1, 6) if strike == "stop-go" else draw.uniform(0.1, 1.5), 3),
        scope=draw.choice(("all", "new")),
        amount=shift if strike == "clock" else draw.choice((4, 16, 48)),
    )
