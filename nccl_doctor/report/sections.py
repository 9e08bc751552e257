"""Sections that the installed checks show of a report, beside its findings.

A renderer that wants it is given a function that finds the checks, as `registry.installed`: the
renderer itself stays a pure function of the report and of their rules, and of a renderer that needs
no check none is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from nccl_doctor.model.check import Check
from nccl_doctor.model.report import Report
from nccl_doctor.model.sections import Section

Checks = Callable[[], Iterable[Check]]
"""Finds the checks that are asked."""


def no_checks() -> tuple[Check, ...]:
    """No checks: then only the findings are shown."""
    return ()


def sections_of(report: Report, checks: Checks) -> list[Section]:
    """Sections that each check shows of this report's facts.

    A check that breaks, as on the facts of another version, loses nothing that it showed before,
    and costs the others nothing.
    """
    found: list[Section] = []
    for check in checks():
        with suppress(Exception):  # of a plug-in, or on the facts of another version
            for section in check.sections(report.cluster):
                found.append(section)
    return found
