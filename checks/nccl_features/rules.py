"""Repeats of failing groups with one feature of the backend off at a time. Pure.

A group that fails, finishes without a feature and then fails again with it fails because of that
feature. The last attempt is the control: without it, a group that fails only sometimes would be
blamed on the feature that was off when it happened to finish.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nccl_doctor.api import Confidence, Finding, Kind, OutcomeStatus, Round
from nccl_doctor.toolkit.groups.attempts import Attempt, has_entered, is_victim
from nccl_doctor.toolkit.groups.culprits import place_of_all
from nccl_doctor.toolkit.groups.doing import error_of, step_of, what_they_did

CONTROL = "as-before"
"""Name of the round in which all features are on again."""
_WITHOUT = "without-"
_TRIED = (OutcomeStatus.OK, OutcomeStatus.DIED, OutcomeStatus.HUNG, OutcomeStatus.RAISED)
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
"""Signals that end a process because of its own fault."""
_LEAST_S = 5.0
_PATIENCE = 8.0
"""A group may take this many times longer than the slowest good group."""
_CONTROL_PATIENCE = 5.0
_CONTROL_LEAST = 4.0
"""The control must wait at least this many times longer than the good attempt before it counts as
hung."""

Attempts = Mapping[str, Sequence[Attempt]]
Seats = tuple[int, ...]


class Feature(NamedTuple):
    """A feature that the backend can work without.

    Attributes:
        name: of its round, after `without-`.
        off: the variable that turns it off, and its value then.
        what: in words.
        fix: the repair, and the workaround until then.
        least: with fewer ranks in a group it is not used.
        inside: it may be at fault where a group within one host fails.
        across: it may be at fault where only groups across hosts fail.
    """

    name: str
    off: tuple[str, str]
    what: str
    fix: str
    least: int = 1
    inside: bool = True
    across: bool = True

    @property
    def round_name(self) -> str:
        """Name of the round in which the feature is off."""
        return _WITHOUT + self.name

    @property
    def setting(self) -> str:
        """The setting that turns it off, as `NAME=value`."""
        return "=".join(self.off)

    def may_matter(self, group: Attempt) -> bool:
        """True if this feature can be the reason why a group fails."""
        variable, value = self.off
        hosts = {member.rank.host.id for member in group.members}
        is_off = all(member.rank.env.get(variable) == value for member in group.members)
        fits = self.across if len(hosts) > 1 else self.inside
        return fits and not is_off and len(group.members) >= self.least


def failing_groups(attempts: Attempts) -> list[Attempt]:
    """The smallest groups that fail every time, without a visible reason in a member.

    Groups within one host, if there are any; no seat is in two groups.
    """
    tried = [attempt for found in attempts.values() for attempt in found]
    fine = {attempt.seats for attempt in tried if _is_fine(attempt)}
    open_ = [a for a in tried if a.seats not in fine and not a.is_cut_short]
    bad = {a.seats: a for a in open_ if _has_failed(a)}
    inside = [a for a in bad.values() if len({m.rank.host.id for m in a.members}) == 1]
    chosen: list[Attempt] = []
    taken: set[int] = set()
    for attempt in sorted(inside or bad.values(), key=lambda a: (len(a.seats), a.seats)):
        if taken.isdisjoint(attempt.seats):
            taken |= set(attempt.seats)
            chosen.append(attempt)
    return chosen


def rounds_without(
    before: Attempts, here: Attempts, features: Sequence[Feature], limit_s: float
) -> Iterator[Round]:
    """The finished rounds, and the next one, if another is needed: one for each feature that
    may matter, until every failing group was good, and then the control.

    Args:
        before: attempts among which the failing groups are.
        here: those of these rounds so far.
        features: features that can be turned off, the most specific first.
        limit_s: no round takes longer.

    The parameter `env` of a round holds the variables to set.
    """
    good = [_seconds(a) for found in before.values() for a in found if _is_fine(a)]
    deadline_s = min(limit_s, max(_LEAST_S, _PATIENCE * max(good))) if good else limit_s
    cured: dict[Seats, _Cured] = {}
    asked = list(_asked(before, here, features, cured))
    for feature, open_ in asked:
        yield Round(feature.round_name, open_, deadline_s, {"env": dict([feature.off])})
    if cured and all(feature.round_name in here for feature, _ in asked):
        waited = max(_seconds(each.good) for each in cured.values())
        deadline_s = min(limit_s, max(_LEAST_S, _CONTROL_PATIENCE * waited))
        yield Round(CONTROL, tuple(cured), deadline_s, {"env": {}})


def judge_features(
    kind: Kind, before: Attempts, here: Attempts, features: Sequence[Feature], limit_s: float
) -> Iterator[Finding]:
    """Findings on features without which a group is good, and with which it fails again."""
    cured: dict[Seats, _Cured] = {}
    asked = list(_asked(before, here, features, cured))
    for control in here.get(CONTROL, ()):
        found = cured.get(control.seats)
        if found is None or not _fails_again(control, found.good, limit_s):
            continue
        feature = found.feature
        yield Finding(
            kind,
            f"{feature.what}: {_how(control)}; good with {feature.setting}, fails again without it",
            place_of_all(control.members),
            {
                **what_they_did(control),
                "setting": feature.setting,
                "tried": [f.setting for f, groups in asked if control.seats in groups],
            },
            fix=feature.fix,
            confidence=Confidence.LIKELY,
        )


@dataclass(frozen=True)
class _Cured:
    """A feature, and the attempt that was good without it."""

    feature: Feature
    good: Attempt


def _asked(
    before: Attempts,
    here: Attempts,
    features: Sequence[Feature],
    cured: dict[Seats, _Cured],
) -> Iterator[tuple[Feature, tuple[Seats, ...]]]:
    """Each feature with the groups to try without it, up to the first that was not tried yet.

    `cured` is filled on the way.
    """
    groups = failing_groups(before)
    for feature in features:
        open_ = [g.seats for g in groups if g.seats not in cured and feature.may_matter(g)]
        if not open_:
            continue
        yield feature, tuple(open_)
        if feature.round_name not in here:
            return
        for attempt in here[feature.round_name]:
            if attempt.seats in open_ and _is_fine(attempt):
                cured[attempt.seats] = _Cured(feature, attempt)


def _wrong(attempt: Attempt) -> list[Mapping[str, Any]]:
    return [bad for m in attempt.members for bad in m.outcome.facts.get("wrong", ())]


def _is_fine(attempt: Attempt) -> bool:
    return attempt.is_good and not _wrong(attempt)


def _has_failed(attempt: Attempt) -> bool:
    """True if an attempt failed though all members took part and none was stopped or killed."""
    if any(member.outcome.status not in _TRIED for member in attempt.members):
        return False
    killed = any(member.outcome.signal not in _CRASHES for member in attempt.dead)
    missing = any(not has_entered(member.outcome) for member in attempt.stuck)
    is_other = killed or missing or attempt.stopped or attempt.astray
    return not (is_other or _is_fine(attempt))


def _fails_again(control: Attempt, good: Attempt, limit_s: float) -> bool:
    """True if the control failed again; if it only hung, it must have had enough time."""
    if not _has_failed(control):
        return False
    if control.dead or control.has_failed_itself or _wrong(control):
        return True
    return _seconds(control) >= min(0.9 * limit_s, _CONTROL_LEAST * _seconds(good))


def _seconds(attempt: Attempt) -> float:
    return max(member.outcome.duration_s for member in attempt.members)


def _how(attempt: Attempt) -> str:
    if attempt.dead:
        first = attempt.dead[0].outcome
        return f"a rank died by {first.signal} in {step_of(first)}"
    if attempt.raised and (attempt.has_failed_itself or not attempt.stuck):
        own = [m for m in attempt.raised if not is_victim(m.outcome)] or attempt.raised
        return f"{step_of(own[0].outcome)}: {error_of(own[0].outcome)}"
    if attempt.stuck:
        first = attempt.stuck[0].outcome
        return f"no progress in {step_of(first)} within {first.duration_s:.0f} s"
    wrong = _wrong(attempt)[0]
    return f"wrong result of {wrong['step']}, {wrong['example']}"
