"""Base class of every check, and what the engine gives to it.

Checks import it from `nccl_doctor.api`, which also has helpers for observing; the engine needs only
this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from nccl_doctor.model.cluster import ALONE, Cluster
from nccl_doctor.model.findings import Figure, Finding, Kind, Layer, Level, Round, Scope, Turn
from nccl_doctor.model.job import Job
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.sections import Section


class Skip(Exception):
    """Raised by `observe` or `plan`: the check does not apply here. The text is the reason."""


class Untested(Exception):
    """Raised by `observe`: the check applies but could not look. The text is the reason.

    The check is then `blocked` if a failure of a lower layer covers the place, else `unknown`.
    With `facts`, it could look at a part only: these are judged, and the check is no pass.
    """

    def __init__(self, reason: str = "", facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.facts = facts


class ForeignError(Exception):
    """Misbehaviour of a check of another distribution, whose rules run in a child of their own.

    The text says what it was: `KeyError: 'lost'`. `raised` is True for an exception, and then `at`
    its place in the source; else the child was ended, or had to be.
    """

    def __init__(self, text: str, *, raised: bool = False, at: str = "") -> None:
        super().__init__(text)
        self.raised = raised
        self.at = at


class Peers(Protocol):
    """Connection between the participants of one round: a star over the store of the run."""

    def post(self, tag: str, value: Any) -> None:
        """Publish one JSON-able value under `tag`, once per round, for the rest of the group.

        Raises:
            OSError: the store is lost.
        """

    def collect(
        self, tag: str, timeout_s: float, of: Collection[int] | None = None
    ) -> dict[int, Any]:
        """Wait until every seat of the group (or every one `of` these) has posted `tag` or ended
        its part of the round, or for `timeout_s` seconds.

        Returns: seat → value of those that posted; those that stopped responding are missing.

        Raises:
            OSError: the store is lost.
        """

    def store(self) -> Any:
        """A `torch.distributed.Store` of this round and group alone, for a process group."""


class SocketHandoff(Protocol):
    """Open sockets that one round of a check leaves to a later one, on the same participant."""

    @property
    def files(self) -> tuple[int, int]:
        """Descriptors that belong to it."""

    def put(self, value: Any, sockets: Sequence[Any]) -> None:
        """Leave a JSON-able value and sockets there, once. They stay open as they are.

        Raises:
            OSError: there is no room for them.
        """

    def take(self) -> tuple[Any, list[Any]] | None:
        """Value and sockets that were left; None if there are none.

        Raises:
            OSError: they are too many for this process.
        """


def _no_breadcrumb(step: str, **details: Any) -> None:
    """Do nothing; breadcrumb of a context outside of a run."""


def _no_witness(name: str, value: Any) -> None:
    """Do nothing; witness of a context outside of a run."""


def _not_kept(facts: Mapping[str, Any]) -> None:
    """Do nothing; `so_far` of a context outside of a run."""


@dataclass(frozen=True)
class Context:
    """Input of an `observe`.

    Attributes:
        launch: launch record of this participant: rank, world size, address.
        env: the environment as the launcher gave it, unfiltered. Put no value of it into facts
            that the check's question does not need.
        backend: backend of the job: `nccl` or `gloo`.
        level: level of this run.
        deadline: `time.monotonic()` second after which this child is killed.
        join_timeout_s: seconds that the run still waits for participants.
        collective_timeout_s: deadline of one attempt with one group.
        door: server of the run's store at MASTER_ADDR:MASTER_PORT, as this participant sees it:
            `{"server": "agent" | "self" | "other", "bind_errno": int | None,
            "bind_error": str}`. `agent` is that of torchrun, `self` that of this participant.
        breadcrumb: call it before anything that may block; only this is left of a dead child.
        witness: call it, from a thread of your own, shortly before the deadline: `witness(name,
            value)` keeps JSON-able data about why this child is stuck. It changes no breadcrumb.
        so_far: call it with facts that hold whatever comes, before a wait for others. If this child
            then misses its deadline, they are judged, and the check is no pass.
        job: the user's description of the job.
        root: the folder below which /proc, /sys, /dev and /etc are read. Only tests and made-up
            machines have another one than `/`.
        round, group, seat, params, peers: for a check that observes together: the name of the
            round, the seats of this participant's group, its own seat, the parameters of the round.
        handoff: for a check that `keeps_sockets`; None where no file could be opened for it.
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
    so_far: Callable[[Mapping[str, Any]], None] = _not_kept
    job: Job = field(default_factory=Job)
    root: Path = Path("/")
    round: str = ALONE
    group: tuple[int, ...] = ()
    seat: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    peers: Peers | None = None
    handoff: SocketHandoff | None = None

    def left(self) -> float:
        """Seconds until the deadline, never negative."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def position(self) -> int:
        """Index of this participant in its group: its rank in the group's process group."""
        return self.group.index(self.seat)


class Check:
    """Base class of every check, with the defaults.

    Attributes:
        name: snake_case, the name of the file.
        layer: layer of its question.
        scope: once per host, or on every rank.
        cost: `instant`, `seconds` or `minutes`. The instant checks of a host share one child, so
            they must leave it unchanged: no thread, no library loaded as a test.
        instant_without_gpu: True if only its work on a GPU takes seconds: where the backend of the
            job is not NCCL, it shares the child of the instant checks.
        instant_when_answered: True if only an answer that does not come takes seconds, of a name
            server for example: such checks of a host share one child too, and must leave it
            unchanged. Where one waits, the others go on elsewhere after a second.
        kinds: every kind of finding that `judge` may yield.
        deadline_s: seconds for one `observe` that observes alone; less where participants are not
            waited for so long.
        seeks_master: True if its `observe` tries to reach rank 0 for as long as participants are
            waited for: without that there is no sign-in for which it would have to end.
        level: the lowest run level that includes it.
        together: True if it observes in rounds with other ranks (then `plan` returns the rounds).
        needs: layers in which a failure blocks every group that it affects.
        forms_groups: True if its rounds form process groups with the backend of the job: what they
            may take beyond `collective_timeout_s` is for the start of GPUs and communicators, and a
            run without --timeout gets that time in addition.
        turn: `FIRST` or `LAST` among the checks of its layer; the others go by name. A round of a
            check that is `LAST`, called `BEFORE`, is held before those of all other checks: what it
            reads there is what the others started from.
        looks_again: True if a check that observes alone is to do so once more, in round
            `AFTER_LOSS`, when somebody was lost. `Context.params` then has `hosts`: name →
            addresses of hosts of the job, those that were lost and some that are left.
        unaided: True if `observe` only asks the kernel about this process and its limits. Where no
            child can be started for it, it is called in the process of the participant, so that the
            report can name the limit.
        vital: True if without what it asks for no host can sign in: where that is missing, it is
            examined though others were selected.
        at_once: kinds whose findings are told on stderr within seconds of the start, before the
            report: they follow from what `observe` sees on its own host without torch and in an
            instant, and no other host's facts take them back. Told are certain failures of exactly
            these kinds, not of their variants; their facts are not observed again.
        keeps_sockets: True if a round leaves open sockets to a later one, by `Context.handoff`.
        reads: names of other checks whose facts `plan`, `judge`, `figures` or `sections` use. It
            changes neither order nor level: facts of a check that did not run are not there, and
            `plan` sees what was observed before it is asked.
    """

    name: ClassVar[str]
    layer: ClassVar[Layer]
    scope: ClassVar[Scope] = Scope.HOST
    cost: ClassVar[str] = "instant"
    instant_without_gpu: ClassVar[bool] = False
    instant_when_answered: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]]
    deadline_s: ClassVar[float] = 10.0
    seeks_master: ClassVar[bool] = False
    level: ClassVar[Level] = Level.QUICK
    together: ClassVar[bool] = False
    needs: ClassVar[tuple[Layer, ...]] = ()
    forms_groups: ClassVar[bool] = False
    turn: ClassVar[Turn] = Turn.ANY
    looks_again: ClassVar[bool] = False
    unaided: ClassVar[bool] = False
    keeps_sockets: ClassVar[bool] = False
    vital: ClassVar[bool] = False
    at_once: ClassVar[tuple[Kind, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()

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
        """Rounds to hold, given what is known. Called again after each batch, until it returns no
        new round, and once more at the end of a run in which something failed; so a later round may
        depend on the outcome of an earlier one, or of a later check.

        Raises:
            Skip: there is nothing in this cluster or this job to try together.
        """
        return ()

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings, from facts alone: no I/O, no clock, no environment."""
        raise NotImplementedError

    def figures(self, cluster: Cluster) -> Iterable[Figure]:
        """Values to compare with other runs, from facts alone, as in `judge`: speeds, versions.

        The facts may be those of an older version of the check; an exception then costs only the
        check's own figures of that run.
        """
        return ()

    def sections(self, cluster: Cluster) -> Iterable[Section]:
        """Links, versions and devices for maps of the network and issue forms; pure, as `judge`.

        Asked for when a report is rendered, so the facts may be those of an older version of the
        check, and names in them pseudonyms; what it raises costs no more than what it did not yet
        yield. A table needs no section: a fact `{"columns": [...], "rows": [[...], ...]}` is shown
        as one.
        """
        return ()
