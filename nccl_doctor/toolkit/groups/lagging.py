"""Members of a hanging group that never entered the collective that the others wait in. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nccl_doctor.model.cluster import Evidence, Outcome, OutcomeStatus

RECORDER = "recorder"
"""Name of the flight recorder's state in `Outcome.witness`."""
_DEFAULT = "default_pg"
_TRIED = (OutcomeStatus.OK, OutcomeStatus.DIED, OutcomeStatus.HUNG, OutcomeStatus.RAISED)


def lagging(members: Sequence[Evidence]) -> list[Evidence]:
    """Stuck members with nothing in flight, while others wait in a collective of their group.

    By torch's flight recorder, which counts what each rank enqueued on each group. A member that is
    itself inside a collective is never named, even if it is far behind: it may wait for data that
    the network lost. Nor is one that may still form the group: it must have finished one collective
    in it, unless the backend (gloo) is formed before the first one. If some member took no part at
    all, the others may wait for that one.
    """
    if any(m.outcome.status not in _TRIED for m in members):
        return []
    stuck = [m for m in members if m.outcome.status is OutcomeStatus.HUNG]
    waiting = [wait for m in stuck for wait in waits_of(m.outcome)]
    return [m for m in stuck if _lags(m.outcome, waiting)]


def waits_of(outcome: Outcome) -> list[tuple[str, int, str]]:
    """(group, sequence number, collective) of the oldest unfinished collective of each group."""
    return [
        (_name(group), pending["sequence"], str(pending.get("collective", "")))
        for group in groups_of(outcome) or ()
        if isinstance(pending := group.get("pending"), Mapping)
        and isinstance(pending.get("sequence"), int)
    ]


def groups_of(outcome: Outcome) -> list[Mapping[str, Any]] | None:
    """Groups in the flight recorder's state; None where it is not known."""
    state = outcome.witness.get(RECORDER)
    groups = state.get("groups") if isinstance(state, Mapping) else None
    return [g for g in groups if isinstance(g, Mapping)] if isinstance(groups, list) else None


def _lags(outcome: Outcome, waiting: Iterable[tuple[str, int, str]]) -> bool:
    groups = groups_of(outcome)
    if groups is None or any(group.get("pending") for group in groups):
        return False
    if not outcome.breadcrumbs or "sequence" not in outcome.breadcrumbs[-1]:
        return False  # by its own breadcrumb it forms a group, and is not in a collective
    counts = {_name(group): group for group in groups}
    for name, sequence, collective in waiting:
        own = counts.get(name, {} if name == _DEFAULT else None)
        if own is None:  # it may be no member of that group
            continue
        formed = collective.startswith("gloo") or _count(own, "completed") >= 1
        if formed and _count(own, "enqueued") < sequence:
            return True
    return False


def _name(group: Mapping[str, Any]) -> str:
    """The name of a group, the same on all members; the default group has two, by version."""
    if _DEFAULT in (group.get("description"), group.get("group")):
        return _DEFAULT
    return str(group.get("group", ""))


def _count(group: Mapping[str, Any], name: str) -> int:
    count = group.get(name)
    return count if isinstance(count, int) else 0
