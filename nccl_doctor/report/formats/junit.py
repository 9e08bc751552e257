"""The report as JUnit XML, for CI servers: in the subset that Jenkins, GitLab and GitHub read.

A case is one check at one place, and one more case, `nccl_doctor.verdict`, is the whole report: it
fails wherever the exit code is not 0, so that no reader takes for green what is not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from xml.etree import ElementTree

from nccl_doctor.model.cluster import OutcomeStatus
from nccl_doctor.model.findings import CheckResult, Finding, Severity, Status
from nccl_doctor.model.report import Report
from nccl_doctor.report.story import Story, and_more, explained_by, outcomes, shortened, some
from nccl_doctor.system.terminal import safe

_LONGEST_NAME = 200
_LONGEST = 4000
"""Characters of one text. GitLab reads files of up to 30 MB."""
_MOST_CASES = 64
"""Places of one check that have a case each."""
_MOST = 20
"""Findings that one case writes out."""
_NO_XML = re.compile("[\ufffe\uffff]")
"""What XML 1.0 forbids beside the control characters and surrogates that `safe` writes out."""
_GAP = {Status.UNKNOWN: "error", Status.BLOCKED: "skipped", Status.SKIPPED: "skipped"}
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}")


@dataclass(frozen=True)
class _Case:
    """`outcome` is the element that says why it did not pass; empty where it did."""

    classname: str
    name: str
    seconds: float = 0.0
    outcome: str = ""
    type: str = ""
    message: str = ""
    text: str = ""
    out: str = ""


def render(report: Report) -> str:
    """One suite, never empty: ASCII, with no character that XML forbids, no name twice.

    A `fail` is a failure; a warning is one with `--strict` only, else a passing case says it in its
    output. `unknown` is an error. `blocked` and `skipped`, and a failure that another one explains,
    are skipped. Classnames are `LAYER.CHECK`, names `CHECK[PLACE]`.
    """
    ground = _Ground(report)
    cases = _unique(
        [_verdict(report), *_of_checks(report, ground), *_of_the_engine(report, ground)]
    )
    counts = {name: str(sum(case.outcome == name for case in cases)) for name in _ELEMENTS}
    total = {
        "name": "nccl-doctor",
        "tests": str(len(cases)),
        "failures": counts["failure"],
        "errors": counts["error"],
        "skipped": counts["skipped"],
        "time": _seconds(report.run.duration_s),
    }
    # Jenkins' xUnit refuses a file whose root counts what was skipped.
    root = ElementTree.Element("testsuites", {k: v for k, v in total.items() if k != "skipped"})
    suite = ElementTree.SubElement(root, "testsuite", {**total, **_origin(report)})
    for case in cases:
        _add(suite, case)
    ElementTree.indent(root, " ")
    text = ElementTree.tostring(root, encoding="us-ascii").decode("ascii")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


_GOOD = (OutcomeStatus.OK, OutcomeStatus.SKIPPED)
_ELEMENTS = ("failure", "error", "skipped")


def _origin(report: Report) -> dict[str, str]:
    """Time and place: a time without its zone, as Ant writes it, and rank 0's host."""
    started = _TIME.match(report.run.started or "")
    first = [rank.host.name for rank in report.cluster.ranks if rank.rank == 0 and rank.host.name]
    return {
        **({"timestamp": started[0]} if started else {}),
        **({"hostname": _clean(first[0])} if first else {}),
    }


def _add(suite: ElementTree.Element, case: _Case) -> None:
    attributes = {"classname": case.classname, "name": case.name, "time": f"{case.seconds:.3f}"}
    element = ElementTree.SubElement(suite, "testcase", attributes)
    if case.outcome:
        why = {"type": _clean(case.type), "message": _clean(case.message)}
        inner = ElementTree.SubElement(element, case.outcome, why)
        inner.text = _lines(case.text) or None
    if case.out:
        ElementTree.SubElement(element, "system-out").text = _lines(case.out)


def _clean(text: str) -> str:
    """One line that XML can hold, whatever a host or a message is called."""
    return _NO_XML.sub(lambda found: f"\\u{ord(found[0]):04x}", safe(text))[:_LONGEST]


def _lines(text: str) -> str:
    return "\n".join(_clean(line) for line in text.split("\n"))


def _seconds(value: float | None) -> str:
    good = value is not None and 0 <= value < float("inf")
    return f"{value:.3f}" if good else "0.000"


def _unique(cases: Iterable[_Case]) -> list[_Case]:
    """GitLab drops the second case of a name."""
    seen: set[tuple[str, str]] = set()
    out = []
    for case in cases:
        classname, name = _clean(case.classname), _clean(case.name)[:_LONGEST_NAME]
        first, number = name, 1
        while (classname, name) in seen:
            number += 1
            name = f"{first} ({number})"
        seen.add((classname, name))
        out.append(replace(case, classname=classname, name=name))
    return out


def _verdict(report: Report) -> _Case:
    outcome = {0: "", 1: "failure"}.get(report.exit_code, "error")
    words = f"{report.verdict.upper()}: {report.summary}"
    return _Case(
        "nccl_doctor.verdict",
        "verdict",
        outcome=outcome,
        type=report.verdict,
        message=words,
        text=f"exit code {report.exit_code}" if outcome else "",
        out="" if outcome else words,
    )


def _of_checks(report: Report, ground: _Ground) -> Iterator[_Case]:
    found: dict[str, list[Finding]] = defaultdict(list)
    for finding in report.findings:
        found[finding.check].append(finding)
    strict = report.run.strict
    for check in report.checks:
        classname = f"{check.layer.value}.{check.name}"
        findings = found[check.name]
        if check.status in _GAP:
            yield _Case(
                classname,
                check.name,
                check.duration_s,
                _GAP[check.status],
                check.status.value,
                check.reason or check.status.value,
                out=_in_words(ground, findings),
            )
            continue
        by_place = ground.cases(check, findings)
        folded = _folded(by_place, partial(ground.is_gap, check))
        for key, here, is_gap in folded:
            name = f"{check.name}[{key}]" if key else check.name
            seconds = check.duration_s / len(folded)
            if is_gap:
                yield _Case(classname, name, seconds, "skipped", "unknown", check.reason)
            else:
                case = _Case(classname, name, seconds)
                yield _judged(case, ground, here, strict=strict)


def _folded(
    by_place: Mapping[str, Sequence[Finding]], has_gap: Callable[[str], bool]
) -> list[tuple[str, Sequence[Finding], bool]]:
    """Place, findings, and whether it has no whole answer, for each case of one check.

    Of many places, those where nothing was found are one case, and so are those where the very same
    was found; of the others, so many have cases of their own.
    """
    if len(by_place) <= _MOST_CASES:
        return [(key, here, not here and has_gap(key)) for key, here in by_place.items()]
    bad: dict[tuple[int, ...], list[str]] = {}
    for key, here in by_place.items():
        if here:
            bad.setdefault(tuple(map(id, here)), []).append(key)
    places = list(bad.values())
    shown, left = places[:_MOST_CASES], [key for keys in places[_MOST_CASES:] for key in keys]
    cases = [(shortened(keys, ", ".join), by_place[keys[0]], False) for keys in shown]
    if left:
        cases.append((f"{len(left)} other places", [f for k in left for f in by_place[k]], False))
    good = [key for key, here in by_place.items() if not here]
    open_ = [key for key in good if has_gap(key)]
    for words, count, is_gap in (
        ("hosts that are not verified", len(open_), True),
        ("all other hosts", len(good) - len(open_), False),
    ):
        cases += [(words, (), is_gap)] if count else []
    return cases


def _of_the_engine(report: Report, ground: _Ground) -> Iterator[_Case]:
    """Cases that belong to no check of this report: the examination, or a plug-in gone since."""
    names = {check.name for check in report.checks}
    for finding in report.findings:
        if finding.check not in names:
            classname = f"{finding.kind.layer.value}.{finding.check or 'nccl_doctor'}"
            place = ground.story.places.say(finding.where)
            name = f"{finding.code}[{place}]" if place else finding.code
            yield _judged(_Case(classname, name), ground, [finding])


def _judged(
    case: _Case, ground: _Ground, findings: Sequence[Finding], *, strict: bool = False
) -> _Case:
    """The case with what was found there: the worst of it decides."""
    worst = Severity.WARN if strict else Severity.FAIL
    by_level = sorted(findings, key=lambda finding: finding.level.order)
    bad = [finding for finding in by_level if finding.level.order <= worst.order]
    case = replace(case, out=_in_words(ground, by_level[len(bad) :]))
    if not bad:
        return case
    causes = [finding for finding in bad if not finding.explained_by]
    first = (causes or bad)[0]
    why = "" if causes else f"{explained_by([first])}. "
    return replace(
        case,
        outcome="failure" if causes else "skipped",
        type=first.code,
        message=f"{why}{first.kind.title}: {first.message}",
        text=_in_words(ground, causes or bad),
    )


def _in_words(ground: _Ground, findings: Sequence[Finding]) -> str:
    parts = []
    for block in (ground.story.kinds([finding])[0] for finding in findings[:_MOST]):
        kind, each = block.kind, block.first[0]
        rows = {"where": each.where, "seen": each.finding.message, "why": kind.why}
        lines = [f"{block.level.value}: {kind.title} [{kind.code}]"]
        lines += [f"{key}: {value}" for key, value in rows.items() if value]
        lines += [line for fix in block.fixes for line in fix.told]
        parts.append("\n".join(map(_clean, lines)))
    parts += filter(None, [and_more(len(findings) - _MOST)])
    return "\n\n".join(parts)


class _Ground:
    """The hosts of a report: which one a rank is on, and where a check has no answer."""

    def __init__(self, report: Report) -> None:
        self.story = Story(report)
        self._of_rank: dict[str, list[str]] = defaultdict(list)
        self._gaps = {
            (check, host)
            for host, _, check, _, outcome in outcomes(report)
            if outcome.status not in _GOOD
        }
        for rank in report.cluster.ranks:
            unit = f"seat {rank.seat}" if rank.rank is None else str(rank.rank)
            self._of_rank[unit].append(rank.host.label)

    def cases(self, check: CheckResult, findings: Iterable[Finding]) -> dict[str, list[Finding]]:
        """Place → what the check found there: every host that it examined, then other places."""
        out: dict[str, list[Finding]] = {}
        for unit in check.tested:
            for name in [unit] if check.scope.value == "host" else self._of_rank.get(unit, [unit]):
                out.setdefault(name, [])
        for finding in findings:
            for key in self._keys(finding):
                out.setdefault(key, []).append(finding)
        return out or {"": []}

    def is_gap(self, check: CheckResult, key: str) -> bool:
        """True if the check failed elsewhere, and has no whole answer from this host."""
        return check.status is Status.FAIL and (check.name, key) in self._gaps

    def _keys(self, finding: Finding) -> list[str]:
        where = finding.where
        on = [name for rank in where.ranks for name in self._of_rank.get(str(rank), ())]
        hosts = where.hosts or tuple(on)
        nodes = [] if hosts else [f"node {node}" for node in where.nodes]
        links = [] if hosts or nodes else [f"{start} → {end}" for start, end in where.links]
        keys = list(dict.fromkeys([*hosts, *nodes, *links]))
        return keys or [", ".join(some(where.devices or where.interfaces))]
