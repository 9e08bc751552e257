"""The report as Markdown, for a pull request, an issue, a chat, or the summary of a CI job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nccl_doctor.model.findings import Finding, Severity, Status, Where
from nccl_doctor.model.report import Report
from nccl_doctor.report.story import (
    MOST_PLACES,
    Block,
    PlaceWords,
    Steps,
    by_kind,
    checks_in_words,
    explained_by,
)
from nccl_doctor.report.text import counts
from nccl_doctor.system.terminal import safe

_LONGEST = 2000
"""Characters of one text that are shown."""
_MARKS = {"pass": "✅", "warn": "⚠️", "fail": "❌", "unknown": "❓"}
_SPECIAL = re.compile(r"[\\`*_{}\[\]<>()|~&!$]")
_REFERS = re.compile(r"@|#|://|www")
"""What GitHub and GitLab make people, issues and links of, escaped or not."""


def render(report: Report) -> str:
    """The verdict, then a section for each thing to fix, in the Markdown of GitHub and GitLab.

    Nothing in the report is trusted: what was observed stands in code, where nothing is markup, and
    other words are escaped, so that a host name can neither notify anybody nor load a picture.
    """
    return "\n".join(sections(report))


def sections(report: Report) -> list[str]:
    """Parts of `render`; each can be shown without those after it, and ends in a newline."""
    places, steps = PlaceWords(report), Steps(report)
    mark = _MARKS.get(report.verdict, "")
    top = f"## {mark} nccl-doctor: {report.verdict.upper()}\n\n{prose(report.summary)}\n"
    roots = [_root_cause(places, steps, group) for group in by_kind(report.root_causes)]
    rest = [_explained(places, report), _warnings(places, steps, report), _not_tested(report)]
    return [top, *roots, *filter(None, rest), f"{prose(counts(report))}\n"]


def prose(text: str) -> str:
    """Text without markup: no formatting, no reference, no notification."""
    words = _SPECIAL.sub(r"\\\g<0>", safe(text)[:_LONGEST])
    return _REFERS.sub(r"\g<0><!-- -->", words)


def code(text: str) -> str:
    """A code span, whatever back-ticks the text holds."""
    words = safe(text)[:_LONGEST] or " "
    fence = _fence(words, 1)
    edge = " " if words[0] == "`" or words[-1] == "`" else ""
    return f"{fence}{edge}{words}{edge}{fence}"


def _fence(words: str, least: int) -> str:
    return "`" * max(least, 1 + max(map(len, re.findall("`+", words)), default=0))


def _block(block: Block) -> str:
    fence = _fence(block.text, 3)
    rows = [f"  {line[:_LONGEST]}\n" for line in block.text.split("\n")]
    return f"  {fence}{'bash' if block.lines else 'text'}\n{''.join(rows)}  {fence}\n"


def _root_cause(places: PlaceWords, steps: Steps, group: Sequence[Finding]) -> str:
    kind = group[0].kind
    mark = "⚠️" if group[0].level is Severity.WARN else "❌"
    lines = [f"### {mark} {prose(kind.title)} {code(kind.code)}\n\n"]
    for finding in group[:MOST_PLACES]:
        where = places.say(finding.where)
        if where:
            lines.append(f"- **where** {code(where)}\n")
        lines.append(f"- **seen** {code(finding.message)}{_doubt(finding)}\n")
    if len(group) > MOST_PLACES:
        lines.append(f"- and {len(group) - MOST_PLACES} more like this\n")
    if kind.why:
        lines.append(f"- **why** {prose(kind.why)}\n")
    for block in steps.blocks(group, MOST_PLACES):
        lines.append(f"- **fix**\n\n{_block(block)}")
    return "".join(lines)


def _doubt(finding: Finding) -> str:
    sure = finding.confidence.value
    return "" if sure == "certain" else f" ({sure})"


def _place(places: PlaceWords, where: Where) -> str:
    words = places.say(where)
    return f" {code(words)}" if words else ""


def _list(title: str, lines: Iterable[str]) -> str:
    text = "".join(f"- {line}\n" for line in lines)
    return f"### {title}\n\n{text}" if text else ""


def _explained(places: PlaceWords, report: Report) -> str:
    explained = [f for f in report.findings if f.explained_by and f.level is not Severity.INFO]
    lines = []
    for group in by_kind(explained):
        where = Where.union(finding.where for finding in group)
        lines.append(
            f"{code(group[0].code)}{_place(places, where)}: {explained_by(group, code, prose)}"
        )
    return _list("Explained by the above, gone when it is fixed", lines)


def _warnings(places: PlaceWords, steps: Steps, report: Report) -> str:
    roots = {(finding.code, finding.level) for finding in report.root_causes}
    lines = []
    for group in by_kind(f for f in report.findings if not f.explained_by):
        if group[0].level is not Severity.WARN or (group[0].code, group[0].level) in roots:
            continue
        for finding in group[:MOST_PLACES]:
            words = f"{code(finding.message)}{_doubt(finding)}"
            head = f"{code(finding.code)}{_place(places, finding.where)}"
            blocks = steps.blocks([finding], 1)
            if any(block.lines for block in blocks):
                lines.append(f"{head}: {words}; fix:\n\n{''.join(map(_block, blocks))}")
            else:
                fix = code(finding.fix or finding.kind.fix)
                lines.append(f"{head}: {words}; fix: {fix}")
        if len(group) > MOST_PLACES:
            lines.append(f"and {len(group) - MOST_PLACES} more {code(group[0].code)}")
    return _list("Warnings", lines)


def _not_tested(report: Report) -> str:
    gaps: dict[str, list[str]] = {}
    for check in report.checks:
        if check.status in (Status.UNKNOWN, Status.BLOCKED):
            gaps.setdefault(check.reason or check.status.value, []).append(check.name)
    lines = (
        f"{checks_in_words([code(name) for name in names])}: {code(reason)}"
        for reason, names in gaps.items()
    )
    return _list("Not known to be good", lines)
