"""Vocabulary of the whole program: observations, findings, and places.

Pure data. Nothing here reads a clock, a file or the environment, so a judgement made from these
types can be made again on a laptop from a saved report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, Literal

from nccl_doctor.model.codec import MAX_SEATS, Called, Part, Seconds, at_most, encode

_FEW = 4
"""Places that stand in one line."""


class Layer(str, Enum):
    """Layer of the stack, lowest first. A fault in one layer explains findings in the layers above
    it.
    """

    LAUNCH = "launch"
    HOST = "host"
    ENV = "env"
    NAME = "name"
    ROUTE = "route"
    PORT = "port"
    STORE = "store"
    RANKS = "ranks"
    DEVICE = "device"
    GROUP = "group"
    COLLECTIVE = "collective"
    SPEED = "speed"

    @cached_property
    def order(self) -> int:
        """Position in the stack, 0 for the lowest layer."""
        return list(Layer).index(self)


class Scope(str, Enum):
    """Observers of a check: one participant per host, or every rank."""

    HOST = "host"
    RANK = "rank"


class Turn(str, Enum):
    """Turn of a check among those of its layer: the last look back at what the others did."""

    FIRST = "first"
    ANY = "any"
    LAST = "last"

    @cached_property
    def order(self) -> int:
        """Position, 0 for the first."""
        return list(Turn).index(self)


class Severity(str, Enum):
    """Effect on the job: fail = it would not start, would hang or would compute wrongly;
    warn = it would run, but slower or at risk; info = worth knowing.
    """

    FAIL = "fail"
    WARN = "warn"
    INFO = "info"

    @cached_property
    def order(self) -> int:
        """Position, 0 for the worst."""
        return list(Severity).index(self)


class Confidence(str, Enum):
    """Confidence in the cause and the place of a finding."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"


class Status(str, Enum):
    """Status of one check. Only `pass` means that something was measured and is good."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    BLOCKED = "blocked"
    SKIPPED = "skipped"


class Level(str, Enum):
    """Extent of a run: quick has no collectives; full has the larger tests."""

    QUICK = "quick"
    STANDARD = "standard"
    FULL = "full"

    @cached_property
    def order(self) -> int:
        """Position, 0 for the shortest run."""
        return list(Level).index(self)


class Effect(Enum):
    """Meaning of a kind of finding, or of one finding, for others, beside its layer and place."""

    DELAYS = "delays"
    """May cost a job so much time that a deadline is missed, though nothing is broken."""
    TIMED_OUT = "timed out"
    """Only means that something took too long, or was lost: what delays a job explains it."""
    DIFFERENCE = "difference"
    """A difference between hosts: it may break any of them, not only the odd one."""
    JOB_ONLY = "job only"
    """Can only break the job itself: it explains no finding of the examination, and none explains
    it."""
    DRAINS = "drains"
    """The host itself is broken, for every job: a scheduler may take it out of service if the
    finding is certain and a failure."""
    STAYS_IN_SERVICE = "stays in service"
    """Exception of one finding from `DRAINS`: the fact is certain, and a setting or a program on
    the host can have made it."""
    CUTS_OFF = "cuts off"
    """Takes the whole network from a host or a link."""
    LOSS = "not heard"
    """Only means that a participant was not heard, or not any longer."""
    ONE_PROCESS = "one process"
    """Was done to one process, if it is certain, and not by what other hosts have."""
    SHUTS_OUT = "shuts out"
    """A fault on the host of rank 0 that stops all other hosts from signing in: it explains every
    absent host."""
    SHOWN = "shown"
    """Shown in full with the verdict, where it is information too."""


@dataclass(frozen=True)
class Kind:
    """A kind of finding: a stable code and the words that do not depend on the run.

    `fix` is what to type if the finding itself has no more exact fix. `effects`: what each finding
    of this kind means for others.
    """

    code: str
    layer: Layer
    title: str
    why: str
    fix: str
    severity: Severity = Severity.FAIL
    effects: tuple[Effect, ...] = ()

    def variant(self, *, title: str = "", why: str = "", fix: str = "") -> Kind:
        """The same kind in other words, for a case that its own do not fit.

        The code, and what it means for other findings, stay as they are; so does what is empty.
        """
        return replace(self, title=title or self.title, why=why or self.why, fix=fix or self.fix)


@dataclass(frozen=True)
class Where:
    """The place of a finding.

    `hosts` and `ranks` are those of the cause. A link is an ordered pair of host names: `(a, b)`
    means that a cannot reach b. `nodes` are node ranks, for hosts whose name is not known.
    """

    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()

    def __or__(self, other: Where) -> Where:
        """Union, sorted, so that folding does not depend on order."""
        return Where.union((self, other))

    @staticmethod
    def union(places: Iterable[Where]) -> Where:
        """Union of many places: sorted once, and not once for each of them."""
        every = list(places)
        return Where(
            hosts=_sorted_union([place.hosts for place in every]),
            ranks=_sorted_union([place.ranks for place in every]),
            links=_sorted_union([place.links for place in every]),
            devices=_sorted_union([place.devices for place in every]),
            interfaces=_sorted_union([place.interfaces for place in every]),
            nodes=_sorted_union([place.nodes for place in every]),
        )

    def __bool__(self) -> bool:
        named = self.hosts or self.ranks or self.links or self.devices or self.interfaces
        return bool(named or self.nodes)


def _sorted_union(parts: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    there = [part for part in parts if part]
    if not there or (len(there) == 1 and len(there[0]) == 1):  # nearly always so
        return there[0] if there else ()
    return tuple(sorted({each for part in there for each in part}))


@dataclass(frozen=True)
class Finding:
    """One fault (or one fact worth knowing), with the observed values and the place.

    `message` holds values, not places: places are in `where` and are rendered from there, so that
    the same fault on many ranks folds into one finding. `cause` is the fault in one sentence, with
    its names, where the facts show it: the first line of a report says it in place of the title,
    which then says what follows from it. `fix` is text, or a `Fix`, which knows what
    to type on which hosts. Set `explained_by` in `judge` only if another finding of the same check
    is the cause and the layers cannot show that; `explained_why` is the reason. `effects` are those
    of this finding, besides those of its kind. `excused_by` is the code of a note on what the
    program had to choose itself: what is wrong with that choice is no failure.
    """

    kind: Kind
    message: str
    where: Where = Where()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str = ""
    severity: Severity | None = None
    confidence: Confidence = Confidence.CERTAIN
    explained_by: str | None = None
    explained_why: str = ""
    check: str = ""
    effects: tuple[Effect, ...] = ()
    excused_by: str = ""
    cause: str = ""

    @property
    def code(self) -> str:
        """The stable name of the fault."""
        return self.kind.code

    @property
    def headline(self) -> str:
        """The fault in one line: the cause by the facts, or else the title with its place."""
        if self.cause:
            return self.cause
        where = self.where
        links = [] if where.hosts else [f"{start} → {end}" for start, end in where.links]
        nodes = [] if where.hosts or not where.nodes else [numbered("node", where.nodes, _FEW)]
        named = [*where.hosts, *links, *nodes]
        place = ", ".join(named) if len(named) <= _FEW else f"{len(named)} places"
        return f"{self.kind.title} ({place})" if place else self.kind.title

    @property
    def level(self) -> Severity:
        """Severity of this finding: its own, or else its kind's."""
        return self.severity or self.kind.severity

    def has(self, effect: Effect) -> bool:
        """True if it, or its kind, has this effect."""
        return effect in self.effects or effect in self.kind.effects

    @property
    def drains(self) -> bool:
        """True if the host itself is broken, for every job."""
        return self.has(Effect.DRAINS) and Effect.STAYS_IN_SERVICE not in self.effects

    def replaced(self, **changes: Any) -> Finding:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Data for the report."""
        return {
            "code": self.code,
            "check": self.check,
            "layer": self.kind.layer.value,
            "severity": self.level.value,
            "title": self.kind.title,
            **({"cause": self.cause} if self.cause else {}),
            "message": self.message,
            "fix": str(self.fix or self.kind.fix),
            "where": encode(self.where),
            "evidence": dict(self.evidence),
            "explained_by": self.explained_by,
            **({"explained_why": self.explained_why} if self.explained_why else {}),
            "confidence": self.confidence.value,
        }


@dataclass(frozen=True)
class Figure:
    """Value of a cluster to compare with other runs.

    A number that has a direction (`better`) is measured: earlier runs say how far it may wander.
    Everything else is a word (a version, a name), which is the same or is not.

    Attributes:
        name: what it is, equal in every run: `bandwidth`, `torch`.
        value: a number in `unit`, or text; None for what is not there.
        where: its place, in names that outlive the run: hosts, links, devices. Ranks are handed
            out anew, so they tell figures apart only where nothing else is named.
        unit: for people.
        better: which way it improves; empty for a word.
        least: a smaller difference than this, in `unit`, is not worth a word.
        counts: False for a number that was measured while the machine was busy otherwise.
    """

    name: str
    value: float | str | None
    where: Where = Where()
    unit: str = ""
    better: Literal["higher", "lower", ""] = ""
    least: float = 0.0
    counts: bool = True


def _seats(group: tuple[int, ...]) -> tuple[int, ...]:
    if group and not (min(group) >= 0 and max(group) < MAX_SEATS):
        raise ValueError(" has what is not the number of a seat")
    return group


@dataclass(frozen=True)
class Round:
    """One thing done together: the groups, the parameters, the deadline.

    `groups` are tuples of seats, in group-rank order; a seat stands in at most one of them.
    All groups of a round run at the same time, each in probe children of its own. Where
    `may_shrink`, a group goes on without the members that stopped responding; else it is not held.
    `pairs` are the seats that have to do with each other, if not all of a group have: a link that
    none of them needs does not block the group. `by_seat` are the names of parameters that are
    tables, by the seat as text: of these a participant of a large cluster may be sent its own
    entry only.
    """

    name: Annotated[str, at_most(1024), Called("round")]
    groups: tuple[Annotated[tuple[int, ...], _seats], ...]
    deadline_s: Seconds
    params: Mapping[str, Any] = field(default_factory=dict)
    may_shrink: Annotated[bool, Part.SPARSE] = False
    pairs: Annotated[Iterable[tuple[int, int]] | None, Part.SPARSE] = None
    by_seat: Annotated[tuple[str, ...], Part.SPARSE] = ()


@dataclass(frozen=True)
class CheckResult:
    """Result of one check on the cluster; `tested` are host names, or rank numbers as text."""

    name: str
    layer: Layer
    scope: Scope
    status: Status
    reason: str = ""
    duration_s: float = 0.0
    tested: Annotated[tuple[str, ...], Called("hosts_or_ranks_tested")] = ()


def number_range(numbers: Sequence[int], most: int | None = None) -> str:
    """Numbers as people write them: `[0, 1, 2, 5]` becomes `0–2, 5`.

    `most`: parts that are written out; of the other numbers it is said how many there are.
    """
    ordered = sorted(set(numbers))
    parts: list[str] = []
    start = 0
    for i, number in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != number + 1:
            if len(parts) == most:
                return f"{', '.join(parts)} and {len(ordered) - start} more"
            first = ordered[start]
            parts.append(str(first) if first == number else f"{first}–{number}")
            start = i + 1
    return ", ".join(parts)


def headlines(findings: Iterable[Finding]) -> list[str]:
    """The headline of each, in order; one for all that have the same title and no cause."""
    alike: dict[str, list[Finding]] = {}
    for finding in findings:
        alike.setdefault(finding.cause or finding.kind.title, []).append(finding)
    return [
        same[0].replaced(where=Where.union(each.where for each in same)).headline
        for same in alike.values()
    ]


def numbered(thing: str, numbers: Sequence[int], most: int | None = None) -> str:
    """Things with their numbers: `node 1`, `ranks 2–5`; `most` as for `number_range`."""
    return f"{thing}{'s' if len(set(numbers)) > 1 else ''} {number_range(numbers, most)}"
