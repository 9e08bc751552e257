"""The report for people: the verdict first, then what to fix, and where."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from nccl_doctor.model.cluster import Host, Rank
from nccl_doctor.model.findings import (
    CheckResult,
    Effect,
    Finding,
    Severity,
    Status,
    Where,
    numbered,
)
from nccl_doctor.model.report import Report
from nccl_doctor.report.lines import LEGEND, MIN_WIDTH, Page, lay_out_links, to_ascii
from nccl_doctor.report.next_step import next_steps
from nccl_doctor.report.story import (
    MOST_PLACES,
    MOST_RANGES,
    Block,
    Checks,
    PlaceWords,
    Steps,
    by_kind,
    checks_in_words,
    explained_by,
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


def render(
    report: Report,
    *,
    width: int = 100,
    color: bool = False,
    verbose: int = 0,
    quiet: bool = False,
    ascii: bool = False,
    checks: Checks = no_checks,
) -> str:
    """The whole report as text that ends in a newline; for the arguments see `Text`."""
    text = TextReport(
        report,
        width=width,
        color=color,
        verbose=verbose,
        quiet=quiet,
        ascii=ascii,
        checks=checks,
    )
    return text.found() + text.end(report)


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

    def __init__(
        self,
        report: Report,
        *,
        width: int = 100,
        color: bool = False,
        verbose: int = 0,
        quiet: bool = False,
        ascii: bool = False,
        checks: Checks = no_checks,
    ) -> None:
        self._report = report
        self._width = max(width, MIN_WIDTH)
        self._color = color
        self._verbose = verbose
        self._quiet = quiet
        self._ascii = ascii
        self._checks = checks

    def found(self) -> str:
        """Verdict, causes, and what was measured: all that does not change any more."""
        report, checks = self._report, self._checks
        page = Page(self._width, self._color)
        places, steps = PlaceWords(report, ranges=True), Steps(report)
        page.line(
            f"nccl-doctor: {report.verdict.upper()}: {report.summary}", report.verdict, bold=True
        )
        for group in by_kind(report.root_causes):
            _root_cause(page, places, steps, group, self._quiet)
        for group in by_kind(_beside(report)):
            _root_cause(page, places, steps, group, self._quiet)
        if not self._quiet:
            _links(page, report, checks)
            _explained(page, places, report)
            _warnings(page, places, steps, report)
            _not_tested(page, report)
            if report.verdict in ("pass", "warn") and not (report.run.alone or report.run.source):
                _card(page, report, checks)
            if self._verbose:
                _infos(page, places, report)
                _values(page, report, checks)
                _facts(page, report)
            if self._verbose > 1:
                _table(page, report)
            page.gap()
        return self._shown(page)

    def end(self, report: Report) -> str:
        """Numbers, the exit code of `report`, which is the same but for that, and the next step."""
        page = Page(self._width, self._color)
        if not self._quiet:
            page.line(counts(report))
            _baseline(page, report)
            for step in next_steps(report, every_check=self._verbose > 1):
                page.raw([safe(step)])  # a command is never wrapped
        return self._shown(page)

    def _shown(self, page: Page) -> str:
        return to_ascii(page.text()) if self._ascii else page.text()


def _root_cause(
    page: Page, places: PlaceWords, steps: Steps, group: Sequence[Finding], quiet: bool
) -> None:
    kind, tone = group[0].kind, group[0].level.value
    mark = _MARKS[tone]
    page.gap()
    page.line(f"{kind.title}  [{kind.code}]", tone, bold=True, first=f"{mark} ")
    for finding in group[:MOST_PLACES]:
        where = places.say(finding.where)
        if where:
            _entry(page, "where", where)
        _entry(page, "seen", _some_of(finding.message) + _doubt(finding))
    if len(group) > MOST_PLACES:
        _entry(page, "", f"and {len(group) - MOST_PLACES} more like this (all of them in --json)")
    if kind.why and not quiet:
        _entry(page, "why", kind.why)
    for block in steps.blocks(group, MOST_PLACES):
        _fix(page, block, "  fix   ")


def _entry(page: Page, name: str, text: str) -> None:
    page.line(text, first=f"  {name:<6}", rest=" " * 8)


def _fix(page: Page, block: Block, first: str) -> None:
    """Write prose as a paragraph, and commands as they are: one on a line, never wrapped."""
    page.line(block.prose, first=first, rest=" " * len(first))
    page.raw((" " * len(first) if i else first) + line for i, line in enumerate(block.lines))


def _some_of(message: str) -> str:
    """A message; of one that names a thousand hosts, its beginning."""
    if len(message) <= _LONGEST:
        return message
    return f"{message[:_LONGEST].rpartition(' ')[0]} … (all of it in --json)"


def _doubt(finding: Finding) -> str:
    return "" if finding.confidence.value == "certain" else f" ({finding.confidence.value})"


def _short(page: Page, places: PlaceWords, mark: str, finding: Finding, text: str) -> None:
    where = places.say(finding.where)
    page.line(f"{finding.code}{f' ({where})' if where else ''}: {text}", first=f"  {mark} ")


def _links(page: Page, report: Report, checks: Checks) -> None:
    lines = lay_out_links(report, page.width, safe, checks)
    if lines:
        page.heading("Links between hosts")
        page.line(LEGEND, first="  ")
        page.raw(lines)


def _explained(page: Page, places: PlaceWords, report: Report) -> None:
    explained = [f for f in report.findings if f.explained_by and f.level is not Severity.INFO]
    if explained:
        page.heading("Explained by the above, gone when it is fixed")
    for group in by_kind(explained):
        whole = group[0].replaced(where=Where.union(finding.where for finding in group))
        _short(page, places, "·", whole, explained_by(group))


def _warnings(page: Page, places: PlaceWords, steps: Steps, report: Report) -> None:
    roots = {(finding.code, finding.level) for finding in report.root_causes}
    warnings = [
        finding
        for finding in report.findings
        if finding.level is Severity.WARN
        and not finding.explained_by
        and (finding.code, finding.level) not in roots
    ]
    if warnings:
        page.heading("Warnings")
    for group in by_kind(warnings):
        for finding in group[:MOST_PLACES]:
            _short(page, places, "!", finding, _some_of(finding.message) + _doubt(finding))
            for block in steps.blocks([finding], 1):
                _fix(page, block, "    fix: ")
        if len(group) > MOST_PLACES:
            page.line(f"and {len(group) - MOST_PLACES} more {group[0].code}", first="  ! ")


def _card(page: Page, report: Report, checks: Checks) -> None:
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
    if len(found) > _MOST_VALUES:
        page.line(f"and {len(found) - _MOST_VALUES} more (all of them in --json)", first="  ")


def _not_tested(page: Page, report: Report) -> None:
    gaps = report.gaps()
    absent = _absent(report)
    if gaps or absent:
        page.heading("Not known to be good")
    if absent:
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


def _absent(report: Report) -> str:
    """One line about the hosts that never came, and the others; empty if all came."""
    hosts = report.cluster.hosts
    nodes = [host.node_rank for host in hosts if not host.reported and host.node_rank is not None]
    if not nodes or not report.cluster.complete:
        return ""
    gone = _codes_of_absent(report)
    clean = all(
        finding.code in gone or finding.explained_by or finding.level is Severity.INFO
        for finding in report.findings
    )
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


def _beside(report: Report) -> list[Finding]:
    infos = (finding for finding in report.findings if finding.level is Severity.INFO)
    return [finding for finding in infos if finding.has(Effect.SHOWN) and not finding.explained_by]


def _infos(page: Page, places: PlaceWords, report: Report) -> None:
    shown = _beside(report)
    infos = [
        finding
        for finding in report.findings
        if finding.level is Severity.INFO and finding not in shown
    ]
    if infos:
        page.heading("Worth knowing")
    for finding in infos:
        _short(page, places, "·", finding, finding.message)


def _facts(page: Page, report: Report) -> None:
    from nccl_doctor.report.lines import Table, lay_out, tables_of

    by_title: dict[str, list[Table]] = defaultdict(list)
    for found in tables_of(report):
        by_title[found.title].append(found)
    for title, tables in by_title.items():
        for table in tables[:_MOST_TABLES]:
            on_hosts = "" if table.whole else f" on {', '.join(some(table.hosts))}"
            page.heading(f"{table.title}{on_hosts}")
            page.raw(lay_out(table, page.width, safe))
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


def counts(report: Report) -> str:
    """One line: numbers of checks, hosts and ranks, the duration, the exit code."""
    if report.run.source:
        return _counts_of_autopsy(report)
    statuses = Counter(check.status for check in report.checks)
    names = {
        Status.PASS: "passed",
        Status.WARN: "with warnings",
        Status.FAIL: "failed",
        Status.UNKNOWN: "unknown",
        Status.BLOCKED: "blocked",
        Status.SKIPPED: "skipped",
    }
    numbers = [f"{statuses[status]} {word}" for status, word in names.items() if statuses[status]]
    cluster = report.cluster
    wanted = (cluster.hosts_wanted, cluster.ranks_wanted)
    if report.run.alone:
        wanted = (len(cluster.hosts), len(cluster.ranks))
    hosts = _reported(cluster.hosts, "hosts", wanted[0])
    ranks = _reported(cluster.ranks, "ranks", wanted[1])
    took = report.run.duration_s
    parts = [f"checks: {', '.join(numbers) or 'none'}", hosts, ranks]
    if took is not None:
        parts.append(f"{took:.1f} s")
    return " · ".join([*parts, f"exit code {report.exit_code}"])


def _counts_of_autopsy(report: Report) -> str:
    """One line: what was read, of how many ranks, the duration, the exit code."""
    told = [report.run.extra.get(name) for name in ("files", "bytes")]
    files, size = (each if isinstance(each, int) else 0 for each in told)
    amount = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    ranks = len(report.cluster.ranks)
    parts = [
        f"read: {files} file{'s' * (files != 1)}, {amount}",
        f"{ranks} rank{'s' * (ranks != 1)} in them",
        f"{report.run.duration_s or 0:.1f} s",
    ]
    return " · ".join([*parts, f"exit code {report.exit_code}"])


def _baseline(page: Page, report: Report) -> None:
    """Write the number of earlier runs of the comparison, and why other files were not used."""
    text = (report.run.baseline or {}).get("text")
    if isinstance(text, str):
        page.line(text, first="baseline: ", rest="  ")


def _reported(items: Sequence[Host | Rank], thing: str, wanted: int) -> str:
    """Number of those that reported, of those that the user asked for."""
    here = sum(item.reported for item in items)
    total = max(here, wanted)
    if here == total:
        return f"{here} {thing if here != 1 else thing[:-1]}"
    return f"{here} of {total} {thing}"
