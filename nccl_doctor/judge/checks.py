"""Let every check judge; a check that breaks costs its own answer only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from nccl_doctor.judge.finding_types import json_able, well_formed
from nccl_doctor.model.check import Check, ForeignError
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.findings import Finding
from nccl_doctor.model.kinds import CHECK_BROKE

Judged = Mapping[str, Sequence[Finding]]
"""Name of a check → what it finds in a cluster."""
_NOTHING: Judged = {}


def judge_all(
    cluster: Cluster, checks: Iterable[Check], known: Judged = _NOTHING
) -> tuple[list[Finding], dict[str, str]]:
    """Let every check judge; of some it is `known` already what they find in these facts.

    Returns: the findings, each stamped with its check, and check name → what went wrong for every
    check whose rules broke, or that yielded what no report can hold. A broken check loses no
    finding that it made before.
    """
    findings: list[Finding] = []
    broken: dict[str, str] = {}
    for check in checks:
        if check.name in known:
            findings += known[check.name]
            continue
        try:
            for given in check.judge(view_for(check, cluster)):
                try:
                    finding, wrong = json_able(well_formed(given).replaced(check=check.name))
                    findings.append(finding)
                except TypeError as error:
                    wrong = str(error)
                if wrong and check.name not in broken:
                    broken[check.name] = wrong
                    findings.append(_broken(check, wrong))
        except Exception as error:  # a check's mistake must cost its own answer only
            broken[check.name] = in_words(error)
            findings.append(_broke(check, "judge", error))
    return findings, broken


def broken_sections(cluster: Cluster, checks: Iterable[Check]) -> list[Finding]:
    """Findings on the plug-ins whose `sections` break: a renderer could only leave them out."""
    found: list[Finding] = []
    for check in checks:
        if type(check).__module__.startswith("nccl_doctor.checks."):
            continue
        try:
            for _ in check.sections(cluster):
                pass
        except Exception as error:  # a check's mistake must cost its own answer only
            found.append(_broke(check, "sections", error))
    return found


def view_for(check: Check, cluster: Cluster) -> Cluster:
    """Cluster for a check: a check that observes together gets only the hosts that joined."""
    return cluster.met if check.together else cluster


def in_words(error: Exception) -> str:
    """An exception in one line: its type, and what it says."""
    text = " ".join(str(error).split())
    if isinstance(error, ForeignError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place_of(error: Exception) -> str:
    """File and line where an exception was raised; empty if not known."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f"{PurePath(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


def _broke(check: Check, method: str, error: Exception) -> Finding:
    at = place_of(error)
    did = f"raised {in_words(error)}"
    if isinstance(error, ForeignError):
        at, did = error.at, did if error.raised else in_words(error)
    return _broken(check, did, method, in_words(error), at)


def _broken(
    check: Check, words: str, method: str = "judge", error: str = "", at: str = ""
) -> Finding:
    return Finding(
        CHECK_BROKE,
        f"`{method}` of check {check.name} {words}",
        evidence={"check": check.name, "error": error or words, "at": at},
        check=check.name,
    )
