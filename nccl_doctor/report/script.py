"""Shell script of the fixes of a report, to be read before it is run. Pure.

Every line but the commands of the fixes is a comment, and each host runs its own part only. What is
for every host is said once, so the script grows with the report, and not with its square.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nccl_doctor.model.commands import word
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.fixes import Fix, Step, fix_to_json
from nccl_doctor.model.report import Report
from nccl_doctor.report.story import PlaceWords, Steps, Story, fix_of, is_for_shell, lasts, typed
from nccl_doctor.system.terminal import safe

_HERE = 'case "$(uname -n)" in'


def render(report: Report, host: str | None = None) -> str:
    """The script for one host, or one in which each host finds its part; it ends in a newline.

    It has the steps of what nothing else explains, the worst first. Other ways to the same end, and
    what takes a step back, are comments.
    """
    story = Story(report)
    steps, places = story.steps, story.places
    findings = [*story.causes, *story.warnings]
    if host is not None:
        body = list(_body(steps, places, findings, host))
    else:
        unnamed = {each.label for each in report.cluster.hosts if not each.name}
        body = list(_Whole(steps, places, unnamed).lines(findings))
    lines = [*_head(report, host), *_by_hand(places, findings)]
    if not body:
        lines.append(
            "# No command is known that would fix it." if findings else "# Nothing to fix."
        )
    return "\n".join([*lines, *body]) + "\n"


def steps_to_json(report: Report, host: str | None = None) -> list[dict[str, Any]]:
    """The same findings as data, each with its fix; `host`: only those with steps on it."""
    story = Story(report)
    found = []
    for finding in (*story.causes, *story.warnings):
        fix = fix_to_json(finding, story.steps.hosts)
        steps = [step for step in fix["fix_steps"] if host is None or host in step["hosts"]]
        if host is None or steps:
            told = {"code": finding.code, "headline": finding.headline}
            found.append({**told, **fix, "fix_steps": steps})
    return found


def _head(report: Report, host: str | None) -> Iterator[str]:
    yield f"# {safe(f'nccl-doctor: {report.verdict.upper()}: {report.summary}')}"
    yield "# Read each line before you run it."
    if host is None:
        yield "# Every host may be given this whole file: it runs the part with its own name."
    else:
        yield f"# For {safe(host)} only."
    if report.redacted:
        yield "# The names in this report are pseudonyms: put the real ones in."


def _by_hand(places: PlaceWords, findings: Sequence[Finding]) -> Iterator[str]:
    """Comments on fixes without a command."""
    for finding in findings:
        fix = fix_of(finding)
        if not (isinstance(fix, Fix) and fix.steps):
            yield ""
            yield from _what(places, finding)
            yield f"# by hand: {safe(fix)}"


def _what(places: PlaceWords, finding: Finding) -> Iterator[str]:
    where = places.say(finding.where)
    place = f"{where}: " if where else ""
    yield f"# {safe(f'{finding.code}: {finding.kind.title}')}"
    yield f"# {safe(place + finding.message)}"


def _body(
    steps: Steps, places: PlaceWords, findings: Sequence[Finding], host: str
) -> Iterator[str]:
    """Lines for one host; none where it has no part in any fix."""
    for finding in findings:
        fix = fix_of(finding)
        if not isinstance(fix, Fix):
            continue
        own = _typed_on(host, steps, fix, finding)
        if own:
            yield ""
            yield from _what(places, finding)
            for step in own:
                yield from _step(step)
            for other in fix.alternatives:
                instead: list[str] = [s.command for s in _typed_on(host, steps, other, finding)]
                for line in instead or ([] if other.steps else [other]):
                    yield f"# or: {_named(line)}"


def _typed_on(host: str, steps: Steps, fix: Fix, finding: Finding) -> list[Step]:
    return [step for step in fix.steps if steps.hosts.has(step, finding.where, host)]


def _step(step: Step) -> Iterator[str]:
    if step.note:
        yield f"# {safe(step.note)}"
    if is_for_shell(step):
        yield "# for the shell that starts the job: there, read this file with `.`"
    yield typed(step.command)
    if not lasts(step):
        yield "# ends when the host starts again"
    if step.undo:
        yield f"# undo: {_named(step.undo)}"


def _named(command: str) -> str:
    """A command in a comment: without the mark of one that has a word to be replaced."""
    return safe(command.removeprefix("# "))


class _Whole:
    """The script for all hosts: finding by finding, each step where only its hosts run it."""

    def __init__(self, steps: Steps, places: PlaceWords, unnamed: set[str]) -> None:
        """`unnamed`: words for hosts without a known name, which no branch can match."""
        self._steps, self._places = steps, places
        self._every = set(steps.hosts.every) - unnamed
        self._unnamed = unnamed
        self._place = {name: at for at, name in enumerate(steps.hosts.every)}
        self._said: set[str] = set()
        """Commands that every host has been told."""
        self._for_all = False

    def lines(self, findings: Iterable[Finding]) -> Iterator[str]:
        """Lines of all findings with steps; none where there is no such finding."""
        parts = list(self._findings(findings))
        if not parts or not self._for_all:
            yield from parts
            return
        yield ""
        yield _HERE
        yield f"{_pattern(self._in_order(self._every))})"
        yield from parts
        yield from ("", ";;", "esac")

    def _findings(self, findings: Iterable[Finding]) -> Iterator[str]:
        for finding in findings:
            fix = fix_of(finding)
            turns = self._turns(fix, finding) if isinstance(fix, Fix) else []
            for_unnamed = list(self._of_unnamed(fix, finding)) if isinstance(fix, Fix) else []
            if isinstance(fix, Fix) and (turns or for_unnamed):
                yield ""
                yield from _what(self._places, finding)
                for turn in turns:
                    yield from self._turn(turn)
                yield from for_unnamed
                for other in fix.alternatives:
                    yield from self._other(other, finding)

    def _turns(self, fix: Fix, finding: Finding) -> list[list[tuple[frozenset[str], Step]]]:
        """The steps in order, with the hosts of each; those of different hosts are one turn."""
        found: list[list[tuple[frozenset[str], Step]]] = []
        seen: set[str] = set()
        for step in fix.steps:
            hosts = self._every.intersection(self._steps.hosts.of(step, finding.where))
            if not hosts:
                continue
            if found and (hosts == found[-1][-1][0] or seen.isdisjoint(hosts)):
                found[-1].append((frozenset(hosts), step))
                seen |= hosts
            else:
                found.append([(frozenset(hosts), step)])
                seen = set(hosts)
        return found

    def _turn(self, turn: Sequence[tuple[frozenset[str], Step]]) -> Iterator[str]:
        if turn[0][0] == self._every and len(self._every) > 1:
            self._for_all = True
            for _, step in turn:
                if step.command in self._said:
                    yield f"# as above: {_named(step.command)}"
                else:
                    self._said.add(step.command)
                    yield from _step(step)
            return
        branches: dict[frozenset[str], list[str]] = {}
        for hosts, step in turn:
            branches.setdefault(hosts, []).extend(_step(step))
        yield _HERE
        for hosts, lines in branches.items():
            yield f"{_pattern(self._in_order(hosts))})"
            yield from lines
            yield ";;"
        yield "esac"

    def _of_unnamed(self, fix: Fix, finding: Finding) -> Iterator[str]:
        """Comments on steps for hosts that no branch of a script can match."""
        for step in fix.steps:
            hosts = self._unnamed.intersection(self._steps.hosts.of(step, finding.where))
            if hosts:
                yield f"# {self._steps.on(self._in_order(hosts))}: {_named(step.command)}"

    def _other(self, way: Fix, finding: Finding) -> Iterator[str]:
        """Comments on another way to the same end."""
        if not way.steps:
            yield f"# or: {safe(way)}"
        for step in way.steps:
            hosts = self._every.intersection(self._steps.hosts.of(step, finding.where))
            if hosts:
                yield f"# or {self._steps.on(self._in_order(hosts))}: {_named(step.command)}"

    def _in_order(self, hosts: Iterable[str]) -> list[str]:
        return sorted(hosts, key=self._place.__getitem__)


def _pattern(names: Iterable[str]) -> str:
    return " | ".join(word(safe(name)) for name in names)
