"""The report as Markdown: for a pull request, an issue, a chat, or the summary of a CI job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from nccl_doctor.model.findings import Severity
from nccl_doctor.model.report import Report
from nccl_doctor.report.next_step import NextStep, next_steps
from nccl_doctor.report.story import (
    NOT_VERIFIED,
    Block,
    Checks,
    FindingBlock,
    KindBlock,
    Story,
    checks_in_words,
    counts,
    fix_of,
    healthy_summary,
    no_checks,
)
from nccl_doctor.system.terminal import safe

_LONGEST = 2000
"""Characters of one text that are shown."""
_MARKS = {"pass": "✅", "warn": "⚠️", "fail": "❌", "unknown": "❓"}
_SPECIAL = re.compile(r"[\\`*_{}\[\]<>()|~&!$]")
_REFERS = re.compile(r"@|#|://|www")
"""What GitHub and GitLab make people, issues and links of, escaped or not."""


def render(report: Report, checks: Checks = no_checks) -> str:
    """The verdict, then a section for each thing to fix, in the Markdown of GitHub and GitLab.

    Nothing in the report is trusted: what was observed stands in code, where nothing is markup, and
    other words are escaped, so that a host name can neither notify anybody nor load a picture.
    """
    return "\n".join(sections(report, checks))


def sections(report: Report, checks: Checks = no_checks) -> list[str]:
    """Parts of `render`; each can be shown without those after it, and ends in a newline."""
    story = Story(report)
    mark = _MARKS.get(report.verdict, "")
    top = f"## {mark} nccl-doctor: {report.verdict.upper()}\n\n{prose(story.headline)}\n"
    measured = [f"**{area}** {code(words)}" for area, words in healthy_summary(report, checks)]
    explained = (f"{_head(each)}: {why}" for each, why in story.explained(code, prose))
    gaps = (
        f"{checks_in_words([code(name) for name in names])}: {code(reason)}"
        for (_, reason), names in report.gaps().items()
    )
    rest = [
        _list("Explained by the above, gone when it is fixed", explained),
        _list("Warnings", _warnings(story)),
        _list(NOT_VERIFIED, gaps),
    ]
    causes = [_cause(block, story.untold(block)) for block in story.kinds(story.causes)]
    parts = [top, _bullets(measured), *causes, *rest]
    last = [prose(counts(report)), *map(_next, next_steps(report))]
    return [*filter(None, parts), *(f"{line}\n" for line in last)]


def _next(step: NextStep) -> str:
    typed = code(step.command) if step.command else ""
    return " ".join(filter(None, ("Next:", prose(step.before), typed, prose(step.behind))))


def prose(text: str) -> str:
    """Text without markup: no formatting, no reference, no notification."""
    words = _SPECIAL.sub(r"\\\g<0>", safe(text)[:_LONGEST])
    return _REFERS.sub(r"\g<0><!-- -->", words)


def code(text: str) -> str:
    """A code span, whatever back-ticks the text holds."""
    words = safe(text)[:_LONGEST] or " "
    fence = fence_of(words, 1)
    edge = " " if words[0] == "`" or words[-1] == "`" else ""
    return f"{fence}{edge}{words}{edge}{fence}"


def fence_of(words: str, least: int) -> str:
    """Back-ticks that no text ends which they enclose."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", words)), default=0))


def _block(block: Block) -> str:
    fence = fence_of(block.text, 3)
    rows = [f"  {line[:_LONGEST]}\n" for line in block.text.split("\n")]
    return f"  {fence}{'bash' if block.lines else 'text'}\n{''.join(rows)}  {fence}\n"


def _cause(block: KindBlock, titles: Sequence[str]) -> str:
    kind = block.kind
    mark = "⚠️" if block.level is Severity.WARN else "❌"
    title, *more = map(prose, titles or [kind.title])
    lines = [f"### {mark} {title} {code(kind.code)}\n\n"]
    lines += [f"- **what** {words}\n" for words in more]
    for each in block.first:
        lines += [f"- **where** {code(each.where)}\n"] if each.where else []
        lines.append(f"- **seen** {code(each.finding.message)}{each.doubt}\n")
    lines += [f"- {block.more} like this\n"] if block.more else []
    lines += [f"- **why** {prose(kind.why)}\n"] if kind.why else []
    return "".join([*lines, *(f"- **fix**\n\n{_block(fix)}" for fix in block.fixes)])


def _head(each: FindingBlock) -> str:
    return f"{code(each.finding.code)}{f' {code(each.where)}' if each.where else ''}"


def _bullets(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def _list(title: str, lines: Iterable[str]) -> str:
    text = _bullets(lines)
    return f"### {title}\n\n{text}" if text else ""


def _warnings(story: Story) -> Iterator[str]:
    for block in story.kinds(story.warnings):
        for each in block.first:
            fixes = story.steps.blocks([each.finding], 1)
            fix = f" {code(fix_of(each.finding))}"
            if any(way.lines for way in fixes):
                fix = f"\n\n{''.join(map(_block, fixes))}"
            yield f"{_head(each)}: {code(each.finding.message)}{each.doubt}; fix:{fix}"
        if block.more:
            yield f"{block.more} {code(block.kind.code)}"
