"""The verdict and what was found, what to fix first; the groups, and the pages of the codes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Host, Rank
from nccl_doctor.model.findings import CheckResult, Finding, Status
from nccl_doctor.model.report import Report
from nccl_doctor.report.html.facts import ParticipantEnd, in_order, item, number, outcomes_of, who
from nccl_doctor.report.html.markup import Html, element, fold, table, together
from nccl_doctor.report.manual import check_page, kind_page
from nccl_doctor.report.next_step import NextStep, next_steps
from nccl_doctor.report.story import (
    NOT_VERIFIED,
    Checks,
    FindingBlock,
    KindBlock,
    Story,
    and_more,
    checks_in_words,
    explained_by,
    healthy_summary,
    sections_of,
    setups_of,
    some,
)

# A fix on the page: commands as code, below the hosts that they are for, and prose as prose.


_ABOVE = "# "
"""Begins the line above commands: on which hosts they are typed."""
_CODE = re.compile(r"`([^`\n]+)`")


def fix_of(text: str) -> Html:
    """One fix: lines of a shell, which begin with a comment that names hosts, or words.

    The script of the page puts a button beside the hosts, which copies the commands below.
    """
    if not text.startswith(_ABOVE):
        return element("div", element("p", *_prose(text)), class_="fix")
    return element("div", *_typed(text.splitlines()), class_="fix")


def _typed(lines: list[str]) -> Iterator[Html]:
    """Each line that names hosts, above the commands until the next one."""
    heads = [i for i, line in enumerate(lines) if line.startswith(_ABOVE)]
    for i, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        above = element("p", lines[i].removeprefix(_ABOVE), class_="on")
        commands = "\n".join(lines[i + 1 : end])
        if commands:
            code = element("pre", element("code", commands))
            yield element("div", above, code, class_="typed")
        else:
            yield above


def _prose(text: str) -> Iterator[object]:
    """Words, with code where backticks say so."""
    for i, part in enumerate(_CODE.split(text)):
        yield element("code", part) if i % 2 else part


# Groups that were tried: a table for each check that forms any, good groups in one line.


_MOST_GROUPS = 200
_HEAD = ("round", "members", "hosts", "result", "took", "groups in it", "how it ended")

Group = Sequence[ParticipantEnd]


def groups_section(report: Report) -> Html | None:
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
        more = and_more(len(rows) - _MOST_GROUPS)
        rest = element("p", f"{more} lines") if more else None
        parts.append(fold(title, table(_HEAD, rows[:_MOST_GROUPS]), rest, is_open=bool(bad)))
    return element("section", element("h2", "Groups"), *parts, id="groups") if parts else None


def groups_of(seen: Sequence[ParticipantEnd]) -> list[list[ParticipantEnd]]:
    """Groups of one round, in order of their lowest seat."""
    found: dict[int, list[ParticipantEnd]] = {}
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
    endings: dict[str, list[ParticipantEnd]] = {}
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


# The pages of what was found, as `nccl-doctor explain` prints them: cards lead to them.


def anchor(code: str) -> str:
    """Name of the page of a code, in this file."""
    return f"about-{code}"


def pages_section(report: Report, checks: Checks) -> Html | None:
    """A fold for each code, the causes first, and then for each check that finds one of them."""
    kinds = {found.code: found.kind for found in (*report.root_causes, *report.findings)}
    if not kinds:
        return None
    parts, told = [], dict[str, Check]()
    owners = _owners(checks())
    for code, kind in kinds.items():
        told |= {check.name: check for check in owners.get(code, ())}
        page = element("pre", kind_page(kind, owners.get(code, [])))
        parts.append(fold(element("b", code, id=anchor(code)), page))
    parts += [fold(f"check {name}", element("pre", check_page(told[name]))) for name in told]
    return element("section", element("h2", "What the codes mean"), *parts, id="pages")


def _owners(checks: Iterable[Check]) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for check in checks:
        for kind in check.kinds:
            found.setdefault(kind.code, []).append(check)
    return found


_MOST = 64
"""Findings of one kind that are written out."""
_FEW = 4
"""Different values of one thing in the header."""
_SETUP = {
    "torch": "torch",
    "cuda": "CUDA",
    "rocm": "ROCm",
    "nccl": "NCCL",
    "driver": "driver",
    "python": "Python",
    "gpus": "GPUs per host",
}
"""Names of `Setup`s, and their words in the header."""
_MARKS = {"pass": "✓", "fail": "✗", "warn": "!", "unknown": "?"}


def header(report: Report, checks: Checks) -> Html:
    """Header of the page: the verdict and the run, with the versions and GPUs of its hosts."""
    mark = _MARKS.get(report.verdict, "?")
    badge = element("b", f"{mark} {report.verdict.upper()}", class_=f"badge {report.verdict}")
    run, tool = report.run, report.tool
    shown = [
        ("run", run.id),
        ("started", run.started),
        ("took", None if run.duration_s is None else f"{number(run.duration_s):.1f} s"),
        ("launcher", run.launcher),
        ("backend", report.cluster.backend),
        ("level", report.cluster.level.value),
        ("ranks", _of(report.cluster.ranks)),
        ("hosts", _of(report.cluster.hosts)),
        ("exit code", report.exit_code),
        ("by", " ".join(str(each) for each in (tool.get("name"), tool.get("version")) if each)),
        ("names", "redacted: stable pseudonyms" if report.redacted else None),
    ]
    return element(
        "header",
        element("h1", "nccl-doctor"),
        element("p", badge, " ", Story(report).headline, class_="verdict"),
        element("p", *_named(shown), class_="run"),
        element("p", *_named(_setup(report, checks)), class_="run"),
    )


def _named(shown: Iterable[tuple[str, object]]) -> list[Html]:
    return [
        element("span", f"{name} ", element("b", value))
        for name, value in shown
        if value not in (None, "")
    ]


def _setup(report: Report, checks: Checks) -> Iterator[tuple[str, str]]:
    """Versions and GPUs; where hosts differ, each value with its number of hosts."""
    setups = setups_of(sections_of(report, checks))
    for name, words in _SETUP.items():
        values: dict[str, set[int]] = {}
        for each in setups[name]:
            if isinstance(each.value, str):
                values.setdefault(each.value, set()).add(each.host)
        shown = [
            f"{value} ({len(where)} host{'s' if len(where) > 1 else ''})"
            for value, where in values.items()
        ]
        yield words, ", ".join(shown[:_FEW] if len(values) > 1 else values)


def sections(report: Report) -> Iterator[Html]:
    """Sections of the page: what to fix; symptoms, warnings, gaps and notes."""
    story = Story(report)
    if story.causes:
        cards = map(_card, story.kinds(story.causes, _MOST))
        yield element("section", element("h2", "What to fix"), *cards, id="causes")
    title = "Explained by the above, gone when it is fixed"
    yield from _folded(title, "explained", story.kinds(story.victims, _MOST))
    rest = story.kinds(story.warnings, _MOST)
    yield from _folded("Warnings", "warnings", rest, is_open=True)
    yield from _gaps(report)
    yield from _folded("Worth knowing", "notes", story.kinds(story.notes, _MOST))


def measured(report: Report, checks: Checks) -> Html | None:
    """Section of what was measured, and what to type next; None of a failure."""
    areas = healthy_summary(report, checks)
    if not areas:
        return None
    rows = [together(element("dt", area), element("dd", words)) for area, words in areas]
    steps = map(_next, next_steps(report))
    title = element("h2", "What was measured")
    return element("section", title, element("dl", *rows), *steps, id="measured")


def _next(step: NextStep) -> Html:
    command = element("code", step.command) if step.command else None
    said = together(element("b", "Next: "), step.before, " ", command, " ", step.behind)
    return element("p", said, class_="next")


def checks(report: Report) -> Html | None:
    """The table of checks, folded."""
    if not report.checks:
        return None
    counts = Counter(check.status.value for check in report.checks)
    numbers = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    skipped = [check for check in report.checks if check.status is Status.SKIPPED]
    tried = [check for check in report.checks if check.status is not Status.SKIPPED]
    left = fold(f"{len(skipped)} skipped", _table(skipped)) if skipped else None
    return element(
        "section",
        element("h2", "Checks"),
        fold(f"{len(report.checks)} checks: {numbers}", _table(tried) if tried else None, left),
        id="checks",
    )


def _table(found: Sequence[CheckResult]) -> Html:
    rows = [
        (
            element("span", check.status.value, class_=f"status {check.status.value}"),
            check.name,
            check.layer.value,
            f"{len(check.tested)} {check.scope.value}{'' if len(check.tested) == 1 else 's'}",
            f"{check.duration_s:.1f} s",
            check.reason,
        )
        for check in found
    ]
    return table(("status", "check", "layer", "tested", "took", "reason"), rows)


def _card(block: KindBlock) -> Html:
    kind, level = block.kind, block.level.value
    title = element(
        "h3",
        element("span", _MARKS.get(level, "·"), class_=f"mark {level}"),
        f" {kind.title} ",
        element("a", element("code", kind.code), href=f"#{anchor(kind.code)}"),
    )
    more = f"{block.more} like this (all of them in the JSON report)"
    return element(
        "article",
        title,
        *map(_entry, block.first),
        element("p", more) if block.more else None,
        element("p", element("b", "why "), kind.why) if kind.why else None,
        element("p", element("b", "fix")) if block.fixes else None,
        *(fix_of(fix.text) for fix in block.fixes),
        class_=level,
    )


def _entry(each: FindingBlock) -> Html:
    return element(
        "div",
        element("p", element("b", "where "), each.where) if each.where else None,
        element("p", element("b", "seen "), each.finding.message + each.doubt),
        _evidence(each.finding),
        class_="finding",
    )


def _evidence(finding: Finding) -> Html | None:
    if not finding.evidence:
        return None
    items = [together(*item(name, value)) for name, value in in_order(finding.evidence)]
    return fold("evidence", element("dl", *items))


def _folded(
    title: str, name: str, blocks: Sequence[KindBlock], *, is_open: bool = False
) -> Iterator[Html]:
    if not blocks:
        return
    parts = []
    for block in blocks:
        count = len(block.findings)
        place = block.first[0].where if count == 1 else f"{count} places"
        reason = explained_by(block.findings)
        words = block.kind.title + (f" ({place})" if place else "") + (reason and f", {reason}")
        parts.append(fold(words, _card(block)))
    yield element("section", fold(element("h2", title), *parts, is_open=is_open), id=name)


def _gaps(report: Report) -> Iterator[Html]:
    if gaps := report.gaps():
        items = [
            element(
                "li",
                element("span", status.value, class_=f"status {status.value}"),
                " ",
                element("b", checks_in_words(names)),
                f": {reason}",
            )
            for (status, reason), names in gaps.items()
        ]
        title = element("h2", NOT_VERIFIED)
        yield element("section", title, element("ul", *items), id="gaps")


def _of(items: Sequence[Host | Rank]) -> str:
    here = sum(item.reported for item in items)
    return str(here) if here == len(items) else f"{here} of {len(items)}"
