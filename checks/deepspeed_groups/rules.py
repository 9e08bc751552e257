"""Findings about a default group that is bound to a device, in a job with several groups. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import Cluster, Confidence, Finding, OutcomeStatus, Rank, Severity, place_of
from nccl_doctor.toolkit.groups.attempts import Attempt, attempts_of
from nccl_doctor.toolkit.groups.binding import (
    TORCH,
    Advice,
    Binding,
    as_observed,
    binding_advice,
    binds,
)
from nccl_doctor.toolkit.groups.kinds import DEVICE_ID_HANG, HANG, INIT_HANG


def judge_binding(
    cluster: Cluster,
    stacks: Mapping[int, Mapping[str, Any]],
    own: Sequence[Attempt],
    wrapped: Sequence[Attempt],
) -> Iterator[Finding]:
    """One finding for all ranks of the same versions, if the job has several groups over NCCL.

    Args:
        cluster: with the job: a side group is a warning, other further groups are information.
        stacks: seat → `deepspeed`, `torch`, `accelerator` and `use_nccl2`, as `binds` takes them.
        own: attempts with a default group that DeepSpeed formed; of each member, as facts or as
            the witness `default_group`, its `bound_device_id`.
        wrapped: the same with one that torch formed without device_id.
    """
    if not cluster.job.has_several_groups or cluster.backend != "nccl":
        return  # only NCCL's groups are split off the default one
    bound, bound_by_torch = (_bound(each, cluster.world_size) for each in (own, wrapped))
    same: dict[tuple[str, str, Binding, Binding], list[Rank]] = {}
    for rank in cluster.present:
        facts = stacks.get(rank.seat)
        if facts is None:
            continue
        deepspeed, torch = facts["deepspeed"], facts["torch"]
        expected = seen = binds(
            deepspeed,
            torch,
            cluster.backend,
            facts["accelerator"],
            cluster.world_size,
            use_nccl2=facts["use_nccl2"],
        )
        if rank.seat in bound:
            seen = as_observed(expected, bound[rank.seat], bound_by_torch.get(rank.seat))
        same.setdefault((deepspeed, torch, expected, seen), []).append(rank)
    kept = _kept(wrapped)
    for (deepspeed, torch, expected, seen), ranks in same.items():
        if seen.binds is not False or expected.binds is not False:
            advice = binding_advice(seen, deepspeed, torch, cluster.world_size, kept=kept)
            yield _finding(cluster, ranks, (deepspeed, torch), (expected, seen), advice)


def blame_binding(
    finding: Finding, own: Sequence[Attempt], control: Sequence[Attempt], default: str
) -> Finding:
    """The finding on a hang of a further group, blamed on the bound default group: beside a default
    group that was not bound, the same groups worked.

    Args:
        finding: of `judge_groups`, about an attempt in `own`.
        own: attempts with the bound default group, as for `judge_binding`.
        control: the same groups beside one that torch formed without device_id.
        default: name of the default group in breadcrumbs.
    """
    hung = [attempt for attempt in own if attempt.is_unexplained]
    if finding.code not in (HANG.code, INIT_HANG.code) or not hung:
        return finding
    stuck = [member.outcome for attempt in hung for member in attempt.stuck]
    # Stuck in a further group, and all of them had found their default group bound.
    further = all(outcome.breadcrumbs[-1].get("group") != default for outcome in stuck)
    said = [outcome.witness.get("default_group") or {} for outcome in stuck]
    bound = all(each.get("bound_device_id") for each in said)
    free = [m.outcome.facts.get("bound_device_id") for a in control for m in a.members]
    if not (further and bound and control and all(a.is_good for a in control)) or any(free):
        return finding
    return finding.replaced(
        kind=DEVICE_ID_HANG,
        message=f"{finding.message}; with a default group that is not bound it finished",
        evidence={**finding.evidence, "default_group": dict(said[0])},
        confidence=Confidence.LIKELY if finding.level is Severity.FAIL else Confidence.POSSIBLE,
    )


def _bound(attempts: Sequence[Attempt], world_size: int) -> dict[int, bool]:
    """Seat → whether its default group was bound, where seen in a world like the job's: DeepSpeed
    treats one rank differently from several.
    """
    seen = {}
    for attempt in attempts:
        for member in attempt.members:
            outcome = member.outcome
            ok = outcome.status is OutcomeStatus.OK
            default = outcome.facts if ok else outcome.witness.get("default_group")
            if default and (len(attempt.members) == 1) is (world_size == 1):
                seen[member.rank.seat] = default.get("bound_device_id") is not None
    return seen


def _kept(wrapped: Sequence[Attempt]) -> bool | None:
    """True if DeepSpeed kept the default group that torch had formed, None where unknown."""
    said = [m.outcome.facts.get("kept") for attempt in wrapped for m in attempt.members]
    seen = [each for each in said if each is not None]
    return all(seen) if seen else None


_DEPENDS = DEVICE_ID_HANG.variant(
    title="Whether a further group hangs depends on how DeepSpeed forms the default group"
)


def _finding(
    cluster: Cluster,
    ranks: Sequence[Rank],
    versions: tuple[str, str],
    bindings: tuple[Binding, Binding],
    advice: Advice,
) -> Finding:
    """The finding; `bindings`: by the versions, and as seen (or the same again)."""
    expected, seen = bindings
    verb = {True: "is", False: "is not", None: "may or may not be"}[seen.binds]
    words = (
        f"with DeepSpeed {versions[0]} and torch {versions[1]} the default group {verb} bound to a "
        f"device ({seen.how})"
    )
    severity = Severity.INFO
    sure = Confidence.POSSIBLE
    if seen.binds and cluster.job.groups == "weight-sync":
        words += "; a side group of one rank with processes of another world then hangs: it waits "
        words += "for the other ranks"
        severity = Severity.WARN
        if cluster.job.deepspeed:
            sure = advice.confidence
        if _formed_one(cluster, seen):
            words += ", but check side_group formed a side group here beside such a default group"
            severity = Severity.INFO
    elif seen.binds:
        words += "; a further group is a split of it and hangs unless every rank calls new_group"
    return Finding(
        DEVICE_ID_HANG if seen.binds else _DEPENDS,
        words,
        place_of(ranks),
        {
            "why": seen.why,
            "since": seen.since,
            "by": list(seen.by),
            "seen": None if seen is expected else seen.binds,
            "by_versions": expected.binds,
            "fix_is_known_from": advice.how,
        },
        fix=f"{advice.text} (known from: {advice.how})",
        severity=severity,
        confidence=sure,
    )


def _formed_one(cluster: Cluster, seen: Binding) -> bool:
    """True if a side group worked here beside a default group that was bound in the same way."""
    variant = "unbound" if TORCH in seen.by else "bound"
    found = attempts_of(cluster, "side_group").get(variant, ())
    said = [m.outcome.facts.get("bound_device_id") for a in found for m in a.members]
    return bool(found) and all(a.is_good for a in found) and any(said)
