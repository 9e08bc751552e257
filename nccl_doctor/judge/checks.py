"""Let every check judge; one that breaks, or yields no finding, costs its own answer only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import PurePath
from typing import Any

from nccl_doctor.model.check import Check, ForeignError
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.commands import Command
from nccl_doctor.model.findings import Confidence, Effect, Finding, Kind, Layer, Severity, Where
from nccl_doctor.model.fixes import Fix, On, Step
from nccl_doctor.model.kinds import CHECK_BROKE

# Types of what a check yields: a finding that a report can hold, or what is wrong with it. Pure.
#
# A third party's check may yield anything. What is no finding, or has a part of another type,
# would break whoever renders, sorts or saves it much later, and with it the whole report.


_TEXT = (str,)
_KIND: Mapping[str, tuple[type, ...]] = {
    "code": _TEXT,
    "layer": (Layer,),
    "title": _TEXT,
    "why": _TEXT,
    "fix": _TEXT,
    "severity": (Severity,),
    "effects": (tuple,),
}
_FINDING: Mapping[str, tuple[type, ...]] = {
    "kind": (Kind,),
    "message": _TEXT,
    "where": (Where,),
    "evidence": (Mapping,),
    "fix": _TEXT,
    "severity": (Severity, type(None)),
    "confidence": (Confidence,),
    "explained_by": (str, type(None)),
    "explained_why": _TEXT,
    "check": _TEXT,
    "effects": (tuple,),
    "excused_by": _TEXT,
    "cause": _TEXT,
}
_STEP: Mapping[str, tuple[type, ...]] = {
    "command": (Command,),
    "on": (On, tuple),
    "undo": (Command,),
    "note": _TEXT,
    "persists": (bool,),
    "shows": (bool,),
}
_WHERE: Mapping[str, type] = {
    "hosts": str,
    "ranks": int,
    "links": tuple,
    "devices": str,
    "interfaces": str,
    "nodes": int,
}


def well_formed(given: Any) -> Finding:
    """The finding, with tuples for lists.

    Raises:
        TypeError: it is no finding, or a part of it has a type that no report can hold.
    """
    if not isinstance(given, Finding):
        raise TypeError(f"yielded {_a(given)}, not a Finding")
    _each(given, _FINDING, "")
    _each(given.kind, _KIND, "kind.")
    for effect in (*given.effects, *given.kind.effects):
        if not isinstance(effect, Effect):
            raise TypeError(f"yielded a Finding with {_a(effect)} in effects, not an Effect")
    for fix in (given.fix, given.kind.fix):
        _look_at_fix(fix)
    return given.replaced(where=_where(given.where))


def json_able(finding: Finding) -> tuple[Finding, str]:
    """The finding with evidence that JSON can hold, and what was wrong with that, if anything."""
    try:
        json.dumps(dict(finding.evidence), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        words = f"yielded {finding.code} with evidence that JSON cannot hold: {error}"
    else:
        return finding, ""
    return finding.replaced(evidence={}), words


def _each(given: Any, types: Mapping[str, tuple[type, ...]], path: str) -> None:
    for name, allowed in types.items():
        value = getattr(given, name)
        if not isinstance(value, allowed):
            wanted = " or ".join("None" if one is type(None) else one.__name__ for one in allowed)
            raise TypeError(f"yielded a Finding whose {path}{name} is {_a(value)}, not {wanted}")


def _look_at_fix(fix: Any) -> None:
    for step in getattr(fix, "steps", ()):
        if type(step) is not Step:
            raise TypeError(f"yielded a Finding with {_a(step)} in fix.steps, not a Step")
        _each(step, _STEP, "fix.steps.")
        if not isinstance(step.on, On) and not all(isinstance(name, str) for name in step.on):
            raise TypeError("yielded a Finding with fix.steps on what is no name of a host")
    for other in getattr(fix, "alternatives", ()):
        if type(other) is not Fix:
            raise TypeError(f"yielded a Finding with {_a(other)} in fix.alternatives")
        _look_at_fix(other)


def _where(where: Where) -> Where:
    return Where(
        **{field.name: _places(field.name, getattr(where, field.name)) for field in fields(Where)}
    )


def _places(name: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, (tuple, list)):
        raise TypeError(f"yielded a Finding whose where.{name} is {_a(given)}, not a tuple")
    places = tuple(given)
    for place in places:
        if name == "links":
            is_pair = isinstance(place, (tuple, list)) and len(place) == 2
            if not (is_pair and all(isinstance(end, str) for end in place)):
                raise TypeError(f"yielded a Finding with {place!r} in where.links, not two names")
        elif not isinstance(place, _WHERE[name]) or isinstance(place, bool):
            raise TypeError(
                f"yielded a Finding with {_a(place)} in where.{name}, not {_WHERE[name].__name__}"
            )
    return tuple((place[0], place[1]) for place in places) if name == "links" else places


def _a(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


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
            broken[check.name] = error_words(error)
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


def error_words(error: Exception) -> str:
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
    did = f"raised {error_words(error)}"
    if isinstance(error, ForeignError):
        at, did = error.at, did if error.raised else error_words(error)
    return _broken(check, did, method, error_words(error), at)


def _broken(
    check: Check, words: str, method: str = "judge", error: str = "", at: str = ""
) -> Finding:
    return Finding(
        CHECK_BROKE,
        f"`{method}` of check {check.name} {words}",
        evidence={"check": check.name, "error": error or words, "at": at},
        check=check.name,
    )
