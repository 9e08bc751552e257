"""State of one participant's run: its settings, its phases, and the time that it may take."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nccl_doctor.gather.progress import Progress
from nccl_doctor.gather.server import ServerState
from nccl_doctor.gather.views import Redaction
from nccl_doctor.model.check import Check, Context
from nccl_doctor.model.cluster import Cluster, Facts
from nccl_doctor.model.codec import MOST_MORE_S
from nccl_doctor.model.findings import Round
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.layout import Address, HostPlace
from nccl_doctor.model.options import Options
from nccl_doctor.observe.handoff import SocketPairHandoff
from nccl_doctor.registry import Registry
from nccl_doctor.system import supervisor
from nccl_doctor.system.deadline import MoreTime
from nccl_doctor.system.pauses import Pauses
from nccl_doctor.toolkit.cpu_wait import CpuWatch
from nccl_doctor.toolkit.groups.attempts import driver_start_s, driver_starts

if TYPE_CHECKING:
    from nccl_doctor.judge.history import Past


# Time that a participant spends until it has a seat, phase by phase.


class Joining:
    """Stopwatch of one participant; `seconds` holds the phases that are over, as `Rank.joining`."""

    def __init__(self) -> None:
        """Nothing has begun."""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take the time of a phase; one that is entered again is added up."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._add(name, time.monotonic() - began)

    @contextmanager
    def watched(self, name: str) -> Iterator[None]:
        """The same, with what the threads of this process waited for a CPU meanwhile, and the load
        of the machine for each of its CPUs at the end.
        """
        watch = CpuWatch(process=True)
        try:
            with self.phase(name):
                yield
        finally:
            with suppress(OSError):  # few open files are allowed, and the store took the last one
                self._add("cpu_waited_s", max(0.0, watch.report()["waited_s"] or 0.0))
                self.seconds["load"] = round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)


RESERVE_S = 2.0
"""Kept of the run's time for judging and writing the report."""
OWN_RESERVE_S = 1.6
"""Kept by one that follows, for a report of its own: rank 0 needs `RESERVE_S` before it answers."""
RESERVE_OF_A_RANK_S = 1.5e-4
"""More of it for each rank that is expected: measured 80 µs to judge and write one, at 131,072."""
BETWEEN_ORDERS_OF_A_RANK_S = 5e-3
"""Time of rank 0 between two orders, for each rank: to read its answer, plan, judge and write.
Measured 5 ms of the processor at 1,024 ranks, most of it to write the report.
"""


@dataclass(frozen=True)
class Key:
    """Secret that the participants share. `lasts`: other runs have the same one."""

    secret: bytes = field(repr=False)
    lasts: bool


@dataclass(frozen=True)
class RunConfig:
    """Settings of one participant's whole run; times are `time.monotonic()`.

    `start_siblings` starts the other ranks of a host of the own launcher, once it has its place;
    `meeting` is the store's address for one of them. `past` is what the coordinator holds the
    cluster against, if anything. `redaction` gives pseudonyms to what stays in `--output-dir`.
    With `key`, only messages of those who have it are believed. `more` are seconds that are added
    to `deadline` meanwhile, for all processes of this host that were forked after it was made.
    """

    registry: Registry
    options: Options
    started: float
    deadline: float
    command: str
    started_at: str
    progress: Progress
    start_siblings: Callable[[HostPlace, Address], None] = field(
        default=lambda place, meeting: None
    )
    meeting: Address | None = None
    past: Past | None = None
    redaction: Redaction | None = None
    key: Key | None = None
    more: MoreTime = field(default_factory=MoreTime)


@dataclass
class Run:
    """State of one participant: its host gets a place, and all get a seat and the nonce.

    `hosts`: name → addresses of some hosts of the job, to be called after a loss. `joined`: on the
    coordinator, the sign-in is over. `more_s`: seconds by which it knows the end to be put off.
    `first_facts`: those that were judged for the user already, see `first_look`.
    """

    config: RunConfig
    launch: Launch
    environ: Mapping[str, str]
    backend: str
    door: ServerState = field(default_factory=lambda: ServerState("other"))
    nonce: str = ""
    seat: int = 0
    hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    joined: bool = False
    more_s: int = 0
    joining: Joining = field(default_factory=Joining)
    pauses: Pauses = field(default_factory=Pauses)
    first_facts: Facts = field(default_factory=dict)
    _handoffs: dict[str, SocketPairHandoff] = field(default_factory=dict)

    @property
    def registry(self) -> Registry:
        """The checks of this run."""
        return self.config.registry

    @property
    def options(self) -> Options:
        """Options of this run."""
        return self.config.options

    @property
    def progress(self) -> Progress:
        """Progress line of this participant."""
        return self.config.progress

    @property
    def deadline(self) -> float:
        """The `time.monotonic()` second by which this participant is gone."""
        return self.config.deadline + self.config.more()

    def put_off(self, seconds: int) -> None:
        """Put the end of the run off by so many seconds in all, unless the user set it.

        It never comes earlier again. Who watches this process is told.
        """
        if self.options.timeout_grows and seconds > self.more_s:
            self.more_s = seconds
            self.config.more.give(seconds)
            supervisor.put_off(self.deadline)

    def left(self) -> float:
        """Seconds until the report has to be written."""
        reserve_s = RESERVE_S + RESERVE_OF_A_RANK_S * (self.launch.world_size or 0)
        return max(0.0, self.deadline - reserve_s - time.monotonic())

    def between_orders(self) -> float:
        """Seconds that rank 0 may need between two orders, beyond those that few ranks cost it."""
        return BETWEEN_ORDERS_OF_A_RANK_S * (self.launch.world_size or 0)

    def left_to_follow(self) -> float:
        """Seconds for which one that follows may wait for rank 0, which writes its report first."""
        return max(0.0, self.deadline - OWN_RESERVE_S - time.monotonic())

    def handoff(self, check: str) -> SocketPairHandoff | None:
        """Handoff of sockets between the rounds of a check; None where no file can be opened."""
        with contextlib.suppress(OSError):
            if check not in self._handoffs:
                self._handoffs[check] = SocketPairHandoff()
        return self._handoffs.get(check)

    def context(self) -> Context:
        """Context of an `observe` of this participant, outside of rounds."""
        return Context(
            launch=self.launch,
            env=self.environ,
            backend=self.backend,
            level=self.options.level,
            join_timeout_s=self.options.join_timeout_s,
            collective_timeout_s=self.options.collective_timeout_s,
            door=self.door.facts,
            job=self.options.job,
        )


# Time for the start of GPUs and communicators, which a run without --timeout gets in addition.
#
# Each round with groups of the backend starts them anew, in processes of its own. What that may
# have taken so far, and what the next round may need for it, counts beyond the default of
# --timeout; only as far as the round would lack time, and never for a backend without GPUs.


WHY = "the start of GPUs and communicators"


class StartTime:
    """Account of one run, on the coordinator."""

    def __init__(self, run: Run) -> None:
        """Nothing was started yet."""
        self._run = run
        self._seen_s = 0.0

    def signed_in(self, cluster: Cluster) -> None:
        """Take note of the time that driver and context took before the sign-in, if a GPU is used.

        It was measured while the hosts examined themselves, so it was a part of the run's time.
        """
        if driver_starts(cluster):
            self._seen_s += driver_start_s(cluster)

    def make_room(self, check: Check, round_: Round, needs_s: float) -> None:
        """Put the end of the run off, if a round lacks time; `needs_s`: with all that follows it.

        Everybody else learns of it with the order of the round.
        """
        run = self._run
        starts_s = self.of(check, round_)
        lacks_s = needs_s - run.left()
        if not (run.options.timeout_grows and starts_s > 0 and lacks_s > 0):
            return
        seconds = more_s(run.more_s, lacks_s, self._seen_s + starts_s)
        if seconds > run.more_s:
            run.put_off(seconds)
            run.progress.tell(in_words(run.options.timeout_s, seconds))

    def note(self, check: Check, round_: Round, took_s: float) -> None:
        """Take note of a round that was held: so much of it may have been the start."""
        self._seen_s += min(took_s, self.of(check, round_))

    def of(self, check: Check, round_: Round) -> float:
        """Seconds of a round that are for the start of GPUs and communicators."""
        if self._run.backend != "nccl" or not check.forms_groups:
            return 0.0
        return max(0.0, round_.deadline_s - self._run.options.collective_timeout_s)


def more_s(given_s: int, lacks_s: float, starts_s: float) -> int:
    """Seconds in all beyond the default of --timeout: those of before, and what is lacking now, but
    no more of that than starts account for.
    """
    return max(given_s, min(math.ceil(given_s + lacks_s), int(starts_s), MOST_MORE_S))


def in_words(default_s: float, seconds: int) -> str:
    """The new time limit, for the log."""
    return (
        f"time limit of the run: {default_s + seconds:.0f} s, {seconds} s more than the default, "
        f"for {WHY} (--timeout sets another one)"
    )


def time_limit(default_s: float, seconds: int) -> dict[str, Any]:
    """The new time limit, for `run` of the report; nothing where it is the one of the options."""
    if not seconds:
        return {}
    limit = {"seconds": default_s + seconds, "default_s": default_s, "why": WHY}
    return {"time_limit": limit}
