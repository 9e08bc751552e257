"""Timeline of all ranks: their phases, and which ranks waited for which.

Every rank has a clock of its own, which starts with its own part of a round. So nothing is said of
who was earlier by the clock; who waited is told by how long each was inside the same step: the one
that came last is inside for the shortest time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nccl_doctor.model.cluster import MAX_BREADCRUMBS
from nccl_doctor.model.report import Report
from nccl_doctor.report.html.facts import Crumb, ParticipantEnd, number, outcomes_of, who
from nccl_doctor.report.html.markup import Html, element, fold, together

_MOST_ROWS, _MOST_ROWS_OF_MANY = 64, 16
_MANY = 1024
"""Participants of a round; with more, fewer of them are drawn, and nobody who waited for another
well one is named.
"""
_MOST_LANES = 60
_ROWS_OF_ALL = 1500
_WAITED_S = 0.1
_SCALE = 1000
_THINNEST = 2
_ENTRY = "init_process_group"
_FORMING = ("connect to the store", _ENTRY, "new_group", "new_group made")
_MUTUAL = ("all_reduce", "barrier", _ENTRY)
"""Steps that nobody leaves before everybody came; the root of a broadcast may."""

Key = tuple[str, str, int]
"""The n-th time that a rank is at a step of a group."""


@dataclass(frozen=True)
class RowPart:
    """A part of a row, in seconds; `kind` is `form`, `talk`, `work`, `stuck` or `wait`."""

    name: str
    begin_s: float
    end_s: float
    kind: str


@dataclass(frozen=True)
class ParticipantRow:
    """One participant."""

    label: str
    phases: tuple[RowPart, ...]
    ending: str
    is_bad: bool = False


@dataclass(frozen=True)
class Lane:
    """Participants of one thing that was done, on one scale of seconds.

    `rows` are the worst of `count` participants, of whom `bad` failed; `span_s` are the seconds
    from the left to the right.
    """

    title: str
    rows: tuple[ParticipantRow, ...]
    remarks: tuple[str, ...]
    count: int
    bad: int
    span_s: float


def section(report: Report) -> Html | None:
    """Section of the page; None if no check observed together."""
    lanes = lanes_of(report)
    if not lanes:
        return None
    legend = element(
        "p",
        *(
            together(element("span", class_=f"swatch p-{kind}"), f" {words} ")
            for kind, words in (
                ("form", "forming a group"),
                ("talk", "in a collective"),
                ("work", "other work"),
                ("wait", "waiting for the others to sign in"),
                ("stuck", "the step that failed"),
            )
        ),
        class_="legend",
    )
    clock = element(
        "p",
        "Seconds since each participant began its part, by its own clock. Participants do not "
        "begin at the same moment.",
        class_="aside",
    )
    left = _ROWS_OF_ALL
    parts = []
    for lane in lanes[:_MOST_LANES]:
        rows = _worst_rows(lane.rows, max(left, 4))
        left -= len(rows)
        parts.append(_draw(lane, rows))
    if len(lanes) > _MOST_LANES:
        parts.append(element("p", f"and {len(lanes) - _MOST_LANES} more rounds"))
    if any(lane.remarks or lane.bad for lane in lanes):
        title = element("h2", "Who waited for whom")
        return element("section", title, clock, legend, *parts, id="timeline")
    title = element("h2", "Times of all ranks")
    return element("section", fold(title, clock, legend, *parts), id="timeline")


def lanes_of(report: Report) -> list[Lane]:
    """Lane of the sign-in, then one for each round that was held together, failed ones first."""
    rounds = [
        _round(check, name, seen)
        for check, rounds in outcomes_of(report).items()
        for name, seen in rounds.items()
        if any(each.group is not None and each.outcome.breadcrumbs for each in seen)
    ]
    return [*_roll_call(report), *sorted(rounds, key=lambda lane: not lane.bad)]


def _roll_call(report: Report) -> Iterator[Lane]:
    every = report.cluster.ranks
    ranks = [rank for rank in every if rank.reported]
    if len(every) < 2:
        return
    last = max((number(rank.signed_in_s) for rank in ranks), default=0.0)
    rows, slowest, gone_ranks = [], [], []
    for rank in every:
        label = f"rank {rank.rank}" + (f" on {rank.host.name}" if rank.host.name else "")
        at = number(rank.signed_in_s)
        if not rank.reported:
            patience = max(last, number(report.cluster.join_timeout_s))
            gone = RowPart("never signed in", 0.0, patience, "stuck")
            rows.append(ParticipantRow(label, (gone,), "never signed in", True))
            gone_ranks.append(label)
            continue
        if at >= last:
            slowest.append(label)
        phases = (
            RowPart("until it signed in", 0.0, at, "work"),
            RowPart("waiting", at, last, "wait"),
        )
        rows.append(ParticipantRow(label, phases, f"signed in after {at:.2f} s"))
    remarks = []
    first = min((number(rank.signed_in_s) for rank in ranks), default=0.0)
    if last - first >= _WAITED_S:
        named = ", ".join(slowest[:3])
        remarks.append(f"The others waited up to {last - first:.1f} s for {named} to sign in.")
    if gone_ranks:
        more = f" and {len(gone_ranks) - 6} more" if len(gone_ranks) > 6 else ""
        remarks.append(f"Never signed in: {', '.join(gone_ranks[:6])}{more}.")
    ends = [row.phases[-1].end_s for row in rows]
    worst = [rows[at] for at in _worst([row.is_bad for row in rows], ends)]
    yield Lane("Signing in", tuple(worst), tuple(remarks), len(rows), len(gone_ranks), max(ends))


def _round(check: str, name: str, seen: Sequence[ParticipantEnd]) -> Lane:
    ends = [max(each.took_s, each.last_step_s) for each in seen]
    rows = tuple(
        ParticipantRow(
            each.label, _phases(each), f"{each.in_words()}, {each.took_s:.2f} s", each.is_bad
        )
        for at in _worst([each.is_bad for each in seen], ends)
        for each in [seen[at]]
    )
    groups: dict[int | None, list[ParticipantEnd]] = {}
    for each in seen:
        groups.setdefault(each.group, []).append(each)
    remarks = [words for members in groups.values() for words in waited(members)]
    bad = sum(each.is_bad for each in seen)
    return Lane(f"{check}: {name}", rows, tuple(dict.fromkeys(remarks)), len(seen), bad, max(ends))


def _worst(bad: Sequence[bool], ends_s: Sequence[float], most: int = _MOST_ROWS) -> list[int]:
    """Places of those that are drawn, in order: all of a few; of many those that went wrong, then
    those that took the longest.
    """
    most = min(most, _MOST_ROWS if len(bad) <= _MANY else _MOST_ROWS_OF_MANY)
    worst = sorted(range(len(bad)), key=lambda at: (not bad[at], -ends_s[at]))
    return sorted(worst[:most])


def _phases(seen: ParticipantEnd) -> tuple[RowPart, ...]:
    steps = seen.steps
    if not steps:
        return (RowPart(seen.in_words(), 0.0, seen.took_s, "stuck" if seen.is_bad else "work"),)
    phases = [RowPart("starting", 0.0, steps[0].at_s, "work")] if steps[0].at_s else []
    for i, step in enumerate(steps):
        is_last = i + 1 == len(steps)
        end = seen.took_s if is_last else steps[i + 1].at_s
        kind = "form" if step.name in _FORMING else "talk" if _is_joint(step) else "work"
        of_group = f" ({step.group})" if step.group else ""
        phases.append(
            RowPart(
                f"{step.name}{of_group}",
                step.at_s,
                max(step.at_s, end),
                "stuck" if is_last and seen.is_bad else kind,
            )
        )
    return tuple(phases)


def _is_joint(step: Crumb) -> bool:
    return step.is_collective or "all_reduce" in step.name


def waited(members: Sequence[ParticipantEnd]) -> Iterator[str]:
    """Sentences about which ranks of one group waited for which; none if that is not known."""
    crumbs = [len(each.outcome.breadcrumbs) for each in members]
    if len(members) < 2 or max(crumbs) >= MAX_BREADCRUMBS:
        return
    if len(members) > _MANY and all(each.is_good for each in members):
        return
    inside = [_inside(each) for each in members]
    stuck = [i for i, each in enumerate(members) if each.status == "hung" and inside[i]]
    if stuck:
        yield from _hung(members, inside, stuck)
    elif all(each.status == "ok" for each in members):
        yield from _lost_time(members, inside)


def _hung(
    members: Sequence[ParticipantEnd], inside: Sequence[dict[Key, float]], stuck: Sequence[int]
) -> Iterator[str]:
    # Of several groups it is not known who belongs to which.
    if len({step.group for each in members for step in each.steps if step.is_collective}) > 1:
        return
    last: dict[Key, list[int]] = {}
    for i in stuck:
        last.setdefault(list(inside[i])[-1], []).append(i)
    for key, here in last.items():
        behind = [i for i, each in enumerate(inside) if key not in each and not members[i].is_good]
        if len(here) == len(members):
            yield f"All of them were in {_say(key)}: no one is behind."
        elif behind:
            waiting, others = (who([members[i] for i in some]) for some in (here, behind))
            yield f"{waiting} waited in {_say(key)}; not known to have reached it: {others}."


def _lost_time(
    members: Sequence[ParticipantEnd], inside: Sequence[dict[Key, float]]
) -> Iterator[str]:
    """The step in which most time was spent waiting."""
    best: tuple[float, str] | None = None
    for key in {key: None for each in inside for key in each if key[0].startswith(_MUTUAL)}:
        times = {i: each[key] for i, each in enumerate(inside) if key in each}
        shortest, longest = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
        lost = times[longest] - times[shortest]
        if lost >= max(_WAITED_S, times[shortest]) and (best is None or lost > best[0]):
            waiting, other = who([members[longest]]), who([members[shortest]])
            words = f"{waiting} was {lost:.2f} s longer in {_say(key)} than {other}"
            best = lost, f"{words}: it probably waited for {other}."
    if best:
        yield best[1]


def _inside(seen: ParticipantEnd) -> dict[Key, float]:
    """Seconds inside each joint step, in order."""
    steps, count = seen.steps, Counter[tuple[str, str]]()
    found: dict[Key, float] = {}
    for i, step in enumerate(steps):
        count[step.name, step.group] += 1
        if step.name in _FORMING or _is_joint(step):
            end = steps[i + 1].at_s if i + 1 < len(steps) else seen.took_s
            found[step.name, step.group, count[step.name, step.group]] = max(0.0, end - step.at_s)
    return found


def _say(key: Key) -> str:
    name, group, times = key
    number_of = f" number {times}" if times > 1 else ""
    return f"{name}{number_of}" + (f" of group {group}" if group else "")


def _worst_rows(rows: Sequence[ParticipantRow], most: int) -> list[ParticipantRow]:
    ends_s = [max((phase.end_s for phase in row.phases), default=0.0) for row in rows]
    return [rows[at] for at in _worst([row.is_bad for row in rows], ends_s, most)]


def _draw(lane: Lane, rows: Sequence[ParticipantRow]) -> Html:
    span = lane.span_s
    lines = [
        element(
            "div",
            element("span", row.label, class_="who"),
            _bar(row, span),
            element("span", row.ending, class_="end bad" if row.is_bad else "end"),
            class_="row",
        )
        for row in rows
    ]
    more = lane.count - len(rows)
    if more:
        lines.append(element("p", f"and {more} more, not worse than these"))
    title = f"{lane.title}: {lane.count} participants, {span:.2f} s"
    title += f", {lane.bad} failed" if lane.bad else ""
    remarks = [element("p", words, class_="remark") for words in lane.remarks]
    return fold(title, *remarks, *lines, is_open=bool(lane.bad), class_="lane")


def _bar(row: ParticipantRow, span: float) -> Html:
    scale = _SCALE / span if span else 0.0
    rects = [
        element(
            "rect",
            x=round(phase.begin_s * scale, 1),
            y=0,
            width=round(max(_THINNEST, (phase.end_s - phase.begin_s) * scale), 1),
            height=10,
            class_=f"p-{phase.kind}",
        )
        for phase in row.phases
        if phase.end_s > phase.begin_s
    ]
    durations = "; ".join(
        f"{phase.name} {phase.end_s - phase.begin_s:.2f} s" for phase in row.phases
    )
    return element(
        "svg",
        element("title", durations),
        *rects,
        viewBox=f"0 0 {_SCALE} 10",
        preserveAspectRatio="none",
        role="img",
    )
