"""Exit code and one line for other systems that run nccl-doctor unattended. Pure.

The same number means different things to them, so there is a profile for each:

* `slurm`: 1, with a reason to drain the node, if a finding says that the machine is broken; else 0
  and no line. A configuration that is wrong, and a doctor that is broken, never drain a node.
* `npd` (Kubernetes' node-problem-detector): 0 in order, 1 a problem, 2 not known; a short line,
  the same from one call to the next while nothing changes.
* `nagios`: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN; a line that says so, and performance data.
* `native`: the doctor's own exit code, and its report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from nccl_doctor.model.findings import Confidence, Finding, Severity
from nccl_doctor.system.terminal import safe

if TYPE_CHECKING:
    from nccl_doctor.model.report import Report

PROFILES = ("native", "slurm", "npd", "nagios")
NPD_BYTES = 80
"""Longest message of node-problem-detector by default; it cuts longer ones."""
REASON_BYTES = 200
"""Longest Reason for Slurm, which is read in a column of `sinfo -R`."""

_OK, _WARNING, _CRITICAL, _UNKNOWN = range(4)
_NAGIOS: Mapping[int, int] = {0: _OK, 1: _CRITICAL, 2: _UNKNOWN, 3: _UNKNOWN}
_NAGIOS_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_NPD: Mapping[int, int] = {0: 0, 1: 1, 2: 2, 3: 2}
_PROGRAM = "nccl-doctor"


class ExitAnswer(NamedTuple):
    """Answer for another system: an exit code and one line for stdout, empty if it wants none."""

    code: int
    line: str


def tell(report: Report, profile: str, code: int) -> ExitAnswer | None:
    """A report, for one system.

    Args:
        report: the report.
        profile: one of `PROFILES`.
        code: the doctor's own exit code; not always the report's, which may not have been saved.

    Returns: None for `native`, which is told by the report itself.
    """
    if profile == "slurm":
        reasons = [finding for finding in report.findings if drains(finding)]
        return ExitAnswer(int(bool(reasons)), _reason(report, reasons))
    if profile == "npd":
        return ExitAnswer(_NPD.get(code, 2), _cut(_headline(report, code, titles=True), NPD_BYTES))
    if profile == "nagios":
        state = _NAGIOS.get(code, _UNKNOWN)
        if state == _OK and report.verdict == "warn":
            state = _WARNING
        text = _headline(report, code).replace("|", "/")
        line = f"{_PROGRAM.upper()} {_NAGIOS_WORDS[state]} - {text} | {_figures(report)}"
        return ExitAnswer(state, line)
    return None


def unable(profile: str, message: str) -> ExitAnswer | None:
    """Answer for another system without a report: nccl-doctor had wrong options or an error.

    Returns: None for `native`.
    """
    text = _plain(message)
    if profile == "slurm":
        return ExitAnswer(0, "")
    if profile == "npd":
        return ExitAnswer(2, _cut(f"{_PROGRAM}: {text}", NPD_BYTES))
    if profile == "nagios":
        return ExitAnswer(_UNKNOWN, f"{_PROGRAM.upper()} UNKNOWN - {text.replace('|', '/')}")
    return None


def profile_of(arguments: Sequence[str]) -> str:
    """Profile in a command line, also if the rest of the line is wrong."""
    words = list(arguments)
    words = words[: words.index("--")] if "--" in words else words
    given = [word.partition("=")[2] for word in words if word.startswith("--exit-profile=")]
    given += [b for a, b in pairwise(words) if a == "--exit-profile"]
    return given[-1] if given and given[-1] in PROFILES else "native"


def drains(finding: Finding) -> bool:
    """True if the finding takes its host out of service: certainly broken, for every job."""
    return (
        finding.drains
        and finding.level is Severity.FAIL
        and finding.confidence is Confidence.CERTAIN
        and finding.explained_by is None
    )


def _reason(report: Report, reasons: Sequence[Finding]) -> str:
    if not reasons:
        return ""
    more = f"; and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    devices = ", ".join(reasons[0].where.devices)
    what = f"{devices}: {reasons[0].message}" if devices else reasons[0].message
    text = _plain(f"{_PROGRAM}: {_what(report, reasons[0])}: {what}")
    for quote in '"`\\$':  # it goes through a shell script, and through scontrol
        text = text.replace(quote, "'")
    return _cut(text, REASON_BYTES - len(more)) + more


def _headline(report: Report, code: int, *, titles: bool = False) -> str:
    """First root cause if something failed, else the summary of the report."""
    roots = report.root_causes
    if code != 1 or not roots:
        return _plain(report.summary)
    more = f" (and {len(roots) - 1} more)" if len(roots) > 1 else ""
    words = roots[0].kind.title if titles else roots[0].message
    return _plain(f"{_what(report, roots[0])}: {words}{more}")


def _what(report: Report, finding: Finding) -> str:
    """Code and hosts; without hosts if only one host was examined."""
    hosts = finding.where.hosts
    if not hosts or len(report.cluster.hosts) < 2:
        return finding.code
    return f"{finding.code} on {', '.join(hosts[:3])}" + (
        f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
    )


def _figures(report: Report) -> str:
    """Performance data: label=value;warn;crit;min."""
    levels = [finding.level for finding in report.findings]
    failures, warnings = levels.count(Severity.FAIL), levels.count(Severity.WARN)
    took = report.run.duration_s
    seconds = f" time={took:g}s;;;0" if took is not None else ""
    return f"failures={failures};;0;0 warnings={warnings};0;;0{seconds}"


def _plain(text: str) -> str:
    """One line of ASCII."""
    for sign, word in {"–": "-", "→": "->", "×": "x", "…": "..."}.items():
        text = text.replace(sign, word)
    return safe(text).encode("ascii", "replace").decode("ascii")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3].rstrip() + "..."
