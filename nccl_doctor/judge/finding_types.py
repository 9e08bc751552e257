"""Types of what a check yields: a finding that a report can hold, or what is wrong with it. Pure.

A third party's check may yield anything. What is no finding, or has a part of another type, would
break whoever renders, sorts or saves it much later, and with it the whole report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nccl_doctor.model.commands import Command
from nccl_doctor.model.findings import Confidence, Finding, Kind, Layer, Severity, Where
from nccl_doctor.model.fixes import Fix, On, Step

_TEXT = (str,)
_KIND: Mapping[str, tuple[type, ...]] = {
    "code": _TEXT,
    "layer": (Layer,),
    "title": _TEXT,
    "why": _TEXT,
    "fix": _TEXT,
    "severity": (Severity,),
    "delays": (bool,),
    "by_deadline": (bool,),
    "between": (bool,),
    "later": (bool,),
    "drains": (bool,),
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
    "check": _TEXT,
    "shuts_out": (bool,),
    "drains": (bool,),
    "excused_by": _TEXT,
    "timed_out": (bool,),
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
