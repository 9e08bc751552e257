"""The vocabulary of the whole program: what is observed, what is found, and where.

Pure data. Nothing here reads a clock, a file or the environment, so a judgement made from these
types can be made again on a laptop from a saved report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal


class Layer(str, Enum):
    """Where in the stack something lives, lowest first. A broken layer explains those above it."""

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

    @property
    def order(self) -> int:
        """Position in the stack, 0 for the lowest layer."""
        return list(Layer).index(self)


class Scope(str, Enum):
    """Who observes: one participant per host, or every rank."""

    HOST = "host"
    RANK = "rank"


class Severity(str, Enum):
    """Calibrated against the job: fail = it would not start, would hang or compute wrongly;
    warn = it would run, but slower or at risk; info = worth knowing.
    """

    FAIL = "fail"
    WARN = "warn"
    INFO = "info"

    @property
    def order(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


class Confidence(str, Enum):
    """How sure the doctor is of the cause and the place."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"


class Status(str, Enum):
    """What became of one check. Only `pass` says that something was measured and was good."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    BLOCKED = "blocked"
    SKIPPED = "skipped"


class Level(str, Enum):
    """How much a run does: quick has no collective; full sweeps."""

    QUICK = "quick"
    STANDARD = "standard"
    FULL = "full"

    @property
    def order(self) -> int:
        """0 for the shortest run."""
        return list(Level).index(self)


@dataclass(frozen=True)
class Kind:
    """A kind of finding: a stable code and the words that do not depend on the run.

    `fix` is what to type when the finding itself gives nothing more exact. A kind that `delays` may
    cost a job so much time that a deadline is missed, though nothing is broken; one that is found
    `by_deadline` says no more than that something took too long. A kind `between` hosts is a
    difference: it may break any of them, not only the odd one. What comes `later` can only break
    the job itself: it is the cause of nothing that was seen in the examination, and has no cause
    there. One that `drains` says that the host itself is broken, for every job: a scheduler may
    take it out of service, where the finding is certain and a failure.
    """

    code: str
    layer: Layer
    title: str
    why: str
    fix: str
    severity: Severity = Severity.FAIL
    delays: bool = False
    by_deadline: bool = False
    between: bool = False
    later: bool = False
    drains: bool = False


@dataclass(frozen=True)
class Where:
    """The place of a finding.

    `hosts` and `ranks` are the ones to be blamed. A link is an ordered pair of host names:
    `(a, b)` means that a cannot reach b. `nodes` are node ranks, for hosts nobody knows by name.
    """

    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()

    def __or__(self, other: Where) -> Where:
        """Union, sorted, so that folding does not depend on order."""
        return Where(
            hosts=tuple(sorted({*self.hosts, *other.hosts})),
            ranks=tuple(sorted({*self.ranks, *other.ranks})),
            links=tuple(sorted({*self.links, *other.links})),
            devices=tuple(sorted({*self.devices, *other.devices})),
            interfaces=tuple(sorted({*self.interfaces, *other.interfaces})),
            nodes=tuple(sorted({*self.nodes, *other.nodes})),
        )

    def __bool__(self) -> bool:
        return any((self.hosts, self.ranks, self.links, self.devices, self.interfaces, self.nodes))

    def to_json(self) -> dict[str, Any]:
        """As in the report: lists, every key present."""
        return {
            "hosts": list(self.hosts),
            "ranks": list(self.ranks),
            "links": [list(link) for link in self.links],
            "devices": list(self.devices),
            "interfaces": list(self.interfaces),
            "nodes": list(self.nodes),
        }


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong (or worth knowing), with the observed values and the place.

    `message` holds values, not places: places are in `where` and are rendered from there, so that
    the same fault on many ranks folds into one finding. A judge leaves `explained_by` empty unless
    it knows, better than the layers do, that another finding of its own is the cause. `shuts_out`
    says of a fault on rank 0's host that no other host can come in while it lasts: then nobody
    who never came needs another reason.
    """

    kind: Kind
    message: str
    where: Where = Where()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str = ""
    severity: Severity | None = None
    confidence: Confidence = Confidence.CERTAIN
    explained_by: str | None = None
    check: str = ""
    shuts_out: bool = False

    @property
    def code(self) -> str:
        """The stable name of the fault."""
        return self.kind.code

    @property
    def level(self) -> Severity:
        """Severity of this finding: its own, or else its kind's."""
        return self.severity or self.kind.severity

    def replaced(self, **changes: Any) -> Finding:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """As in the report."""
        return {
            "code": self.code,
            "check": self.check,
            "layer": self.kind.layer.value,
            "severity": self.level.value,
            "title": self.kind.title,
            "message": self.message,
            "fix": self.fix or self.kind.fix,
            "where": self.where.to_json(),
            "evidence": dict(self.evidence),
            "explained_by": self.explained_by,
            "confidence": self.confidence.value,
        }


@dataclass(frozen=True)
class Figure:
    """What a check knows of a cluster that is worth comparing with other runs.

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


@dataclass(frozen=True)
class Round:
    """One thing done together: who takes part, with what parameters, by when.

    `groups` are tuples of seats, in group-rank order; a seat stands in at most one of them.
    All groups of a round run at the same time, each in probe children of its own. Where
    `may_shrink`, a group goes on without the members that fell silent before; else it is not held.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    deadline_s: float
    params: Mapping[str, Any] = field(default_factory=dict)
    may_shrink: bool = False


@dataclass(frozen=True)
class CheckResult:
    """What became of one check over the whole cluster."""

    name: str
    layer: Layer
    scope: Scope
    status: Status
    reason: str = ""
    duration_s: float = 0.0
    tested: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As in the report; `hosts_or_ranks_tested` holds host names or rank numbers as text."""
        return {
            "name": self.name,
            "layer": self.layer.value,
            "scope": self.scope.value,
            "status": self.status.value,
            "reason": self.reason,
            "duration_s": round(self.duration_s, 4),
            "hosts_or_ranks_tested": list(self.tested),
        }


def number_range(numbers: Sequence[int]) -> str:
    """Numbers as people write them: `[0, 1, 2, 5]` becomes `0–2, 5`."""
    ordered = sorted(set(numbers))
    parts: list[str] = []
    start = 0
    for i, number in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != number + 1:
            first = ordered[start]
            parts.append(str(first) if first == number else f"{first}–{number}")
            start = i + 1
    return ", ".join(parts)
