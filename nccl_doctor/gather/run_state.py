"""State of one participant's run: the settings from its start, and what changes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nccl_doctor.gather.joining import Joining
from nccl_doctor.gather.partial_reports import Redaction
from nccl_doctor.gather.pauses import Pauses
from nccl_doctor.gather.progress import Progress
from nccl_doctor.gather.store_server import Door
from nccl_doctor.model.check import Context
from nccl_doctor.model.cluster import Facts
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.layout import Address, HostPlace
from nccl_doctor.model.options import Options
from nccl_doctor.observe.shelf import Shelf
from nccl_doctor.registry import Registry
from nccl_doctor.toolkit import guardian
from nccl_doctor.toolkit.more_time import MoreTime

if TYPE_CHECKING:
    from nccl_doctor.judge.history import Past

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
    door: Door = field(default_factory=lambda: Door("other"))
    nonce: str = ""
    seat: int = 0
    hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    joined: bool = False
    more_s: int = 0
    joining: Joining = field(default_factory=Joining)
    pauses: Pauses = field(default_factory=Pauses)
    first_facts: Facts = field(default_factory=dict)
    _shelves: dict[str, Shelf] = field(default_factory=dict)

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
            guardian.put_off(self.deadline)

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

    def shelf(self, check: str) -> Shelf | None:
        """Shelf of a check, for sockets between its rounds; None where no file can be opened."""
        with contextlib.suppress(OSError):
            if check not in self._shelves:
                self._shelves[check] = Shelf()
        return self._shelves.get(check)

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
