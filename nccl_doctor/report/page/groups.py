"""Groups that were tried: a table for each check that forms any, good groups in one line."""

from __future__ import annotations

from collections.abc import Sequence

from nccl_doctor.model.report import Report
from nccl_doctor.report.page.markup import Html, element, fold, table
from nccl_doctor.report.page.outcomes import Seen, outcomes_of, who
from nccl_doctor.report.places import some

_MOST = 200
_HEAD = ("round", "members", "hosts", "result", "took", "groups in it", "how it ended")

Group = Sequence[Seen]


def section(report: Report) -> Html | None:
    """The section of the page; None where no group was tried."""
    parts = []
    for check, rounds in outcomes_of(report).items():
        groups = {name: members for name, seen in rounds.items() if (members := groups_of(seen))}
        if not groups:
            continue
        rows = [row for name, each in groups.items() for row in _rows(name, each)]
        bad = sum(_result(group) == "bad" for each in groups.values() for group in each)
        count = sum(map(len, groups.values()))
        title = f"{check}: {count} group{'' if count == 1 else 's'}, " + (
            f"{bad} bad" if bad else "none bad"
        )
        more = len(rows) - _MOST
        rest = element("p", f"and {more} more lines") if more > 0 else None
        parts.append(fold(title, table(_HEAD, rows[:_MOST]), rest, is_open=bool(bad)))
    return element("section", element("h2", "Groups"), *parts, id="groups") if parts else None


def groups_of(seen: Sequence[Seen]) -> list[list[Seen]]:
    """Groups of one round, in order of their lowest seat."""
    found: dict[int, list[Seen]] = {}
    for each in seen:
        if each.rank is not None and each.group is not None and each.status != "skipped":
            found.setdefault(each.group, []).append(each)
    return [found[seat] for seat in sorted(found)]


def _rows(name: str, groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """Bad groups one by one; others of one result and size together."""
    shown = [_row(name, group) for group in groups if _result(group) == "bad"]
    alike: dict[tuple[str, int], list[Group]] = {}
    for group in groups:
        if (result := _result(group)) != "bad":
            alike.setdefault((result, len(group)), []).append(group)
    for (_, size), same in sorted(alike.items()):
        row = list(_row(name, [each for group in same for each in group]))
        if len(same) > 1:
            row[1] = f"{len(same)} groups of {size}: {row[1]}"
        shown.append(tuple(row))
    return shown


def _row(name: str, group: Group) -> tuple[str, ...]:
    hosts = list(dict.fromkeys(seen.host for seen in group))
    crumbs = (crumb for seen in group for crumb in seen.outcome.breadcrumbs)
    inner = list(dict.fromkeys(str(each["group"]) for each in crumbs if each.get("group")))
    endings: dict[str, list[Seen]] = {}
    for seen in group:
        if not seen.is_good:
            endings.setdefault(seen.in_words(), []).append(seen)
    return (
        name,
        who(list(group)),
        ", ".join(some(hosts)),
        _result(group),
        f"{max(seen.took_s for seen in group):.2f} s",
        ", ".join(some([each for each in inner if each != name])) or "–",
        "; ".join(some([f"{who(seen)}: {words}" for words, seen in endings.items()])) or "–",
    )


def _result(group: Group) -> str:
    if any(seen.is_bad for seen in group):
        return "bad"
    return "good" if all(seen.is_good for seen in group) else "not tested"
