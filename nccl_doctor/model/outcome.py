"""The outcome of one probe: facts, or how it ended. Pure data."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nccl_doctor.model.limits import MAX_PID


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
