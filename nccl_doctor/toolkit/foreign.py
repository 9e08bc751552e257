"""Checks of other distributions: their code is imported, and their rules run, in children first.

Such code may end its process, block for ever, or return anything at all. So an import is tried in
a child before it is done here, and every rule runs in a child with a deadline; what comes back is
made of the records of this program, or it is an error. One that blocked once is not asked again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NamedTuple

from nccl_doctor.model.check import Check, ForeignError, Skip
from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.model.findings import Figure, Finding, Round, Where
from nccl_doctor.model.fixes import Fix, Step, join_ways, ways_of
from nccl_doctor.model.sections import HostLink, Setup
from nccl_doctor.system.helpers import send_foreign

IMPORT_S = 20.0
"""Longest time for an import; one that imports torch from a busy file server needs it."""
RULE_S = 5.0
"""Longest time for one call of a rule."""

_YIELDS: dict[str, tuple[type, ...]] = {
    "judge": (Finding,),
    "plan": (Round,),
    "figures": (Figure,),
    "sections": (HostLink, Setup),
}
_RECORDS: Mapping[str, Any] = {kind.__name__: kind for kinds in _YIELDS.values() for kind in kinds}
_TEXT = (str,)
_NUMBER = (int, float)
_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    Figure: {
        "name": _TEXT,
        "value": (*_NUMBER, str, type(None)),
        "where": (Where,),
        "unit": _TEXT,
        "better": _TEXT,
        "least": _NUMBER,
        "counts": (bool,),
    },
    HostLink: {
        "start": (int,),
        "end": (int,),
        "reach": _TEXT,
        "words": _TEXT,
        "rtt_us": (*_NUMBER, type(None)),
        "rate": (*_NUMBER, type(None)),
        "segments": (int,),
        "lost": (int,),
    },
    Setup: {"name": _TEXT, "value": (str, Mapping), "host": (int,)},
}
"""Types of the fields of what is compared and shown; a finding is looked at where it is judged."""
_CHOICES = {"better": ("", "higher", "lower"), "reach": ("", "ok", "impaired", "failed")}
_MOST_ITEMS = 20_000
"""Most records of one call: far more than devices of a thousand hosts, and made in a second."""
_MOST_BYTES = 64 << 20
_tried: dict[str, str] = {}
_blocked: set[tuple[str, str]] = set()


def problem_of_import(place: str, use: Callable[[], object], in_words: Callable[[Any], str]) -> str:
    """Try in a child to import and use foreign code; once for each `place` that it comes from.

    Returns: what went wrong, as `in_words` says it of an exception; or the empty string.
    """
    if place not in _tried:

        def work() -> bytes:
            try:
                use()
            except BaseException as error:  # sys.exit() included
                return in_words(error).encode("utf-8", "backslashreplace")
            return b""

        try:
            _tried[place] = send_foreign("import", work, IMPORT_S).decode()
        except TimeoutError as error:
            _tried[place] = f"the import did not end: {error.strerror}"
        except ChildProcessError as error:
            _tried[place] = f"the import {error.strerror}"
    return _tried[place]


def guarded(found: type[Check]) -> type[Check]:
    """The class of a check, whose rules run in children."""

    def rule(name: str) -> Callable[[Check, Any], Iterator[Any]]:
        def call(check: Check, cluster: Any) -> Iterator[Any]:
            items, error = _called(check, name, lambda: getattr(found, name)(check, cluster))
            yield from items
            if error is not None:
                raise error

        return call

    def plan(check: Check, cluster: Any) -> tuple[Any, ...]:
        return tuple(rule("plan")(check, cluster))

    def deadline(check: Check, context: Any) -> float:
        (seconds,), error = _called(
            check, "deadline", lambda: [float(found.deadline(check, context))], (0.0,)
        )
        if error is not None:
            raise error
        return float(seconds)

    own: dict[str, Any] = {name: rule(name) for name in ("judge", "figures", "sections")}
    own |= {"plan": plan, "deadline": deadline}
    changed = {name: how for name, how in own.items() if getattr(found, name) is not _base(name)}
    about = {"__module__": found.__module__, "__doc__": found.__doc__}
    return type(found.__name__, (found,), {**about, **changed})


def _base(name: str) -> object:
    return getattr(Check, name)


def _called(
    check: Check, name: str, call: Callable[[], Iterable[Any]], nothing: Iterable[Any] = ()
) -> tuple[Iterable[Any], Exception | None]:
    """Yield of a rule in a child, and the error that ended it, if any."""
    if (check.name, name) in _blocked:
        return nothing, ForeignError("did not end before, so not tried again")
    try:
        data = send_foreign(check.name, lambda: _yielded(name, call), RULE_S)
    except TimeoutError as error:
        _blocked.add((check.name, name))
        return nothing, ForeignError(f"did not end: {error.strerror}")
    except ChildProcessError as error:
        return nothing, ForeignError(error.strerror or "died")
    said, how, text, at = json.loads(data)
    if how == "skip":
        return nothing, Skip(text)
    items = [_record_of(*each) for each in said]
    return items or nothing, ForeignError(text, raised=True, at=at) if how else None


def _yielded(name: str, call: Callable[[], Iterable[Any]]) -> bytes:
    """Runs in the child: what a rule yields until it ends or breaks, and how it breaks."""
    items: list[tuple[str, Any]] = []
    how = text = at = ""
    try:
        for item in call():
            if len(items) == _MOST_ITEMS:
                raise TypeError(f"`{name}` yields more than {_MOST_ITEMS} records")
            items.append(_plain(name, item))
    except Skip as reason:
        how, text = "skip", str(reason)
    except BaseException as error:  # sys.exit() included: here it ends nobody
        how, at = "raised", _place_of(error)
        text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    data = json.dumps((items, how, text, at)).encode()
    if len(data) > _MOST_BYTES:
        words = f"TypeError: `{name}` yields more than {_MOST_BYTES >> 20} MiB"
        return json.dumps(([], "raised", words, "")).encode()
    return data


def _plain(name: str, item: Any) -> tuple[str, Any]:
    """Yield of a rule: name of its class, and plain data; TypeError for what it may not yield."""
    kinds = _YIELDS.get(name)
    if kinds is not None and type(item) not in kinds:
        words = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"`{name}` yields a {type(item).__name__}, not a {words}")
    if isinstance(item, Finding):
        if not (isinstance(item.message, str) and isinstance(item.fix, str)):
            raise TypeError(f"the message or fix of a {item.code} is not a text")
        if type(item.where) is not Where:
            raise TypeError(f"the place of a {item.code} is not a Where")
    if type(item) in _FIELDS:
        _look_at(name, item)
    data = encode(item) if kinds else item
    if isinstance(item, Finding):
        data |= {"ways": _ways(item.fix), "kind_ways": _ways(item.kind.fix)}
    crosses = type(item).__name__, json.loads(json.dumps(data))
    _record_of(*crosses)
    return crosses


def _record_of(name: str, data: Any) -> Any:
    """Inverse of `_plain`; ValueError for what is no such record."""
    if name not in _RECORDS:
        return data
    item = decode(_RECORDS[name], Node(name, data))
    if not isinstance(item, Finding):
        return item
    kind = replace(item.kind, fix=_fix_of(data["kind_ways"]) or item.kind.fix)
    return item.replaced(kind=kind, fix=_fix_of(data["ways"]) or item.fix)


class _FixWay(NamedTuple):
    text: str
    steps: tuple[Step, ...]


def _ways(fix: str) -> list[dict[str, Any]]:
    """Ways of a fix; none of one that is only text."""
    ways = ways_of(fix) if isinstance(fix, Fix) else ()
    return [encode(_FixWay(str(way), way.steps)) for way in ways]


def _fix_of(ways: Sequence[Any]) -> str:
    made = [decode(_FixWay, Node("fix", way)) for way in ways]
    return join_ways([Fix(*way.steps, text=way.text) for way in made]) if made else ""


def _look_at(rule: str, item: Any) -> None:
    """TypeError for a record with a field that breaks a comparison or a renderer."""
    what = type(item).__name__
    for field, kinds in _FIELDS[type(item)].items():
        value = getattr(item, field)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            words = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
            raise TypeError(
                f"`{rule}` yields a {what} whose {field} is a {type(value).__name__}, not {words}"
            )
        if field in _CHOICES and value not in _CHOICES[field]:
            raise TypeError(f"`{rule}` yields a {what} whose {field} is {str(value)[:40]!r}")
    if isinstance(item, Figure) and item.better and isinstance(item.value, str):
        raise TypeError(f"`{rule}` yields a Figure with a direction whose value is text")


def _place_of(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f"{PurePath(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
