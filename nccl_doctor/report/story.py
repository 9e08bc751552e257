"""The story of a report, for every format: findings, places, fixes, healthy summary, counts."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import groupby
from typing import TypeVar

from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster, Facts, Host, Outcome, Rank
from nccl_doctor.model.commands import Command
from nccl_doctor.model.findings import (
    Figure,
    Finding,
    Kind,
    Severity,
    Status,
    Where,
    headlines,
    numbered,
)
from nccl_doctor.model.fixes import Fix, Step, StepHosts
from nccl_doctor.model.report import Report
from nccl_doctor.model.sections import HostLink, Section, Setup
from nccl_doctor.system.terminal import lines, safe
from nccl_doctor.toolkit.hosts import is_namesake
from nccl_doctor.toolkit.slurm import host_ranges
from nccl_doctor.toolkit.units import amount_text, bits_text, span_text, time_text

T = TypeVar("T")

NOT_VERIFIED = "Not verified"
"""Heading of what was not examined, or not everywhere."""
_MOST_NAMES = 8
"""Checks whose names are written out; a host that is absent blocks most of them."""
_FEW_HOSTS = 3
MOST_RANGES = 8
"""Ranges of numbers, or of hosts, that are written out."""
MOST_PLACES = 6
"""Messages of one kind that are written out; a report of ten thousand ranks stays readable."""


def full_names(cluster: Cluster) -> dict[str, str]:
    """Names of hosts that do not say which host it is → the name, with node rank and address.

    Several hosts may have one name; or one that is not node 0 has that of MASTER_ADDR.
    """
    named: dict[str, list[Host]] = defaultdict(list)
    for host in cluster.hosts:
        if host.name:
            named[host.name].append(host)
    twins = {rank.host.id for rank in cluster.ranks if is_namesake(rank)}
    return {
        name: f"{name} ({'; '.join(map(_which, hosts))})"
        for name, hosts in named.items()
        if len({host.node_rank for host in hosts}) > 1 or any(host.id in twins for host in hosts)
    }


def _which(host: Host) -> str:
    return ", ".join([f"node {host.node_rank}", *host.addresses[:1]])


class PlaceWords:
    """Places of a report's findings in words: `ranks 8–15 on node3`, `nd1 → nd0`."""

    def __init__(self, report: Report, *, ranges: bool = False) -> None:
        """`ranges`: many hosts are written as `gpu[001-064]`."""
        self._ranges = ranges
        self._host_of: dict[int, set[str]] = defaultdict(set)
        self._nodes: dict[str, set[int]] = defaultdict(set)
        self._full = full_names(report.cluster)
        for rank in report.cluster.ranks:
            if rank.rank is not None and rank.host.name:
                self._host_of[rank.rank].add(rank.host.name)
        for host in report.cluster.hosts:
            if host.name and host.node_rank is not None:
                self._nodes[host.name].add(host.node_rank)

    def say(self, where: Where) -> str:
        """One place, as short as it can be said."""
        parts = []
        left = set(where.hosts)
        by_hosts: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number in where.ranks:
            on = self._host_of.get(number, set())
            here = tuple(sorted(on & left) or sorted(on))
            by_hosts[here].append(number)
        named = {name for hosts in by_hosts for name in hosts}
        if len(named) > MOST_PLACES:
            parts.append(f"{numbered('rank', where.ranks, MOST_RANGES)} on {len(named)} hosts")
        else:
            for hosts, numbers in by_hosts.items():
                on_hosts = f" on {', '.join(self._hosts(hosts))}" if hosts else ""
                parts.append(numbered("rank", numbers) + on_hosts)
        parts += self._hosts(sorted(left - named))
        parts += some(_arrows(where.links))
        known = {node for name in where.hosts for node in self._nodes.get(name, ())}
        nodes = [node for node in where.nodes if node not in known]
        if nodes:
            parts.append(numbered("node", nodes, MOST_RANGES))
        parts += some(where.devices)
        text = ", ".join(parts)
        if where.interfaces:
            interfaces = ", ".join(some(where.interfaces))
            text = f"{interfaces} on {text}" if text else interfaces
        return text

    def _hosts(self, names: Sequence[str]) -> list[str]:
        if self._ranges and len(names) > _FEW_HOSTS and not self._full.keys() & set(names):
            return [shortened(names, host_ranges)]
        return some([self._full.get(name, name) for name in names])


def _arrows(links: Sequence[tuple[str, str]]) -> list[str]:
    there = set(links)
    both = {(start, end) for start, end in there if (end, start) in there and start != end}
    return [
        f"{start} {'↔' if (start, end) in both else '→'} {end}"
        for start, end in links
        if (start, end) not in both or start < end
    ]


def checks_in_words(names: Sequence[str]) -> str:
    """Names of a few checks, and only the number of many: `-v` and the JSON report list them."""
    return f"{len(names)} other checks" if len(names) > _MOST_NAMES else ", ".join(names)


def shortened(names: Sequence[str], say: Callable[[Sequence[str]], str]) -> str:
    """Many hosts in few ranges: as many of them as that takes, and how many more there are.

    Args:
        names: in their order.
        say: gives the ranges of names, with commas between them.
    """

    def fits(count: int) -> bool:
        return say(names[:count]).count(",") < MOST_RANGES

    if fits(len(names)):
        return say(names)
    shown = bisect_left(range(len(names)), True, key=lambda count: not fits(count)) - 1
    return f"{say(names[:shown])} and {len(names) - shown} more"


def some(items: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    return [*items[:MOST_PLACES], *filter(None, [and_more(len(items) - MOST_PLACES)])]


def and_more(count: int) -> str:
    """`and 3 more`; empty if there are no more."""
    return f"and {count} more" if count > 0 else ""


def by_kind(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one code, title, cause and severity together, in the order in which they came."""
    groups: dict[tuple[str, ...], list[Finding]] = defaultdict(list)
    for finding in findings:
        alike = finding.code, finding.kind.title, finding.cause, finding.level.value
        groups[alike].append(finding)
    return list(groups.values())


def explained_by(
    group: Iterable[Finding],
    name: Callable[[str], str] = str,
    words: Callable[[str], str] = str,
) -> str:
    """`explained by port-blocked: same place, lower layer`, of findings of one kind; empty if none
    is explained. `name`, `words`: how a code and a reason are written.
    """
    reasons: dict[str, dict[str, None]] = {}
    for finding in group:
        if finding.explained_by:
            reasons.setdefault(finding.explained_by, {}).update(
                {finding.explained_why: None} if finding.explained_why else {}
            )
    causes = [
        f"{name(code)}{': ' if why else ''}{', '.join(map(words, sorted(why)))}"
        for code, why in sorted(reasons.items())
    ]
    return f"explained by {'; '.join(causes)}" if causes else ""


# Fixes for people: which commands to type, and on which hosts. Pure.
#
# A command is never wrapped and never shares its line. What stands beside it is a comment of a
# shell.


_FEW = 4
"""Hosts that are written out one by one."""
_MOST_LINES = 24
"""Lines of one way to fix something."""
_NUMBERED = re.compile(r"(.*?)(\d+)")
_IN_SHELL = ("export ", "unset ", "ulimit ")


@dataclass(frozen=True)
class Block:
    """One way to fix something: words for a paragraph, or lines of a shell."""

    prose: str = ""
    lines: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The block as it is, without line breaks that it has not got."""
        return "\n".join(self.lines) or safe(self.prose)

    @property
    def told(self) -> list[str]:
        """The block below its name, `fix:`, or behind it."""
        return ["fix:", *self.lines] if self.lines else [f"fix: {self.prose}"]


class Steps:
    """Fixes of a report's findings."""

    def __init__(self, report: Report) -> None:
        self.hosts = StepHosts(report.cluster)
        self._full = full_names(report.cluster)

    def blocks(self, findings: Sequence[Finding], most: int) -> list[Block]:
        """The fixes of findings of one kind: those of the first `most`, each once.

        Steps that several findings share are typed on the hosts of all of them.
        """
        shared: dict[tuple[object, ...], list[tuple[Fix, Where]]] = {}
        for i, finding in enumerate(findings):
            fix = fix_of(finding)
            fix = fix if isinstance(fix, Fix) else Fix(text=fix)
            if fix and (_commands(fix) in shared or i < most):
                shared.setdefault(_commands(fix), []).append((fix, finding.where))
        return [block for fixes in shared.values() for block in self._of(fixes)]

    def on(self, names: Sequence[str]) -> str:
        """Hosts in words: `on ux2`, `on every host but ux0`."""
        given = set(names)
        if len(self.hosts.every) - len(given) >= _FEW:
            return f"on {self._named(names)}"
        left = [name for name in self.hosts.every if name not in given]
        if len(names) > 1 and not left:
            return "on every host"
        if 0 < len(left) < min(_FEW, len(names)) and len(names) > _FEW:
            return f"on every host but {', '.join(map(safe, left))}"
        return f"on {self._named(names)}"

    def _named(self, names: Sequence[str]) -> str:
        return shortened([self._full.get(name, name) for name in names], ranges_to_type)

    def _of(self, fixes: Sequence[tuple[Fix, Where]]) -> Iterator[Block]:
        """One block for a way, of fixes with the same commands."""
        for i, way in enumerate((fixes[0][0], *fixes[0][0].alternatives)):
            same = [((fix, *fix.alternatives)[i], where) for fix, where in fixes]
            if way.steps:
                yield Block(lines=_some_lines(self._lines(same, "or " if i else "")))
            else:
                yield Block(prose=f"or: {way}" if i else str(way))

    def _lines(self, fixes: Sequence[tuple[Fix, Where]], before: str) -> Iterator[str]:
        head = ""
        for alike in self._typed_alike(fixes[0][0].steps):
            step = fixes[0][0].steps[alike[0]]
            names = dict.fromkeys(
                name
                for fix, where in fixes
                for i in alike
                for name in self.hosts.of(fix.steps[i], where)
            )
            above = f"# {before}{self.on(tuple(names))}{_more(step)}"
            if above != head:
                yield above
            head = above
            yield typed(step.command)

    @staticmethod
    def _typed_alike(steps: Sequence[Step]) -> list[list[int]]:
        """Indices of steps; together those that differ in their hosts and their undo only."""
        runs = groupby(range(len(steps)), lambda i: replace(steps[i], on=(), undo=Command()))
        return [list(run) for _, run in runs]


def _some_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """All lines of a fix; of one with a command for each of many hosts, the first of them."""
    every = list(lines)
    if len(every) <= _MOST_LINES:
        return tuple(every)
    shown = every[:_MOST_LINES]
    while shown[-1].startswith("# "):  # what stands above a command that is left out
        shown.pop()
    left = sum(not line.startswith("# ") for line in every[len(shown) :])
    return (*shown, f"# and {left} more commands: nccl-doctor report fixes prints them")


def _commands(fix: Fix) -> tuple[object, ...]:
    """The commands without their hosts: equal for fixes that are said together."""
    steps = tuple(replace(step, on=()) for step in fix.steps)
    return (steps or str(fix), *map(_commands, fix.alternatives))


def _more(step: Step) -> str:
    note = safe(step.note)
    return f"{'' if lasts(step) else ', until it restarts'}{f': {note}' if note else ''}"


def is_for_shell(step: Step) -> bool:
    """True if a command is for the shell that starts the job, and for nothing else."""
    return step.command.startswith(_IN_SHELL)


def lasts(step: Step) -> bool:
    """True if what a command does outlives the next start of the host, if it does anything."""
    return step.persists or step.shows or is_for_shell(step) or step.command.startswith("#")


def typed(command: str) -> str:
    """A command as a line; one that is more than a line of plain text becomes a comment."""
    same = lines(command) == command and len(command.splitlines()) == 1
    return command if same else f"# {safe(command)}"


def ranges_to_type(names: Iterable[str]) -> str:
    """Names of hosts as people write them: a few one by one, many as `gpu[001-064]`."""
    given = list(dict.fromkeys(names))
    if len(given) <= _FEW:
        return ", ".join(map(safe, given))
    numbers: dict[tuple[str, int], list[int]] = {}
    parts: dict[str, None] = {}
    for name in map(safe, given):
        found = _NUMBERED.fullmatch(name)
        if found is None:
            parts[name] = None
        else:
            numbers.setdefault((found[1], len(found[2])), []).append(int(found[2]))
    for (stem, width), each in numbers.items():
        spans = _spans(sorted(each))
        said = ",".join(f"{a:0{width}}" + (f"-{b:0{width}}" if b > a else "") for a, b in spans)
        parts[f"{stem}[{said}]" if len(each) > 1 else stem + said] = None
    return ", ".join(parts)


def _spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


# What a report says, in blocks that each format lays out in its own way.


@dataclass(frozen=True)
class FindingBlock:
    """One finding, and its place in words."""

    finding: Finding
    where: str

    @property
    def doubt(self) -> str:
        """The confidence, to stand behind the message; empty where it is certain."""
        sure = self.finding.confidence.value
        return "" if sure == "certain" else f" ({sure})"

    @property
    def head(self) -> str:
        """Code and place: what a line about it begins with."""
        return f"{self.finding.code}{f' ({self.where})' if self.where else ''}"


@dataclass(frozen=True)
class KindBlock:
    """All findings of one kind, and in words the first of them, how many more, and their fixes."""

    kind: Kind
    level: Severity
    findings: Sequence[Finding]
    first: tuple[FindingBlock, ...]
    more: str
    fixes: tuple[Block, ...]

    @property
    def titles(self) -> list[str]:
        """The cause, where the facts show it, and the title of the kind."""
        return [*filter(None, [self.findings[0].cause]), self.kind.title]


class Story:
    """The findings of a report by what they are in it, and blocks of them.

    `warnings` are all that nothing explains, and that are no causes; `ranges`: as in `PlaceWords`.
    """

    def __init__(self, report: Report, *, ranges: bool = False) -> None:
        self.report = report
        self.places, self.steps = PlaceWords(report, ranges=ranges), Steps(report)
        self.causes = report.root_causes
        loud = [found for found in report.findings if found.level is not Severity.INFO]
        self.notes = [found for found in report.findings if found.level is Severity.INFO]
        self.victims = [found for found in loud if found.explained_by]
        known = {(found.code, found.level) for found in self.causes}
        left = [found for found in loud if not found.explained_by]
        self.warnings = [found for found in left if (found.code, found.level) not in known]

    @property
    def headline(self) -> str:
        """First line: of a failure the first cause, and how many more there are."""
        report = self.report
        if report.verdict != "fail" or report.run.source or not self.causes:
            return report.summary
        first, *rest = headlines(self.causes)
        more = f"; and {len(rest)} more problem{'s' if len(rest) > 1 else ''}" if rest else ""
        return first + more

    def untold(self, block: KindBlock) -> list[str]:
        """Titles of a block that the first line does not say: each is read once."""
        is_first = self.causes and block.findings[0] is self.causes[0]
        return [each for each in block.titles if not (is_first and each in self.headline)]

    def of(self, finding: Finding) -> FindingBlock:
        """One finding."""
        return FindingBlock(finding, self.places.say(finding.where))

    def kinds(self, findings: Iterable[Finding], most: int = MOST_PLACES) -> list[KindBlock]:
        """The findings by kind; of each kind, `most` stand one by one."""
        return [
            KindBlock(
                group[0].kind,
                group[0].level,
                group,
                tuple(map(self.of, group[:most])),
                and_more(len(group) - most),
                tuple(self.steps.blocks(group, most)),
            )
            for group in by_kind(findings)
        ]

    def explained(
        self, name: Callable[[str], str] = str, words: Callable[[str], str] = str
    ) -> Iterator[tuple[FindingBlock, str]]:
        """One finding at the places of all, and what explains them, for each kind of victims;
        `name`, `words`: as in `explained_by`.
        """
        for group in by_kind(self.victims):
            where = Where.union(finding.where for finding in group)
            yield self.of(group[0].replaced(where=where)), explained_by(group, name, words)


def fix_of(finding: Finding) -> str:
    """The fix of a finding, or else that of its kind."""
    return finding.fix or finding.kind.fix


def outcomes(report: Report) -> Iterator[tuple[str, Rank | None, str, str, Outcome]]:
    """Every outcome, of hosts and then of ranks: label of the host, rank, check, round, outcome."""
    places: list[tuple[str, Rank | None, Facts]] = [
        *((host.label, None, host.facts) for host in report.cluster.hosts),
        *((rank.host.label, rank, rank.facts) for rank in report.cluster.ranks),
    ]
    for label, rank, facts in places:
        for check, rounds in facts.items():
            for name, outcome in rounds.items():
                yield label, rank, check, name, outcome


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
    cluster, alone, took = report.cluster, report.run.alone, report.run.duration_s
    parts = [
        f"checks: {', '.join(numbers) or 'none'}",
        _reported(cluster.hosts, "host", len(cluster.hosts) if alone else cluster.hosts_wanted),
        _reported(cluster.ranks, "rank", len(cluster.ranks) if alone else cluster.ranks_wanted),
        *([] if took is None else [f"{took:.1f} s"]),
    ]
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
    damaged = report.run.extra.get("damaged")
    if damaged and isinstance(damaged, list):
        parts.insert(1, f"not read: {'; '.join(map(str, damaged))}")
    for name, words in (("before", "examined before the job"), ("after", "after it")):
        examined = report.run.extra.get(name)
        if isinstance(examined, Mapping):
            parts.insert(-1, f"{words}: {str(examined.get('verdict')).upper()}")
    return " · ".join([*parts, f"exit code {report.exit_code}"])


def _reported(items: Sequence[Host | Rank], thing: str, wanted: int) -> str:
    """Number of those that reported, of those that the user asked for."""
    here = sum(item.reported for item in items)
    total = max(here, wanted)
    if here == total:
        return f"{here} {thing}{'' if here == 1 else 's'}"
    return f"{here} of {total} {thing}s"


# Sections that the installed checks show of a report, beside its findings.
#
# A renderer that wants it is given a function that finds the checks, as `registry.installed`: the
# renderer itself stays a pure function of the report and of their rules, and of a renderer that
# needs no check none is imported.


Checks = Callable[[], Iterable[Check]]
"""Finds the checks that are asked."""


def no_checks() -> tuple[Check, ...]:
    """No checks: then only the findings are shown."""
    return ()


def as_long_as_it_works(show: Callable[[], Iterable[T]], *what: type) -> Iterator[T]:
    """All of these types that a check shows; one that breaks, as on the facts of another version,
    loses nothing that it showed before, and costs the others nothing.
    """
    with suppress(Exception):
        yield from (each for each in show() if isinstance(each, what))


def sections_of(report: Report, checks: Checks) -> list[Section]:
    """Sections that each check shows of this report's facts."""
    return [
        section
        for check in checks()
        for section in as_long_as_it_works(partial(check.sections, report.cluster), HostLink, Setup)
    ]


def setups_of(sections: Iterable[Section]) -> dict[str, list[Setup]]:
    """The set-ups among the sections, by name."""
    found: dict[str, list[Setup]] = defaultdict(list)
    for each in sections:
        if isinstance(each, Setup):
            found[each.name].append(each)
    return found


# The healthy summary, of a run without a failure: what was measured, one line for each area. Pure.
#
# It is made of what the checks show of a report (`Check.sections`, `Check.figures`): no check is
# known by name here.


MOST_RANKS = 16_384
"""Ranks up to which checks are asked: for more, it would take too long."""
_SOFTWARE = ("torch", "cuda", "rocm", "nccl", "nccl loaded", "driver", "python", "deepspeed")
_MOST_WORDS = 3


def healthy_summary(report: Report, checks: Checks) -> list[tuple[str, str]]:
    """Areas, each with what was seen there; what is not known is left out. Nothing of a failure, or
    of what was no examination of a cluster.
    """
    healthy = report.verdict in ("pass", "warn") and not (report.run.alone or report.run.source)
    if not healthy or len(report.cluster.ranks) > MOST_RANKS:
        return []
    sections = sections_of(report, checks)
    setups = setups_of(sections)
    areas = (
        ("software", list(_software(setups))),
        ("GPUs", _texts(each for each in setups["gpus"] if each.value != "none")),
        ("network", [*_interfaces(setups["interface"], report.cluster.backend), *_pairs(sections)]),
        ("results", _texts(setups["results"])),
        ("speed", _texts(setups["speed"])),
    )
    return [(area, " · ".join(words)) for area, words in areas if words]


def values(report: Report, checks: Checks) -> list[tuple[str, str]]:
    """Name and value of all that the checks measured or list; of many places, the range."""
    found: dict[tuple[str, str, str], list[Figure]] = defaultdict(list)
    if len(report.cluster.ranks) > MOST_RANKS:
        return []
    for check in checks():
        for figure in as_long_as_it_works(partial(check.figures, report.cluster), Figure):
            if figure.value is not None:
                found[check.name, figure.name, figure.unit].append(figure)
    return [(name, _value(figures, unit)) for (_, name, unit), figures in found.items()]


def _value(figures: Sequence[Figure], unit: str) -> str:
    numbers = [f.value for f in figures if isinstance(f.value, (int, float))]
    if len(numbers) == len(figures):
        many = f" ({len(figures)} places)" if len(figures) > 1 else ""
        return span_text(numbers, lambda number: amount_text(number, unit)) + many
    return _some(str(figure.value) for figure in figures)


def _software(setups: dict[str, list[Setup]]) -> Iterator[str]:
    """Versions; of the NCCL that is built in, only if no other one is known to be loaded."""
    for name in _SOFTWARE:
        said = setups.get(name)
        if said and not (name == "nccl" and setups.get("nccl loaded")):
            yield f"{'nccl' if name == 'nccl loaded' else name} {_some(_words(said))}"


def _texts(said: Iterable[Setup]) -> list[str]:
    words = list(_words(said))
    return [_some(words)] if words else []


def _words(said: Iterable[Setup]) -> Iterator[str]:
    return (each.value for each in said if isinstance(each.value, str))


def _interfaces(said: Sequence[Setup], backend: str) -> Iterator[str]:
    """Names and MTUs of the interfaces that the backend of the job uses."""
    tables = [each.value for each in said if not isinstance(each.value, str)]
    used = [one for one in tables if any(str(r).startswith(backend) for r in one.get("roles", ()))]
    names = [f"{one.get('interface')} MTU {one.get('mtu')}" for one in used]
    if names:
        yield _some(names)


def _pairs(sections: Iterable[Section]) -> Iterator[str]:
    """Round trips and bandwidths between hosts, the best of each link."""
    times: dict[tuple[int, int], float] = {}
    rates: dict[tuple[int, int], float] = {}
    for each in sections:
        if isinstance(each, HostLink):
            key = (each.start, each.end)
            if each.rtt_us is not None:
                times[key] = min(each.rtt_us, times.get(key, each.rtt_us))
            if each.rate is not None:
                rates[key] = max(each.rate, rates.get(key, 0.0))
    if times:
        yield f"round trip {span_text(times.values(), lambda us: time_text(us * 1e-6))}"
    if rates:
        text = span_text(rates.values(), bits_text)
        yield f"{text} over {len(rates)} link{'s' if len(rates) > 1 else ''}"


def _some(texts: Iterable[str]) -> str:
    """The texts, each once, the most frequent first; of many, the number of the others."""
    ordered = [text for text, _ in Counter(texts).most_common()]
    more = and_more(len(ordered) - _MOST_WORDS)
    return ", ".join(ordered[:_MOST_WORDS]) + (more and f" {more}")


# The same fix for each tool: texts in `recipes/`, which `explain` prints with a code.
#
# The first line of a text says which codes it is for; what follows is Markdown, commands
# indented.


_CODES = "codes:"
_TOOL = re.compile(r"firewalld|ufw|iptables|nft|AWS|Azure|Google Cloud|Kubernetes")
"""Beginning of what a recipe says for one tool."""
_WHOSE = "Whose rule is it?"
"""Beginning of what is of no use where the tool is known."""


def recipe_for(code: str, tool: str = "") -> str:
    """Text of the recipe for a code; empty where there is none. `tool`: only what is for all, and
    for this one of the firewalls (`nft`).
    """
    text = next((text for codes, text in recipes() if code in codes), "")
    if not (tool and re.search(rf"^{tool}\b", text, re.MULTILINE)):
        return text
    kept, here = [], ""
    for block in text.split("\n\n"):
        if begins := _TOOL.match(block):
            here = begins[0]
        if block.startswith(_WHOSE):
            here = _WHOSE  # and the commands below it
        elif here == _WHOSE and not block.startswith(" "):
            here = ""
        if here in ("", tool):
            kept.append(block)
    return "\n\n".join(kept)


def recipes() -> list[tuple[tuple[str, ...], str]]:
    """Every recipe: the codes that it is for, and its text."""
    found = []
    folder = files(__package__).joinpath("recipes")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".md"):
            first, _, text = file.read_text(encoding="utf-8").partition("\n")
            found.append((tuple(first.removeprefix(_CODES).split()), text.strip()))
    return found
