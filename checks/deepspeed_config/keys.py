"""Every key of a configuration, one by one: is it known, current, and of the right type?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.api import Severity

from .table import (
    AUTO,
    BAD_VALUE,
    OLD_KEY,
    UNKNOWN_KEY,
    Key,
    Problem,
    Section,
    Settings,
    table,
    whole,
)

_ALIKE = 0.75
"""Similarity of two names from which one counts as a typing error of the other."""
_NO = ("false", "off", "no", "f", "n", "0", "true", "on", "yes", "t", "y", "1")


def key_problems(settings: Settings) -> Iterator[Problem]:
    """Problems of single keys and values."""
    yield from _walk(settings, "top", settings.config)


def _walk(settings: Settings, path: str, values: Mapping[str, Any]) -> Iterator[Problem]:
    section = table().sections[path]
    prefix = "" if path == "top" else f"{path}."
    for name, value in values.items():
        full = f"{prefix}{name}"
        key = section.keys.get(name)
        if key is None:
            if not section.free:
                yield _unknown(settings, section, path, name)
            continue
        if key.gone:
            yield _gone(settings, full, key)
        elif key.instead:
            yield _old(full, key)
        if value is None or value == AUTO:
            if value is None and section.refuses and not key.empty and key.kind != "any":
                yield _bad(settings, section, full, value, "not null")
            continue
        wanted = _wanted(key, value, strict=bool(section.refuses))
        if wanted:
            yield _bad(settings, section, full, value, wanted)
        inner = "bf16" if full == "bfloat16" else full
        if isinstance(value, Mapping) and inner in table().sections:
            yield from _walk(settings, inner, value)


def _unknown(settings: Settings, section: Section, path: str, name: str) -> Problem:
    known = [each for each, key in section.keys.items() if not key.gone and not key.instead]
    meant = _meant(name, known)
    elsewhere = "" if meant else _elsewhere(name, path)
    refused = bool(section.refuses) and settings.reaches(section.refuses) is not False
    where = "DeepSpeed" if path == "top" else path
    effect = "DeepSpeed ends with an error at it" if refused else "it is ignored"
    message = f'"{name}" is not a key of {where}: {effect}'
    fix = f'remove "{name}"'
    if meant:
        message += f'; did you mean "{meant}"?'
        fix = f'write "{meant}" instead of "{name}"'
    elif elsewhere:
        message += f"; it belongs into {elsewhere}"
        fix = f'move "{name}" into {elsewhere}'
    severity = Severity.FAIL if refused else Severity.WARN
    # A newer DeepSpeed may know it.
    if settings.outdates(table().known_to):
        severity = Severity.WARN if meant or elsewhere else Severity.INFO
    return Problem(UNKNOWN_KEY, message, fix, severity)


def _meant(name: str, known: Iterable[str]) -> str:
    names = {each.lower(): each for each in known}
    if name.lower() in names:
        return names[name.lower()]
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=_ALIKE)
    return names[close[0]] if close else ""


def _elsewhere(name: str, path: str) -> str:
    """The only other section that has a key of this name; empty if there is not exactly one."""
    places = [
        other
        for other, section in table().sections.items()
        if other != path and name in section.keys and not section.keys[name].gone
    ]
    if len(places) != 1:
        return ""
    return "the outermost object" if places[0] == "top" else places[0]


def _gone(settings: Settings, full: str, key: Key) -> Problem:
    refused = settings.reaches(key.gone)
    says = {
        True: "DeepSpeed ends with an error at it",
        None: f"DeepSpeed {key.gone} ends with an error at it",
        False: f"newer versions (DeepSpeed {key.gone}) end with an error at it",
    }[refused]
    return Problem(
        OLD_KEY,
        f'"{full}" was removed, {says}: {key.why}',
        f'remove "{full}"',
        {True: Severity.FAIL, None: Severity.WARN, False: Severity.INFO}[refused],
    )


def _old(full: str, key: Key) -> Problem:
    outer = full.rpartition(".")[0]
    new = f"{outer}.{key.instead}" if outer else key.instead
    return Problem(
        OLD_KEY,
        f'"{full}" is an old name of "{new}"',
        f'write "{new}" instead of "{full}"',
        Severity.INFO,
    )


def _bad(settings: Settings, section: Section, full: str, value: Any, wanted: str) -> Problem:
    certain = not section.refuses or settings.reaches(section.refuses) is not False
    return Problem(
        BAD_VALUE,
        f'"{full}" is {_shown(value)}, {wanted}',
        f'correct "{full}"',
        Severity.FAIL if certain else Severity.WARN,
    )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = {True: "true", False: "false", None: "null"}.get(value) if _is_word(value) else None
    shown = text or (f'"{value}"' if isinstance(value, str) else str(value))
    return shown if len(shown) < 60 else f"{shown[:56]}…"


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _wanted(key: Key, value: Any, *, strict: bool) -> str:
    """The fault of a value; empty where it is valid."""
    if key.kind == "section":
        return "" if isinstance(value, Mapping) else "not an object"
    if key.kind == "batch":
        number = whole(value) if type(value) in (int, float) else None
        return "" if number is not None and number > 0 else "not a whole number above 0"
    if key.kind == "word":
        text = value if key.cased or not isinstance(value, str) else value.lower()
        return "" if text in key.values else f"not one of {', '.join(key.values)}"
    if key.kind == "text":
        return "" if isinstance(value, str) else "not a string"
    if key.kind == "bool" and strict:
        fits = isinstance(value, bool) or value in (0, 1)
        fits = fits or (isinstance(value, str) and value.lower() in _NO)
        return "" if fits else "not true or false"
    if key.kind in ("int", "number"):
        return _out_of_range(key, value)
    return ""


def _out_of_range(key: Key, value: Any) -> str:
    number: float | None = whole(value) if key.kind == "int" else _number(value)
    if number is None:
        return "not a whole number" if key.kind == "int" else "not a number"
    if key.least is not None and number < key.least:
        return f"less than {key.least:g}"
    if key.above is not None and number <= key.above:
        return f"not above {key.above:g}"
    if key.most is not None and number > key.most:
        return f"more than {key.most:g}"
    return ""


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
