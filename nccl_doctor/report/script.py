"""Shell script of the fixes of a report, to be read before it is run. Pure.

Every line but the commands of the fixes is a comment, and each host runs its own part only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nccl_doctor.model.findings import Finding, Severity
from nccl_doctor.model.fixes import Fix, Step, word
from nccl_doctor.model.report import Report
from nccl_doctor.report.places import Places
from nccl_doctor.report.steps import Steps, is_for_shell, lasts, typed
from nccl_doctor.toolkit.terminal import safe


def render(report: Report, host: str | None = None) -> str:
    """The script for one host, or one in which each host finds its part; it ends in a newline.

    It has the steps of what nothing else explains, the worst first. Other ways to the same end, and
    what takes a step back, are comments.
    """
    steps, places = Steps(report), Places(report)
    findings = _to_fix(report)
    hosts = steps.hosts if host is None else (host,)
    parts: dict[tuple[str, ...], list[str]] = {}
    for name in hosts:
        body = tuple(_body(steps, places, findings, name))
        if body:
            parts.setdefault(body, []).append(name)
    lines = [*_head(report, host), *_by_hand(places, findings)]
    if not parts:
        lines.append(
            "# No command is known that would fix it." if findings else "# Nothing to fix."
        )
    elif host is not None:
        lines += next(iter(parts))
    else:
        lines += _cases(parts)
    return "\n".join(lines) + "\n"


def _to_fix(report: Report) -> list[Finding]:
    """Root causes, then warnings that nothing explains."""
    roots = list(report.root_causes)
    known = {(finding.code, finding.where, finding.message) for finding in roots}
    rest = [f for f in report.findings if not f.explained_by and f.level is not Severity.INFO]
    return roots + [f for f in rest if (f.code, f.where, f.message) not in known]


def _head(report: Report, host: str | None) -> Iterator[str]:
    yield f"# {safe(f'nccl-doctor: {report.verdict.upper()}: {report.summary}')}"
    yield "# Read each line before you run it."
    if host is None:
        yield "# Every host may be given this whole file: it runs the part with its own name."
    else:
        yield f"# For {safe(host)} only."
    if report.redacted:
        yield "# The names in this report are pseudonyms: put the real ones in."


def _by_hand(places: Places, findings: Sequence[Finding]) -> Iterator[str]:
    """Comments on fixes without a command."""
    for finding in findings:
        fix = finding.fix or finding.kind.fix
        if not (isinstance(fix, Fix) and fix.steps):
            yield ""
            yield from _what(places, finding)
            yield f"# by hand: {safe(fix)}"


def _what(places: Places, finding: Finding) -> Iterator[str]:
    where = places.say(finding.where)
    place = f"{where}: " if where else ""
    yield f"# {safe(f'{finding.code}: {finding.kind.title}')}"
    yield f"# {safe(place + finding.message)}"


def _body(steps: Steps, places: Places, findings: Sequence[Finding], host: str) -> Iterator[str]:
    """Lines for one host; none where it has no part in any fix."""
    for finding in findings:
        fix = finding.fix or finding.kind.fix
        if not isinstance(fix, Fix):
            continue
        own = steps.of_host(fix, finding.where, host)
        if own:
            yield ""
            yield from _what(places, finding)
            for step in own:
                yield from _step(step)
            for other in fix.alternatives:
                instead = [step.command for step in steps.of_host(other, finding.where, host)]
                for line in instead or ([] if other.steps else [other]):
                    yield f"# or: {safe(line)}"


def _step(step: Step) -> Iterator[str]:
    if step.note:
        yield f"# {safe(step.note)}"
    if is_for_shell(step):
        yield "# for the shell that starts the job: there, read this file with `.`"
    yield typed(step.command)
    if not lasts(step):
        yield "# ends when the host starts again"
    if step.undo:
        yield f"# undo: {safe(step.undo)}"


def _cases(parts: dict[tuple[str, ...], list[str]]) -> Iterator[str]:
    yield ""
    yield 'case "$(uname -n)" in'
    for body, names in parts.items():
        yield f"{' | '.join(word(safe(name)) for name in names)})"
        yield from body
        yield ":"  # a part may hold nothing but comments
        yield ";;"
    yield "esac"
