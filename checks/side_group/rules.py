"""Findings on a side group that hangs beside the trainers' default group. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Confidence, Evidence, Finding, OutcomeStatus, Severity, Where
from nccl_doctor.toolkit.groups.attempts import Attempt
from nccl_doctor.toolkit.groups.binding import TORCH, binding_advice, binds
from nccl_doctor.toolkit.groups.culprits import AGAIN, judge_groups
from nccl_doctor.toolkit.groups.kinds import DEVICE_ID_HANG, FAILED, HANG, INIT_FAILED, INIT_HANG

SIDE_UNBOUND, SIDE_BOUND, SIDE_CLEARED = "unbound", "bound", "cleared"
"""Rounds: the trainers' default group formed without device_id; with it; without it, and with any
binding removed while the side group is formed.
"""

_OF_GROUPS = tuple(kind.code for kind in (INIT_FAILED, INIT_HANG, HANG, FAILED))

Attempts = Mapping[str, Sequence[Attempt]]
"""Round → its attempts. Members of an attempt are all trainers in order of rank, then the engine.
"""


def judge_side_groups(attempts: Attempts) -> Iterator[Finding]:
    """Findings on the culprits of each variant, if they can be distinguished from the victims, and
    on whether the binding of the default group to a device causes the hang.
    """
    worst: dict[tuple[str, Where], Finding] = {}
    for variant in (SIDE_UNBOUND, SIDE_BOUND):
        for finding in judge_groups(_parts_of(attempts, variant)):
            found = _with_binding(finding, attempts, variant)
            known = worst.setdefault((found.code, found.where), found)
            if found.level.order < known.level.order:  # else the same in the variant before
                worst[found.code, found.where] = found
    yield from worst.values()


def needs_control(attempts: Attempts) -> bool:
    """True if torch bound the default group by default, and that hangs: then no variant so far is
    unbound.
    """
    return _hangs(attempts, SIDE_UNBOUND) and bool(_self_bound(attempts))


def side_group_names(round_name: str) -> tuple[str, str]:
    """The trainers' default group and the side group, for messages."""
    return f"trainers ({round_name})", f"side ({round_name})"


def _parts_of(attempts: Attempts, variant: str) -> dict[str, list[Attempt]]:
    """A variant's rounds, split by group: a hang in one group makes the other one wait."""
    parts = {variant: [part for first in attempts.get(variant, ()) for part in _parts(first)]}
    for again in attempts.get(variant + AGAIN, ()):
        parts[variant + AGAIN] = [
            replace(again, members=tuple(m for m in again.members if m.rank.seat in part.seats))
            for part in parts[variant]
        ]
    return parts


def _parts(attempt: Attempt) -> list[Attempt]:
    """The two groups of one round; if it hangs, only the one that rank 0 is stuck in.

    Only rank 0 is in both: members stuck in the other group wait for it, or lose it where it is
    killed before them. If a member is to blame, or raised an error of its own, both groups are
    judged together.
    """
    ours, side = side_group_names(attempt.name)
    members = attempt.members
    if len(members) < 2 or not (attempt.is_good or attempt.is_unexplained):
        # The store of the side group is another one, with an address that the error shows.
        return [replace(attempt, name=f"weight-sync ({attempt.name})", roads={})]
    both = {ours: members[:-1], side: (members[0], members[-1])}
    if attempt.stuck:
        at = next(m.outcome for m in members if m.outcome.status is not OutcomeStatus.OK)
        name = str(at.breadcrumbs[-1].get("group", "")) if at.breadcrumbs else ""
        return [Attempt(name, both.get(name, members))]
    return [
        Attempt(name, tuple(_only(member, name) for member in group))
        for name, group in both.items()
    ]


def _only(member: Evidence, group: str) -> Evidence:
    """A member with the wrong results of one group only."""
    facts = member.outcome.facts
    wrong = [bad for bad in facts.get("wrong", ()) if bad["group"] == group]
    return member._replace(outcome=replace(member.outcome, facts={**facts, "wrong": wrong}))


def _hangs(attempts: Attempts, variant: str) -> bool:
    """True if a variant hung without a member to blame."""
    return any(attempt.is_unexplained for attempt in attempts.get(variant, ()))


def _is_good(attempts: Attempts, variant: str) -> bool:
    found = attempts.get(variant, ())
    return bool(found) and all(attempt.is_good for attempt in found)


def _default_groups(attempts: Attempts, variant: str) -> Iterator[Mapping[str, Any]]:
    """The members' descriptions of their default group, from facts or, if stuck, from a witness."""
    for attempt in attempts.get(variant, ()):
        for member in attempt.members:
            outcome = member.outcome
            is_ok = outcome.status is OutcomeStatus.OK
            default = outcome.facts if is_ok else outcome.witness.get("default_group")
            if isinstance(default, Mapping):
                yield default


def _self_bound(attempts: Attempts) -> str:
    """The device that torch bound a default group to although none was passed, or empty."""
    devices = (each.get("bound_device_id") for each in _default_groups(attempts, SIDE_UNBOUND))
    return str(next(filter(None, devices), ""))


def _with_binding(finding: Finding, attempts: Attempts, variant: str) -> Finding:
    """The same finding, with what is known of the default group's binding to a device."""
    itself = _self_bound(attempts) if variant == SIDE_UNBOUND else ""
    if not (itself or variant == SIDE_BOUND) or finding.code not in _OF_GROUPS:
        return finding
    said = next(iter(_default_groups(attempts, variant)), {})
    words = finding.message
    if itself:
        words += (
            f"; no device_id was passed: torch {said.get('torch', '')} itself bound the default "
            f"group to {itself}"
        )
    evidence = {**finding.evidence, "default_group": dict(said)}
    controls = {
        SIDE_UNBOUND: "without device_id it finishes",
        SIDE_CLEARED: "with that binding removed it finishes",
    }
    control = next((name for name in controls if _is_good(attempts, name)), None)
    if control is not None:
        words += f"; {controls[control]}"
    finding = finding.replaced(message=words, evidence=evidence)
    if control is None or finding.code not in (HANG.code, INIT_HANG.code):
        return finding
    apart = control == SIDE_CLEARED or not _self_bound(attempts)
    is_sure = apart and finding.level is Severity.FAIL
    sure = Confidence.LIKELY if is_sure else Confidence.POSSIBLE
    fix = _advice(
        said, itself=bool(_self_bound(attempts)), members=len(attempts[variant][0].members)
    )
    return finding.replaced(kind=DEVICE_ID_HANG, confidence=sure, fix=fix)


def _advice(said: Mapping[str, Any], *, itself: bool, members: int) -> str:
    """The fix for exactly these versions; empty if the job itself must be what binds."""
    deepspeed, torch = said.get("deepspeed"), str(said.get("torch", ""))
    # Whether torch binds by default was observed: versions and variables are not needed.
    binding = binds(deepspeed, torch, "nccl", "cuda", members, use_nccl2=None if itself else "0")
    by = {*binding.by, TORCH} if itself else {*binding.by} - {TORCH}
    binding = replace(binding, binds=bool(by), by=tuple(sorted(by)))
    return binding_advice(binding, deepspeed, torch, members).text if by else ""
