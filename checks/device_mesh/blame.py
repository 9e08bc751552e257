"""Groups of a device mesh that block the others, when all ranks tried at once. Pure.

Ranks use their groups in one order, so one group that never ends blocks others whose members still
wait in it. A group whose members are all in it is stuck by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from nccl_doctor.api import Evidence, OutcomeStatus
from nccl_doctor.toolkit.groups.attempts import Attempt
from nccl_doctor.toolkit.groups.culprits import AGAIN
from nccl_doctor.toolkit.mesh import Mesh, MeshGroup, mesh_groups, mesh_size

_ENTERED = (OutcomeStatus.HUNG, OutcomeStatus.DIED, OutcomeStatus.RAISED)


def narrow_to_mesh(
    attempts: Mapping[str, Sequence[Attempt]], mesh: Mesh
) -> dict[str, list[Attempt]]:
    """Attempts of all ranks of a mesh, narrowed to the groups that block the others.

    An attempt that failed before the groups existed, or at an unknown place, is kept as it is; a
    good one is removed. Several groups of one dimension that hang or fail in the same way become
    one.

    Args:
        attempts: round → its groups, as `attempts_of` gives them. The last breadcrumb of a member
            names its group as `MeshGroup.name` does, and so does each wrong result.
        mesh: the dimensions, outermost first.

    Returns: round → groups, for `judge_groups`; a round that was tried again has the same groups.
    """
    out = {
        name: [part for attempt in found for part in _parts(attempt, mesh)]
        for name, found in attempts.items()
        if not name.endswith(AGAIN)
    }
    for name, found in attempts.items():
        if name.endswith(AGAIN):
            out[name] = [
                replace(again, name=part.name, members=_those(again, part.seats))
                for again in found
                for part in out.get(name.removesuffix(AGAIN), ())
                if set(part.seats) <= set(again.seats)
            ]
    return out


def _parts(attempt: Attempt, mesh: Mesh) -> list[Attempt]:
    if len(attempt.members) < mesh_size(mesh):
        return [attempt]
    groups = mesh_groups(mesh)
    known = {group.name: group for of_one in groups.values() for group in of_one}
    every = {item.rank.rank: item for item in attempt.members}
    if list(every) != list(range(len(attempt.members))):
        return [attempt]
    unfinished = {
        rank: item
        for rank, item in every.items()
        if item.outcome.status is not OutcomeStatus.OK and rank is not None
    }
    at = {rank: known.get(_last_group(item)) for rank, item in unfinished.items()}
    if None in at.values() or any(
        item.outcome.status not in _ENTERED for item in unfinished.values()
    ):
        return [attempt]
    gone = {item.rank.rank for item in (*attempt.dead, *attempt.stopped)}
    marked = {group.name for rank, group in at.items() if group is not None and rank in gone}
    marked |= {bad for item in every.values() for bad in _wrong_in(item)} & set(known)
    alone = {
        group.name
        for group in at.values()
        if group is not None and all(at.get(rank, group) == group for rank in group.ranks)
    }
    if unfinished and not (marked or alone):
        return [attempt]
    members = list(every.values())
    return [
        _part(attempt, name, [members[rank] for rank in ranks])
        for of_one in groups.values()
        for name, ranks in _united(of_one, marked, alone)
    ]


def _united(
    groups: Sequence[MeshGroup], marked: set[str], alone: set[str]
) -> Iterator[tuple[str, Sequence[int]]]:
    """(name, ranks) of the groups of one dimension to judge: each group with a culprit by itself,
    the others together.
    """
    alike = [group for group in groups if group.name in alone - marked]
    yield from ((group.name, group.ranks) for group in groups if group.name in marked)
    if len(alike) == 1:
        yield alike[0].name, alike[0].ranks
    elif alike:
        name = f"{alike[0].dimension} ({len(alike)} of its {len(groups)} groups)"
        yield name, sorted(rank for group in alike for rank in group.ranks)


def _part(attempt: Attempt, name: str, members: Sequence[Evidence]) -> Attempt:
    """A part of an attempt, without wrong results of other groups."""
    own = []
    for item in members:
        wrong = [bad for bad in item.outcome.facts.get("wrong", ()) if bad["group"] == name]
        facts = {**item.outcome.facts, "wrong": wrong}
        own.append(item._replace(outcome=replace(item.outcome, facts=facts)))
    return replace(attempt, name=name, members=tuple(own))


def _those(attempt: Attempt, seats: Sequence[int]) -> tuple[Evidence, ...]:
    wanted = set(seats)
    return tuple(item for item in attempt.members if item.rank.seat in wanted)


def _last_group(item: Evidence) -> str:
    crumbs = item.outcome.breadcrumbs
    return str(crumbs[-1].get("group", "")) if crumbs else ""


def _wrong_in(item: Evidence) -> list[str]:
    return [bad["group"] for bad in item.outcome.facts.get("wrong", ())]
