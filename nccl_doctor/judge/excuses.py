"""Failures for which only a choice of the program is to blame: they are none of the job's. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nccl_doctor.model.findings import Finding, Severity


def excuse(findings: Sequence[Finding]) -> list[Finding]:
    """Make warnings of the failures that have an excuse (`Finding.excused_by`), and of what nothing
    else explains.

    The note that excuses them becomes a warning with them and explains them: it says what to set.
    What they kept from being tested stays unknown.

    Args:
        findings: as `explain` left them.
    """
    codes = _innocent([finding for finding in findings if finding.level is Severity.FAIL])
    used = {finding.excused_by for finding in findings if _has_excuse(finding, codes)}
    said = {finding.code for finding in findings if finding.code in used}
    out = []
    for finding in findings:
        if _has_excuse(finding, codes):
            by = finding.excused_by if finding.excused_by in said else None
            finding = finding.replaced(
                severity=Severity.WARN, explained_by=finding.explained_by or by
            )
        elif finding.code in said and finding.level is Severity.INFO:
            finding = finding.replaced(severity=Severity.WARN)
        out.append(finding)
    return out


def _innocent(failures: Sequence[Finding]) -> set[str]:
    """Codes whose failures all have an excuse, or are explained by one that has."""
    codes: set[str] = set()
    while True:
        guilty = {finding.code for finding in failures if not _has_excuse(finding, codes)}
        more = {finding.code for finding in failures} - guilty
        if more == codes:
            return codes
        codes = more


def _has_excuse(finding: Finding, innocent: set[str]) -> bool:
    return finding.level is Severity.FAIL and (
        bool(finding.excused_by) or finding.explained_by in innocent
    )
