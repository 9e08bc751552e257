"""Gathered data: outcomes of probes, and the hosts and ranks that they came from. Pure data."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, NamedTuple, TypeVar

from nccl_doctor.model.codec import MAX_PID, Called, Number, Part
from nccl_doctor.model.findings import Level, Where
from nccl_doctor.model.job import Job
from nccl_doctor.model.launch import Launch

# The outcome of one probe: facts, or how it ended. Pure data.


class OutcomeStatus(str, Enum):
    """Ending of one `observe`."""

    OK = "ok"  # it returned facts; `reason`: what it could not look at
    SKIPPED = "skipped"  # it does not apply here; `reason`
    UNTESTED = "untested"  # it could not look; `reason`
    RAISED = "raised"  # an exception nobody expected; `reason`
    HUNG = "hung"  # it missed its deadline and was killed
    DIED = "died"  # it was killed by a signal or left with an exit code
    SILENT = "silent"  # no word from the participant at all


MAX_BREADCRUMBS = 40
"""Steps of a child that are kept: the last ones."""


class Trail(Sequence[Mapping[str, Any]]):
    """Breadcrumbs whose steps are also those of other ranks, which share them, with their own times
    `at_s`: in one place for all, as ten thousand ranks have a million. Steps are not to be changed.
    """

    __slots__ = ("steps", "times")

    def __init__(self, steps: Sequence[Mapping[str, Any]], at_s: Iterable[float]) -> None:
        self.steps, self.times = steps, array("d", at_s)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Trail(self.steps[index], self.times[index])
        return {**self.steps[index], "at_s": self.times[index]}

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for step, at_s in zip(self.steps, self.times, strict=True):
            yield {**step, "at_s": at_s}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Trail, tuple)) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))


_NONE: Mapping[str, Any] = {}
"""One for all outcomes without: a report of ten thousand ranks has half a million."""


def _none() -> Mapping[str, Any]:
    return _NONE


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one probe child: facts, or its ending and its last activity.

    `breadcrumbs` are the steps it announced before each blocking call, oldest first, each
    `{"step": str, "at_s": float, ...}`; the last one is what a hung or dead child was doing.
    `stack` is the Python stack of a stuck child, `state` its /proc state letter (T = stopped,
    D = uninterruptible, S = sleeping), `wchan` the kernel function that it slept in,
    `log_tail` the end of what it printed. `witness` is what a child that was about to miss its
    deadline said of itself, by name (see `Context.witness`). `group` is the lowest seat of the
    group that it took part in; None where it observed alone. `extra` are keys of another version.
    """

    status: OutcomeStatus
    facts: Mapping[str, Any] = field(default_factory=_none)
    reason: str = ""
    breadcrumbs: Sequence[Mapping[str, Any]] = ()
    stack: str = ""
    state: str = ""
    wchan: str = ""
    log_tail: str = ""
    witness: Mapping[str, Any] = field(default_factory=_none)
    exit_code: int | None = None
    signal: str | None = None
    duration_s: float = 0.0
    group: int | None = None
    extra: Mapping[str, Any] = field(default_factory=_none)

    @property
    def last_step(self) -> str:
        """Text of the last breadcrumb, or the empty string."""
        return str(self.breadcrumbs[-1].get("step", "")) if self.breadcrumbs else ""

    def to_json(self) -> dict[str, Any]:
        """Plain data, without empty fields, so that a healthy outcome stays small."""
        data: dict[str, Any] = {
            "status": self.status.value,
            "duration_s": round(self.duration_s, 4),
        }
        if self.facts:
            data["facts"] = dict(self.facts)
        if self.breadcrumbs:
            data["breadcrumbs"] = [dict(crumb) for crumb in self.breadcrumbs]
        if self.witness:
            data["witness"] = dict(self.witness)
        for key in (
            "reason",
            "stack",
            "state",
            "wchan",
            "log_tail",
            "exit_code",
            "signal",
            "group",
        ):
            value = getattr(self, key)
            if value not in ("", None):
                data[key] = value
        return data | dict(self.extra)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """Inverse of `to_json`; what is of another type than here, as in another version, is not
        known.

        Raises:
            ValueError: the status is not one of `OutcomeStatus`.
        """
        witness, crumbs = data.get("witness"), data.get("breadcrumbs", ())
        if type(crumbs) is not Trail:
            crumbs = tuple([c for c in crumbs if type(c) is dict or isinstance(c, Mapping)])
        if data.keys() <= _USUAL:  # nearly all are so, and there are a million
            return cls(
                OutcomeStatus(data["status"]),
                data.get("facts", _NONE),
                _text(data, "reason"),
                crumbs,
                duration_s=data.get("duration_s", 0.0),
                group=_number(data, "group"),
            )
        return cls(
            status=OutcomeStatus(data["status"]),
            facts=data.get("facts", _NONE),
            reason=_text(data, "reason"),
            breadcrumbs=crumbs,
            stack=_text(data, "stack"),
            state=_text(data, "state"),
            wchan=_text(data, "wchan"),
            log_tail=_text(data, "log_tail"),
            witness=witness if isinstance(witness, Mapping) else _NONE,
            exit_code=_number(data, "exit_code"),
            signal=_text(data, "signal") or None,
            duration_s=data.get("duration_s", 0.0),
            group=_number(data, "group"),
            extra={key: data[key] for key in data if key not in _FIELDS} or _NONE,
        )


_FIELDS = frozenset(Outcome.__dataclass_fields__)
_USUAL = frozenset({"status", "facts", "reason", "breadcrumbs", "duration_s", "group"})


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key, "")
    return value if isinstance(value, str) else ""


def _number(data: Mapping[str, Any], key: str) -> int | None:
    value = data.get(key)
    return value if type(value) is int and abs(value) <= MAX_PID else None


Facts = Mapping[str, Mapping[str, Outcome]]
"""check name → round name → outcome."""


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """Plain data, as in the report and in a sign-in."""
    return {
        check: {name: outcome.to_json() for name, outcome in rounds.items()}
        for check, rounds in facts.items()
    }


__all__ = [
    "AFTER_LOSS",
    "ALONE",
    "BEFORE",
    "JOINING",
    "MAX_BREADCRUMBS",
    "Cluster",
    "Evidence",
    "Facts",
    "Host",
    "Outcome",
    "OutcomeStatus",
    "Rank",
    "facts_to_json",
]

T = TypeVar("T")

ALONE = "alone"
"""Name of the one round of a check that observes without peers."""
BEFORE = "before"
"""Name of the round that a check that looks back (`Turn.LAST`) holds before all others do."""
AFTER_LOSS = "after-loss"
"""Name of the round in which it looks again, if somebody was lost (`Check.looks_again`)."""


@dataclass(frozen=True)
class Host:
    """One host: everything with the same name, kernel boot and network namespace.

    `id` is its index in the report. `name` is the name that the host reports; two hosts may share
    it. `reported` is False for a host that is expected but never signed in; then `name` is None
    unless another source has it. `joined` is False if only its partial report is known: it examined
    itself, and never reached the coordinator (or lost it). `key` is the same in every report of one
    machine, and of no other; empty if not known. `extra` are keys of another version.
    """

    id: int
    name: Annotated[str | None, Called("host")]
    node_rank: int | None
    reported: bool
    addresses: tuple[str, ...] = ()
    facts: Annotated[Facts, Part.APART] = field(default_factory=dict)
    joined: bool = True
    key: str = ""
    extra: Annotated[Mapping[str, Any], Part.REST] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name for people: the host name, or else the node rank; of an autopsy, often neither."""
        return self.name or ("its host" if self.node_rank is None else f"node {self.node_rank}")


@dataclass(frozen=True)
class Rank:
    """One participant. `seat` is unique even where two participants claim the same rank.

    `signed_in_s` is seconds from when the coordinator opened the sign-in to its last look that did
    not find this one there. `env` holds allow-listed variables as the launcher gave them. `device`
    is what it would train on: `cuda` where its host has a GPU for it, else `cpu`. `backend` is what
    its own --backend says: `auto`, `nccl` or `gloo`; empty where it did not say. A rank that never
    signed in has `reported` False, and no launch, environment or facts; `refused` is then the code
    of the finding that says why its messages were not taken, if any came. `joining` are the seconds
    of each phase until it had a seat, as far as it said: `torch_s` (import), `examined_s` (its own
    checks), `look_up_s` (of MASTER_ADDR), `connect_s` (to the store), `opened_s` (rank 0 opens the
    run), `seat_s`; of `connect_s`, `cpu_waited_s` without a CPU; and `load` of the machine for each
    CPU at that time. `extra` are keys of another version.
    """

    seat: int
    rank: int | None
    local_rank: int | None
    host: Annotated[Host, Called("host"), Called("host_id"), Part.APART]
    reported: bool
    launch: Launch | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None
    backend: str = ""
    pid: int | None = None
    signed_in_s: float = 0.0
    last_breadcrumb: str | None = None
    refused: Annotated[str, Part.SPARSE] = ""
    joining: Annotated[Mapping[str, float], Part.SPARSE] = field(default_factory=dict)
    facts: Annotated[Facts, Part.APART] = field(default_factory=dict)
    extra: Annotated[Mapping[str, Any], Part.REST] = field(default_factory=dict)


JOINING = (
    "torch_s",
    "examined_s",
    "look_up_s",
    "connect_s",
    "opened_s",
    "seat_s",
    "cpu_waited_s",
    "load",
)
"""Keys of `Rank.joining`."""


class Evidence(NamedTuple):  # as quick to make as can be: a large cluster has a million outcomes
    """One outcome with its place: `rank` is the participant that observed it."""

    rank: Rank
    round: str
    outcome: Outcome

    @property
    def host(self) -> Host:
        """The host of the observer."""
        return self.rank.host

    @property
    def where(self) -> Where:
        """The observer's own place."""
        return self.rank_place(self.rank)

    @staticmethod
    def rank_place(rank: Rank) -> Where:
        """Host and rank of one participant."""
        return Where(
            hosts=(rank.host.name,) if rank.host.name else (),
            ranks=(rank.rank,) if rank.rank is not None else (),
        )


@dataclass(frozen=True)
class Cluster:
    """All gathered data: the input of `judge`.

    `world_size` and `nnodes` are the coordinator's claims. `hosts` and `ranks` include the expected
    ones that never signed in (`reported` False). `complete` is False without a coordinator's
    report: in the partial report of a host that never reached the coordinator, and in a merge of
    such reports without one of every host. A merged cluster has hosts that did not join. Each run
    has another `run_id`.
    """

    world_size: Number
    nnodes: Number
    backend: str
    level: Level
    hosts: Annotated[tuple[Host, ...], Part.APART]
    ranks: Annotated[tuple[Rank, ...], Part.APART]
    join_timeout_s: float = 60.0
    collective_timeout_s: float = 20.0
    complete: bool = True
    expected: Mapping[str, Any] = field(default_factory=dict)
    job: Job = field(default_factory=Job)
    run_id: Annotated[str, Part.APART] = field(default="", compare=False)

    def with_more(self, checks: Container[str]) -> Cluster:
        """The same hosts and ranks, which have more facts meanwhile, of these checks: what follows
        from the others stays known.
        """
        later, before = replace(self), vars(self)
        vars(later).update({name: before[name] for name in _OF_PLACES if name in before})
        if "_seen" in before:
            seen = {check: each for check, each in self._seen.items() if check not in checks}
            vars(later)["_seen"] = seen
        if "_found" in before:
            vars(later)["_found"] = {
                key: (read, each)
                for key, (read, each) in self._found.items()
                if not any(check in checks for check in read)
            }
        return later

    @cached_property
    def present(self) -> tuple[Rank, ...]:
        """Ranks that signed in, in order of rank, then seat."""
        here = (rank for rank in self.ranks if rank.reported)
        return tuple(sorted(here, key=lambda r: (-1 if r.rank is None else r.rank, r.seat)))

    @cached_property
    def absent(self) -> tuple[Rank, ...]:
        """Expected ranks that never signed in."""
        return tuple(rank for rank in self.ranks if not rank.reported)

    @property
    def present_hosts(self) -> tuple[Host, ...]:
        """Hosts with at least one rank that signed in."""
        return tuple(host for host in self.hosts if host.reported)

    @property
    def hosts_wanted(self) -> int:
        """Number of hosts that the user asked for; a double stands for one that is absent."""
        there = [(host.node_rank, host.reported) for host in self.hosts]
        return max(self.nnodes, _without_doubles(there))

    @property
    def ranks_wanted(self) -> int:
        """Number of ranks that the user asked for, counted in the same way."""
        there = [(rank.rank, rank.reported) for rank in self.ranks]
        return max(self.world_size, _without_doubles(there))

    @cached_property
    def met(self) -> Cluster:
        """The cluster as the coordinator saw it: hosts that did not join count as absent.

        Where nobody joined, it is this same cluster: there is no coordinator's view.
        """
        there = self.present_hosts
        if not any(host.joined for host in there) or all(host.joined for host in there):
            return self
        hosts = {
            host.id: replace(host, reported=host.reported and host.joined) for host in self.hosts
        }
        return replace(
            self,
            hosts=tuple(hosts.values()),
            ranks=tuple(
                replace(rank, host=hosts[rank.host.id], reported=rank.reported and rank.host.joined)
                for rank in self.ranks
            ),
        )

    def once(self, key: Hashable, read: Sequence[str], find: Callable[[], T]) -> T:
        """Result of a rule, by a key of its own: found once, and kept for others that ask for it
        too. It follows from the hosts and ranks, and from the facts of the checks that it `read`.
        """
        if key not in self._found:
            self._found[key] = tuple(read), find()
        found: T = self._found[key][1]
        return found

    def forget(self) -> None:
        """Drop the results of rules, once all is judged."""
        self._found.clear()

    @cached_property
    def _found(self) -> dict[Hashable, tuple[tuple[str, ...], Any]]:
        return {}

    def is_multi_host(self) -> bool:
        """True if the job spans hosts, by what was claimed and by what was seen."""
        return self.nnodes > 1 or len(self.hosts) > 1

    def ranks_on(self, host: Host) -> tuple[Rank, ...]:
        """The participants of one host that signed in."""
        return self._by_host.get(host.id, ())

    def first_on(self, host: Host) -> Rank | None:
        """Participant that represents a host: the lowest local rank, then the lowest seat."""
        return self._first.get(host.id)

    @cached_property
    def _first(self) -> Mapping[int, Rank]:
        return {
            host: min(ranks, key=lambda r: (r.local_rank or 0, r.seat))
            for host, ranks in self._by_host.items()
        }

    @cached_property
    def _by_host(self) -> Mapping[int, tuple[Rank, ...]]:
        grouped: dict[int, list[Rank]] = {}
        for rank in self.present:
            grouped.setdefault(rank.host.id, []).append(rank)
        return {host: tuple(ranks) for host, ranks in grouped.items()}

    def claiming(self, number: int) -> tuple[Rank, ...]:
        """Participants that signed in as this rank; one, where nothing is wrong."""
        return self._by_number.get(number, ())

    @cached_property
    def _by_number(self) -> Mapping[int, tuple[Rank, ...]]:
        grouped: dict[int, list[Rank]] = {}
        for rank in self.present:
            if rank.rank is not None:
                grouped.setdefault(rank.rank, []).append(rank)
        return {number: tuple(ranks) for number, ranks in grouped.items()}

    def observed(self) -> Iterator[tuple[Rank, Facts]]:
        """(observer, facts) in order of rank; those of a host under the rank that speaks for it."""
        return iter(self._observers)

    @cached_property
    def _observers(self) -> tuple[tuple[Rank, Facts], ...]:
        found = []
        for rank in self.present:
            found.append((rank, rank.facts))
            if self.first_on(rank.host) is rank:
                found.append((rank, rank.host.facts))
        return tuple(found)

    @cached_property
    def _observers_on(self) -> Mapping[int, tuple[tuple[Rank, Facts], ...]]:
        grouped: dict[int, list[tuple[Rank, Facts]]] = {}
        for rank, facts in self._observers:
            grouped.setdefault(rank.host.id, []).append((rank, facts))
        return {host: tuple(observers) for host, observers in grouped.items()}

    def evidence(self, check: str, round_name: str | None = None) -> tuple[Evidence, ...]:
        """Every outcome of a check, host-scope and rank-scope alike, in order of rank.

        Host-scope facts come once per host, under the rank that speaks for it.
        """
        return _evidence(self.rounds_of(check), round_name)

    def evidence_on(
        self, check: str, host: Host, round_name: str | None = None
    ) -> tuple[Evidence, ...]:
        """Every outcome of a check on one host, without a search through all hosts."""
        here = self._observers_on.get(host.id, ())
        return _evidence(_with_rounds(here, check), round_name)

    def facts(
        self, check: str, round_name: str = ALONE
    ) -> Iterator[tuple[Rank, Mapping[str, Any]]]:
        """(observer, facts) of every outcome that is `ok`."""
        held = self.held(check).get(round_name)
        return iter(()) if held is None else zip(held.ranks, held.facts, strict=True)

    def facts_on(
        self, check: str, host: Host, round_name: str = ALONE
    ) -> Iterator[tuple[Rank, Mapping[str, Any]]]:
        """(observer, facts) of every outcome on one host that is `ok`, as `evidence_on`."""
        here = self._observers_on.get(host.id, ())
        return _facts_in(_with_rounds(here, check), round_name)

    def rounds_of(self, check: str) -> Iterable[tuple[Rank, Mapping[str, Outcome]]]:
        """(observer, its rounds) of a check."""
        seen = self._outcomes_of(check)
        return zip(seen.ranks, seen.rounds, strict=True)

    def held(self, check: str) -> Mapping[str, Held]:
        """Round → outcomes of a check."""
        return self._outcomes_of(check).held

    def ended(self, check: str, round_name: str = ALONE) -> Iterator[Evidence]:
        """Outcomes of a check that are `hung` or `died`, in order of rank."""
        held = self.held(check).get(round_name)
        for rank, outcome in () if held is None else held.unlike:
            if outcome.status in (OutcomeStatus.HUNG, OutcomeStatus.DIED):
                yield Evidence(rank, round_name, outcome)

    def unfinished(self) -> Iterator[tuple[Rank, str, str, Outcome]]:
        """(observer, check, round, outcome) of every outcome that is neither `ok` nor `skipped`."""
        passed = (OutcomeStatus.OK, OutcomeStatus.SKIPPED)
        for check, seen in self.look_through().items():
            for name, held in seen.held.items():
                for rank, outcome in held.unlike:
                    if outcome.status not in passed:
                        yield rank, check, name, outcome

    def look_through(self) -> Mapping[str, CheckOutcomes]:
        """Check → its outcomes, of all checks: those not known yet are found in one pass over all
        facts, which else each check finds for itself.
        """
        return self._every

    def _outcomes_of(self, check: str) -> CheckOutcomes:
        """Outcomes of a check: found once among all ranks, and then kept."""
        if check not in self._seen and "_every" in vars(self):
            return CheckOutcomes()
        if check not in self._seen:
            here = ((r, {check: facts[check]}) for r, facts in self._observers if check in facts)
            self._seen[check] = index_of(here).get(check) or CheckOutcomes()
        return self._seen[check]

    @cached_property
    def _every(self) -> Mapping[str, CheckOutcomes]:
        self._seen.update(index_of(self._observers, besides=self._seen))
        return self._seen

    @cached_property
    def _seen(self) -> dict[str, CheckOutcomes]:
        return {}


_OF_PLACES = (
    *("present", "absent"),
    *("_first", "_by_host", "_by_number", "_observers", "_observers_on"),
)
"""What follows from the hosts and ranks of a cluster, whatever their facts are."""


def _with_rounds(
    observers: Iterable[tuple[Rank, Facts]], check: str
) -> Iterator[tuple[Rank, Mapping[str, Outcome]]]:
    return ((rank, facts[check]) for rank, facts in observers if check in facts)


def _evidence(
    observed: Iterable[tuple[Rank, Mapping[str, Outcome]]], round_name: str | None
) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(rank, name, outcome)
        for rank, rounds in observed
        for name, outcome in rounds.items()
        if round_name is None or name == round_name
    )


def _facts_in(
    observed: Iterable[tuple[Rank, Mapping[str, Outcome]]], round_name: str
) -> Iterator[tuple[Rank, Mapping[str, Any]]]:
    for rank, rounds in observed:
        outcome = rounds.get(round_name)
        if outcome is not None and outcome.status is OutcomeStatus.OK:
            yield rank, outcome.facts


def _without_doubles(there: Sequence[tuple[int | None, bool]]) -> int:
    """Number of these (number, is here), where one with the number of another one takes the place
    of one that is absent.
    """
    numbers = [number for number, here in there if here and number is not None]
    doubles = len(numbers) - len(set(numbers))
    return len(there) - min(doubles, sum(not here for _, here in there))


# Outcomes of a cluster by check and round, found in one pass: ten thousand ranks have a million.
# Pure data.


class Held:
    """Outcomes of one round of one check; observers in order of rank.

    Attributes:
        ranks: the observers whose outcome is `ok`.
        facts: what each of these saw.
        unlike: (observer, outcome) where it is not `ok`, or says that a part is missing.
        took_s: the longest time of any, in seconds.
    """

    __slots__ = ("facts", "ranks", "took_s", "unlike")

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.facts: list[Mapping[str, Any]] = []
        self.unlike: list[tuple[Rank, Outcome]] = []
        self.took_s = 0.0


class CheckOutcomes:
    """Outcomes of one check: `rounds[i]` are those of `ranks[i]`; `held`: round → the same."""

    __slots__ = ("held", "ranks", "rounds")

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.rounds: list[Mapping[str, Outcome]] = []
        self.held: dict[str, Held] = {}


def index_of(
    observed: Iterable[tuple[Rank, Facts]], besides: Container[str] = ()
) -> dict[str, CheckOutcomes]:
    """Check → its outcomes, of (observer, facts) in order of rank; not of checks in `besides`."""
    good = OutcomeStatus.OK
    index: dict[str, CheckOutcomes] = {}
    for rank, facts in observed:
        for check, rounds in facts.items():
            if check in besides:
                continue
            seen = index.get(check)
            if seen is None:
                seen = index[check] = CheckOutcomes()
            seen.ranks.append(rank)
            seen.rounds.append(rounds)
            for name, outcome in rounds.items():
                held = seen.held.get(name)
                if held is None:
                    held = seen.held[name] = Held()
                if outcome.duration_s > held.took_s:  # noqa: PLR1730 - `max` takes twice as long
                    held.took_s = outcome.duration_s
                if outcome.status is good:
                    held.ranks.append(rank)
                    held.facts.append(outcome.facts)
                    if not outcome.reason:
                        continue
                held.unlike.append((rank, outcome))
    return index
