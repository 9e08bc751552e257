"""The report for GitHub Actions: annotations of the run, and the summary of the step.

GitHub keeps ten annotations of a kind from one step and drops the rest without a word, and refuses
a step summary of more than 1 MiB: so findings are merged by code, the worst first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nccl_doctor.model.findings import Finding, Severity
from nccl_doctor.model.report import Report
from nccl_doctor.report.formats.markdown import sections
from nccl_doctor.report.story import MOST_PLACES, PlaceWords, Steps, by_kind, some
from nccl_doctor.system.terminal import inert, safe

MOST = 10
"""Most annotations of one kind that GitHub keeps from one step."""
ROOM = 1 << 20
"""Largest step summary that GitHub takes, in bytes."""
_LONGEST = 1000
_AT_START = re.compile(r"^([^\S\n]*)::", re.MULTILINE)
_REST = "\nThe rest is in the report.\n"


def commands(report: Report) -> str:
    """Workflow commands, one on a line: an error for what fails, a warning for what warns.

    What another finding explains is left out. An exit code that is not 0 always has an error.
    """
    places, steps = PlaceWords(report), Steps(report)
    errors: list[str] = []
    warnings: list[str] = []
    for group in by_kind(report.root_causes):
        kept = errors if group[0].level is Severity.FAIL else warnings
        kept.append(_annotation(places, steps, group))
    roots = {(finding.code, finding.level) for finding in report.root_causes}
    for group in by_kind(f for f in report.findings if not f.explained_by):
        if group[0].level is Severity.WARN and (group[0].code, group[0].level) not in roots:
            warnings.append(_annotation(places, steps, group))
    if report.exit_code and not errors:
        title = _property(f"nccl-doctor: {report.verdict.upper()}")
        errors.append(f"title={title}::{_data([report.summary])}")
    lines = [f"::error {text}" for text in _most(errors)]
    return "".join(f"{line}\n" for line in [*lines, *(f"::warning {t}" for t in _most(warnings))])


def summary(report: Report, room: int = ROOM) -> str:
    """The report as Markdown in at most `room` bytes of UTF-8; whole sections, from the first."""
    parts = sections(report)
    text = ""
    for i, part in enumerate(parts):
        more = text + ("\n" if text else "") + part
        rest = 0 if i + 1 == len(parts) else len(_REST)
        if len(more.encode()) + rest > room:
            return text + _REST if text else ""
        text = more
    return text


def inert_as(form: str, text: str) -> str:
    """A report in one of the formats, for the log of a step: the same report, without a command."""
    if form == "json":
        return text.replace("##[", r"##\u005b")
    if form in ("html", "junit"):
        text = _AT_START.sub(r"\g<1>&#58;:", text)
        return text.replace("##[", "##&#91;")
    return inert(text)


def _annotation(places: PlaceWords, steps: Steps, group: Sequence[Finding]) -> str:
    """Properties and message of one command, for all findings of a code."""
    kind = group[0].kind
    where = list(dict.fromkeys(filter(None, (places.say(found.where) for found in group))))
    lines = [f"where: {'; '.join(some(where))}"] if where else []
    for finding in group[:MOST_PLACES]:
        sure = finding.confidence.value
        lines.append(f"seen: {finding.message}{'' if sure == 'certain' else f' ({sure})'}")
    if len(group) > MOST_PLACES:
        lines.append(f"and {len(group) - MOST_PLACES} more like this")
    for block in steps.blocks(group, MOST_PLACES):
        lines += ["fix:", *block.lines] if block.lines else [f"fix: {block.prose}"]
    return f"title={_property(f'{kind.code}: {kind.title}')}::{_data(lines)}"


def _most(texts: Sequence[str]) -> list[str]:
    if len(texts) <= MOST:
        return list(texts)
    more = len(texts) - MOST + 1
    return [*texts[: MOST - 1], f"title=nccl-doctor::and {more} more: they are in the report"]


def _data(lines: Sequence[str]) -> str:
    return "%0A".join(inert(safe(line)[:_LONGEST]).replace("%", "%25") for line in lines)


def _property(text: str) -> str:
    words = inert(safe(text)[:_LONGEST]).replace("%", "%25")
    return words.replace(":", "%3A").replace(",", "%2C")
