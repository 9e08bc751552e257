"""The report for people: the verdict first, then what to fix, and where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nccl_doctor.model.findings import CheckResult, Effect, Status, numbered
from nccl_doctor.model.report import Report
from nccl_doctor.report.lines import LEGEND, Page, lay_out_links
from nccl_doctor.report.next_step import next_steps
from nccl_doctor.report.story import (
    MOST_RANGES,
    NOT_VERIFIED,
    Block,
    Checks,
    KindBlock,
    Story,
    and_more,
    checks_in_words,
    counts,
    healthy_summary,
    no_checks,
    some,
    values,
)
from nccl_doctor.system.terminal import safe

_MARKS = {
    **{"pass": "✓", "fail": "✗", "warn": "!", "unknown": "?"},
    **{"info": "·", "blocked": "·", "skipped": "·"},
}
_LONGEST = 600
"""Characters of one message."""
_MOST_VALUES = 60
_MOST_TABLES = 3
"""Tables of one fact, of hosts that differ."""


def render(report: Report, **how: Any) -> str:
    """The whole report as text that ends in a newline; for the arguments see `TextReport`."""
    text = TextReport(report, **how)
    return text.found() + text.end(report)


@dataclass(frozen=True)
class TextReport:
    """The report as text, in two parts: `end` tells what is known after all files are written.

    Args:
        report: what to render; nothing in it is trusted to be free of terminal escapes.
        width: columns of the terminal; less than 40 is taken as 40.
        color: use ANSI colours.
        verbose: 1 for all values that were measured, facts that are tables, and what is only worth
            knowing; 2 for the table of checks, too.
        quiet: only the verdict and what to fix.
        ascii: write nothing but ASCII.
        checks: asked what they measured.
    """

    report: Report
    width: int = 100
    color: bool = False
    verbose: int = 0
    quiet: bool = False
    ascii: bool = False
    checks: Checks = no_checks

    def found(self) -> str:
        """Verdict, causes, and what was measured: all that does not change any more."""
        report, checks = self.report, self.checks
        page, story = Page(self.width, self.color), Story(report, ranges=True)
        page.line(
            f"nccl-doctor: {report.verdict.upper()}: {story.headline}", report.verdict, bold=True
        )
        beside = [f for f in story.notes if f.has(Effect.SHOWN) and not f.explained_by]
        for block in (*story.kinds(story.causes), *story.kinds(beside)):
            _cause(page, block, story.untold(block), self.quiet)
        if not self.quiet:
            _links(page, report, checks)
            _explained(page, story)
            _warnings(page, story)
            _not_tested(page, story)
            _healthy(page, report, checks)
            if self.verbose:
                notes = [story.of(found) for found in story.notes if found not in beside]
                if notes:
                    page.heading("Worth knowing")
                for note in notes:
                    page.line(f"{note.head}: {note.finding.message}", first="  · ")
                _values(page, report, checks)
                _facts(page, report)
            if self.verbose > 1:
                _table(page, report)
            page.gap()
        return page.text(ascii=self.ascii)

    def end(self, report: Report) -> str:
        """Numbers, the exit code of `report`, which is the same but for that, and the next step."""
        page = Page(self.width, self.color)
        if not self.quiet:
            page.line(counts(report))
            baseline = (report.run.baseline or {}).get("text")
            if isinstance(baseline, str):  # earlier runs, and why other files were not used
                page.line(baseline, first="baseline: ", rest="  ")
            for step in next_steps(report, every_check=self.verbose > 1):
                page.next_step(step.before, step.command, step.behind)
        return page.text(ascii=self.ascii)


def _cause(page: Page, block: KindBlock, titles: Sequence[str], quiet: bool) -> None:
    """`titles`: what is said of it above its place; the cause is in colour, a symptom is not."""
    kind, tone = block.kind, block.level.value
    page.gap()
    said, *symptom = [*titles, ""]
    is_cause = titles == block.titles
    head = f"{said}  [{kind.code}]".strip()
    page.line(head, tone if is_cause else "", bold=is_cause, first=f"{_MARKS[tone]} ")
    rows = [
        ("what", "".join(symptom)),
        *(
            row
            for each in block.first
            for row in (
                ("where", each.where),
                ("seen", _some_of(each.finding.message) + each.doubt),
            )
        ),
    ]
    more = f"{block.more} like this (all of them in --json)" if block.more else ""
    for name, text in (*rows, ("", more), ("why", "" if quiet else kind.why)):
        page.line(text, first=f"  {name:<6}", rest=" " * 8)
    for fix in block.fixes:
        _fix(page, fix, "  fix   ")


def _fix(page: Page, block: Block, first: str) -> None:
    """Write prose as a paragraph, and commands as they are: one on a line, never wrapped."""
    rest = " " * len(first)
    page.line(block.prose, first=first, rest=rest)
    for i, line in enumerate(block.lines):
        page.typed(line, rest if i else first)


def _some_of(message: str) -> str:
    """A message; of one that names a thousand hosts, its beginning."""
    if len(message) <= _LONGEST:
        return message
    return f"{message[:_LONGEST].rpartition(' ')[0]} … (all of it in --json)"


def _links(page: Page, report: Report, checks: Checks) -> None:
    lines = lay_out_links(report, page.width, checks)
    if lines:
        page.heading("Links between hosts")
        page.line(LEGEND, first="  ")
        page.raw(lines)


def _explained(page: Page, story: Story) -> None:
    if story.victims:
        page.heading("Explained by the above, gone when it is fixed")
    for victim, why in story.explained():
        page.line(f"{victim.head}: {why}", first="  · ")


def _warnings(page: Page, story: Story) -> None:
    if story.warnings:
        page.heading("Warnings")
    for block in story.kinds(story.warnings):
        for each in block.first:
            words = _some_of(each.finding.message) + each.doubt
            page.line(f"{each.head}: {words}", first="  ! ")
            for fix in story.steps.blocks([each.finding], 1):
                _fix(page, fix, "    fix: ")
        page.line(block.more and f"{block.more} {block.kind.code}", first="  ! ")


def _healthy(page: Page, report: Report, checks: Checks) -> None:
    page.gap()
    lines = healthy_summary(report, checks)
    width = max((len(area) for area, _ in lines), default=0)
    for area, words in lines:
        page.line(words, first=f"  {area:<{width}}  ")


def _values(page: Page, report: Report, checks: Checks) -> None:
    found = values(report, checks)
    if found:
        page.heading("Values")
    for name, value in found[:_MOST_VALUES]:
        page.line(f"{name}: {value}", first="  ", rest="    ")
    more = and_more(len(found) - _MOST_VALUES)
    page.line(more and f"{more} (all of them in --json)", first="  ")


def _not_tested(page: Page, story: Story) -> None:
    report = story.report
    gaps, absent = report.gaps(), _absent(story)
    if gaps or absent:
        page.heading(NOT_VERIFIED)
    page.line(absent, first=f"  {_MARKS['unknown']} ")
    codes = _codes_of_absent(report) if absent else set()
    not_held: list[str] = []
    for (status, reason), names in gaps.items():
        if (
            status is Status.BLOCKED
            and set(reason.removeprefix("blocked by ").split(", ")) <= codes
        ):
            continue  # what stands in the line above
        if status is Status.UNKNOWN and reason.startswith("no outcome of "):
            not_held += names
            continue
        words = f"{checks_in_words(names)}: {_some_of(reason)}"
        page.line(words, first=f"  {_MARKS[status.value]} ")
    if not_held:
        page.line(f"{checks_in_words(not_held)}: not begun", first=f"  {_MARKS['unknown']} ")


def _absent(story: Story) -> str:
    """One line about the hosts that never came, and the others; empty if all came."""
    report, hosts = story.report, story.report.cluster.hosts
    nodes = [host.node_rank for host in hosts if not host.reported and host.node_rank is not None]
    if not nodes or not report.cluster.complete:
        return ""
    gone = _codes_of_absent(report)
    clean = gone.issuperset(f.code for f in (*story.causes, *story.warnings))
    here = sum(host.reported for host in hosts)
    well = ", nothing wrong found on them" if clean else ""
    gone_nodes = numbered("node", nodes, MOST_RANGES)
    wanted = report.cluster.hosts_wanted
    if here >= wanted:  # as two claim one node rank
        return f"{here} hosts examined{well}; no host is {gone_nodes}"
    return f"{here} of {wanted} hosts examined{well}; {gone_nodes}: nothing known"


def _codes_of_absent(report: Report) -> set[str]:
    """Codes of findings whose places are hosts that never came, and no others."""
    hosts = report.cluster.hosts
    nodes = {host.node_rank for host in hosts if not host.reported}
    names = {host.name for host in hosts if not host.reported}
    elsewhere = {
        finding.code
        for finding in report.findings
        if not finding.where.nodes
        or not nodes.issuperset(finding.where.nodes)
        or not names.issuperset(finding.where.hosts)
        or finding.where.links
    }
    return {finding.code for finding in report.findings} - elsewhere


def _facts(page: Page, report: Report) -> None:
    from nccl_doctor.report.lines import Table, lay_out, tables_of

    by_title: dict[str, list[Table]] = defaultdict(list)
    for found in tables_of(report):
        by_title[found.title].append(found)
    for title, tables in by_title.items():
        for table in tables[:_MOST_TABLES]:
            on_hosts = "" if table.whole else f" on {', '.join(some(table.hosts))}"
            page.heading(f"{table.title}{on_hosts}")
            page.raw(lay_out(table, page.width))
        if (more := len(tables) - _MOST_TABLES) > 0:
            page.line(f"and {more} other tables of {title} (all of them in --json)")


def _table(page: Page, report: Report) -> None:
    if not report.checks:
        return
    from tabulate import tabulate

    page.gap()
    rows = [
        [
            _MARKS[check.status.value],
            safe(check.name),
            check.layer.value,
            check.status.value,
            _tested(check),
            f"{check.duration_s:.1f} s",
        ]
        for check in report.checks
    ]
    head = ["", "check", "layer", "status", "tested", "took"]
    page.raw(
        line.rstrip() for line in tabulate(rows, head, "simple", disable_numparse=True).split("\n")
    )
    for check in report.checks:
        if check.status is Status.SKIPPED and check.reason:
            page.line(f"{check.name}: skipped: {check.reason}", first="  · ")


def _tested(check: CheckResult) -> str:
    number = len(check.tested)
    thing = check.scope.value
    return f"{number} {thing}{'' if number == 1 else 's'}"
