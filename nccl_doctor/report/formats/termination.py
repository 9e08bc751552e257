"""The report as 3 KiB of text, for the termination message of a container.

Kubernetes keeps 4 KiB of such a message, and 12 KiB of all containers of a pod together. Where
nothing failed there is none: it would stand in the way of the log that Kubernetes shows in its
place when the job itself fails (`terminationMessagePolicy: FallbackToLogsOnError`).
"""

from __future__ import annotations

from collections.abc import Iterator

from nccl_doctor.model.findings import Status
from nccl_doctor.model.report import Report
from nccl_doctor.report.story import Story, checks_in_words, fix_of
from nccl_doctor.system.terminal import safe

MOST_BYTES = 3072
"""Of the message, as UTF-8."""
_MOST_OF_ONE = 600
"""Bytes of one sentence: the first finding is whole in place and fix, however long it is."""
_MORE_BYTES = 40
"""For the line that says how much was left out."""


def render(report: Report) -> str:
    """The verdict, then the findings, worst first, as plain text; nothing with exit code 0.

    A finding is there with its place and its fix, or not at all; the last line says how many are
    left out.
    """
    if report.exit_code == 0:
        return ""
    message = _cut(f"nccl-doctor: {report.verdict.upper()}: {report.summary}") + "\n"
    entries = list(_entries(report))
    for done, entry in enumerate(entries):
        if len((message + entry).encode()) > MOST_BYTES - _MORE_BYTES:
            return f"{message}and {len(entries) - done} more\n"
        message += entry
    return message


def _entries(report: Report) -> Iterator[str]:
    story, last = Story(report), ""
    for each in map(story.of, story.causes or story.warnings):
        lines = [f"{each.head}: {each.finding.message}{each.doubt}"]
        fix = fix_of(each.finding)
        lines += [f"  fix: {fix}"] if fix != last else []
        last = fix
        yield "".join(f"{_cut(line)}\n" for line in lines)
    for (status, reason), names in report.gaps().items():
        if status is Status.UNKNOWN:
            yield _cut(f"not tested: {checks_in_words(names)}: {reason}") + "\n"


def _cut(text: str) -> str:
    """One line of at most so many bytes; leading blanks stay."""
    blanks = text[: len(text) - len(text.lstrip())]
    start = text[: 2 * _MOST_OF_ONE]  # the rest need not be looked at
    line = blanks + safe(start)
    if start == text and len(line.encode()) <= _MOST_OF_ONE:
        return line
    return line.encode()[: _MOST_OF_ONE - 3].decode(errors="ignore") + "…"
