"""What a check is, and what the engine gives it.

Checks have it by `nccl_doctor.api`, beside the tools to look with; the engine needs no more than
this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from nccl_doctor.model.cluster import ALONE, Cluster
from nccl_doctor.model.findings import Figure, Finding, Kind, Layer, Level, Round, Scope
from nccl_doctor.model.job import Job
from nccl_doctor.model.launch import Launch


class Skip(Exception):
    """Raised by `observe` or `plan`: the check does not apply here. The text is the reason."""


class Untested(Exception):
    """Raised by `observe`: the check applies but could not look. The text is the reason.

    The check is then `blocked` where a lower layer's failure covers the place, else `unknown`.
    """


class Peers(Protocol):
    """How the participants of one round reach each other: a star over the run's store."""

    def post(self, tag: str, value: Any) -> None:
        """Publish one JSON-able value under `tag`, once per round, for the rest of the group.

        Raises:
            OSError: the store is lost.
        """

    def collect(self, tag: str, timeout_s: float) -> dict[int, Any]:
        """Wait until every seat of the group has posted `tag`, or for `timeout_s` seconds.

        Returns: seat → value of those that posted; whoever fell silent is missing.

        Raises:
            OSError: the store is lost.
        """

    def store(self) -> Any:
        """A `torch.distributed.Store` of this round and group alone, for a process group."""


def _no_breadcrumb(step: str, **details: Any) -> None:
    """Breadcrumbs of a context that nobody follows."""


def _no_witness(name: str, value: Any) -> None:
    """The same, for what a stuck child says of itself."""


@dataclass(frozen=True)
class Context:
    """What an `observe` may use.

    Attributes:
        launch: who this participant is.
        env: the environment as the launcher gave it, unfiltered. Put no value of it into facts
            that the check's question does not need.
        backend: `nccl` or `gloo`: what the job will use.
        level: how much this run does.
        deadline: `time.monotonic()` second after which this child is killed.
        join_timeout_s: how long the run still waits for participants.
        collective_timeout_s: deadline of one group attempt.
        door: how the run's store is served at MASTER_ADDR:MASTER_PORT, from this participant's
            view: `{"server": "agent" | "self" | "other", "bind_errno": int | None,
            "bind_error": str}`. `agent` is torchrun's, `self` is this very participant's.
        breadcrumb: call it before anything that may block; what it says is all that a dead child
            leaves behind.
        witness: call it, from a thread of one's own, shortly before the deadline: `witness(name,
            value)` keeps JSON-able data about why this child is stuck. It moves no breadcrumb.
        job: what the job will do, as far as the user says so.
        round, group, seat, params, peers: for a check that observes together: the round's name,
            the seats of this participant's group, its own seat, the round's parameters.
    """

    launch: Launch
    env: Mapping[str, str]
    backend: str = "gloo"
    level: Level = Level.STANDARD
    deadline: float = float("inf")
    join_timeout_s: float = 60.0
    collective_timeout_s: float = 20.0
    door: Mapping[str, Any] = field(default_factory=dict)
    breadcrumb: Callable[..., None] = _no_breadcrumb
    witness: Callable[[str, Any], None] = _no_witness
    job: Job = field(default_factory=Job)
    round: str = ALONE
    group: tuple[int, ...] = ()
    seat: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    peers: Peers | None = None

    def left(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def position(self) -> int:
        """Index of this participant in its group: its rank in the group's process group."""
        return self.group.index(self.seat)


class Check:
    """Base of every check: the defaults.

    Attributes:
        name: snake_case, the name of the file.
        layer: where its question lives.
        scope: once per host, or by every rank.
        cost: `instant`, `seconds` or `minutes`. The instant ones of a host share one child, so they
            must leave it as they found it: no thread, no library loaded for a trial.
        kinds: every kind of finding that `judge` may yield.
        deadline_s: of one `observe` that observes alone.
        level: the lowest run level that includes it.
        together: whether its rounds need peers (then `plan` says which).
        needs: layers of which a failure blocks every group that it touches.
    """

    name: ClassVar[str]
    layer: ClassVar[Layer]
    scope: ClassVar[Scope] = Scope.HOST
    cost: ClassVar[str] = "instant"
    kinds: ClassVar[tuple[Kind, ...]]
    deadline_s: ClassVar[float] = 10.0
    level: ClassVar[Level] = Level.QUICK
    together: ClassVar[bool] = False
    needs: ClassVar[tuple[Layer, ...]] = ()

    def deadline(self, ctx: Context) -> float:
        """Seconds that `observe` may take when it observes alone."""
        return self.deadline_s

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Look at the system and return JSON-able facts.

        Raises:
            Skip: it does not apply here.
            Untested: it could not look.
        """
        raise NotImplementedError

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """Rounds to hold, given what is known. Asked again after each batch, until it names no
        round that has not been held; so a later round may depend on the outcome of an earlier.

        Raises:
            Skip: there is nothing in this cluster or this job to try together.
        """
        return ()

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings, from facts alone: no I/O, no clock, no environment."""
        raise NotImplementedError

    def figures(self, cluster: Cluster) -> Iterable[Figure]:
        """What is worth comparing with other runs, from facts alone, as `judge`: speeds, versions.

        The facts may be those of an older version of the check; what it raises then costs its own
        figures of that run.
        """
        return ()
