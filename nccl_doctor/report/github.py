"""The report for GitHub Actions: annotations of the run, and the summary of the step.

GitHub keeps ten annotations of a kind from one step and drops the rest without a word, and refuses
a step summary of more than 1 MiB: so findings are merged by code, the worst first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nccl_doctor.model.findings import Severity
from nccl_doctor.model.report import Report
from nccl_doctor.report.formats.markdown import sections
from nccl_doctor.report.story import Checks, KindBlock, Story, no_checks, some
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
    story = Story(report)
    errors: list[str] = []
    warnings: list[str] = []
    for block in story.kinds([*story.causes, *story.warnings]):
        kept = errors if block.level is Severity.FAIL else warnings
        kept.append(_annotation(story, block))
    if report.exit_code and not errors:
        title = _property(f"nccl-doctor: {report.verdict.upper()}")
        errors.append(f"title={title}::{_data([report.summary])}")
    lines = [f"::error {text}" for text in _most(errors)]
    return "".join(f"{line}\n" for line in [*lines, *(f"::warning {t}" for t in _most(warnings))])


def summary(report: Report, room: int = ROOM, checks: Checks = no_checks) -> str:
    """The report as Markdown in at most `room` bytes of UTF-8; whole sections, from the first."""
    parts = sections(report, checks)
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


def _annotation(story: Story, block: KindBlock) -> str:
    """Properties and message of one command, for all findings of a code."""
    kind = block.kind
    places = (story.places.say(found.where) for found in block.findings)
    where = list(dict.fromkeys(filter(None, places)))
    lines = [f"where: {'; '.join(some(where))}"] if where else []
    lines += [f"seen: {each.finding.message}{each.doubt}" for each in block.first]
    lines += [f"{block.more} like this"] if block.more else []
    lines += [line for fix in block.fixes for line in fix.told]
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
