"""Members whose torch made other groups than requested. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.model.cluster import Evidence, Outcome, Trail
from nccl_doctor.toolkit.blame import odd_ones_out

MADE = "new_group made"
"""The breadcrumb with the group that torch made in a call of new_group."""
MAKING = "making"
"""The witness of a rank that is still in that call: the group that torch is making."""
NO_GROUP = "none"


def astray(members: Sequence[Evidence], *, finished: bool) -> dict[int, tuple[str, bool]]:
    """Members that did not make the requested groups.

    A rank that made another group than requested contradicts itself. Else torch's own number of
    groups shows the rank: names of groups contain it, so a rank with another count than most looks
    for its peers under another name. If no number has a majority, or if all members `finished`
    anyway, no rank is named by it.

    Returns: seat → what it did in words, and whether it needs no comparison to be seen.
    """
    own: dict[int, tuple[str, bool]] = {}
    right: set[int] = set()  # steps by their identity: thousands of ranks share them
    for member in members:
        steps = id(_steps(member.outcome))
        if steps in right and not member.outcome.witness:
            continue
        wrong = [seen for seen in _records(member.outcome) if _is_other(seen)]
        for seen in wrong[:1]:
            words = (
                f"new_group of group {seen['group']} made a group of ranks {seen['ranks']}, "
                f"not {seen['expected']}"
            )
            own[member.rank.seat] = (words, True)
        if not wrong:
            right.add(steps)
    return own if own or finished else _miscounted(members)


def what_was_made(members: Sequence[Evidence]) -> dict[str, Any]:
    """Rank → the last group that torch made or was making on it, as evidence."""
    made = {}
    for member in members:
        for seen in _records(member.outcome):
            made[str(member.rank.rank or 0)] = {k: v for k, v in seen.items() if k != "at_s"}
    return made


def _miscounted(members: Sequence[Evidence]) -> dict[int, tuple[str, bool]]:
    counts: dict[str, dict[int, int]] = {}
    for member in members:
        for seen in _records(member.outcome):
            if isinstance(seen.get("count"), int):
                counts.setdefault(seen["group"], {})[member.rank.seat] = seen["count"]
    for group, by_seat in counts.items():
        odd = odd_ones_out(by_seat)
        if odd is None:
            continue
        if odd.tie or 2 * len(odd.places) >= len(by_seat):
            return {}  # later counts do not show which rank was first
        words = "torch counts {} groups after new_group of group {}, and {} on most ranks"
        return {seat: (words.format(by_seat[seat], group, odd.usual), False) for seat in odd.places}
    return {}


def _is_other(made: Mapping[str, Any]) -> bool:
    """True if a group has other ranks than those that were requested."""
    return bool(made.get("ranks", made["expected"]) != made["expected"])


def _steps(outcome: Outcome) -> Sequence[Mapping[str, Any]]:
    crumbs = outcome.breadcrumbs
    return crumbs.steps if isinstance(crumbs, Trail) else crumbs


def _records(outcome: Outcome) -> Iterator[Mapping[str, Any]]:
    if any(step.get("step") == MADE for step in _steps(outcome)):
        yield from (crumb for crumb in outcome.breadcrumbs if crumb.get("step") == MADE)
    making = outcome.witness.get(MAKING)
    if isinstance(making, Mapping):
        yield making
