"""Rules on the variables of one rank: names, values, spellings, leftovers and limits."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Fix, On, Severity, Step, shell
from nccl_doctor.toolkit.nccl.interface_choice import NCCL_VARIABLE, Filter
from nccl_doctor.toolkit.variables.table import AUTO, Leftover, Limit, Variable, table
from nccl_doctor.toolkit.variables.values import Misread, canonical, misread, refused

from .conflicts import conflicts
from .files import file_problems
from .gather import closest
from .proxies import covers_master
from .view import Problem, View, all_of, either

UNKNOWN, BAD_VALUE = "env-unknown-variable", "env-bad-value"
DEPRECATED, LEFTOVER, SHORT = "env-deprecated", "env-debug-leftover", "timeout-too-short"
MISLEADS = "env-debug-misleads"
_ALIKE = 0.85
"""Minimum similarity of two names for one to count as a typing error of the other."""
_OWN_NAME = {"nccl": "NCCL", "torch": "torch", "gloo": "gloo", "inspector": "NCCL's Inspector"}


def problems(view: View) -> Iterator[Problem]:
    """All problems of one rank's variables, without comparing ranks."""
    yield from _unknown_names(view)
    yield from _lines_of_files(view)
    for row in view.rows:
        text = view.text(row.name)
        if row.gone or row.deprecated_by:
            yield from _old_name(view, row)
        elif view.is_older(row.library, row.since):
            yield _too_new(view, row)
            continue
        if text is not None and not row.gone:
            yield from _value(view, row, text)
    yield from file_problems(view)
    yield from _retries(view)
    yield from _lets_loopback_in(view)
    yield from conflicts(view)
    yield from covers_master(view)


# --- names ---


def _unknown_names(view: View) -> Iterator[Problem]:
    known = table()
    for name in view.facts["unknown"]:
        library = known.library_of(name)
        advice = known.unread.get(name, "")
        told = advice or name in known.excludes
        meant = "" if told else closest(name) or _near(name)
        if not (library or advice or meant):
            continue
        severity = Severity.WARN
        plugged = view.is_set("NCCL_NET_PLUGIN") or view.is_set("NCCL_TUNER_PLUGIN")
        if library and not (told or meant):
            newer = view.is_newer(library.name, library.known_to)
            if newer or plugged or view.facts.get("rocm"):
                severity = Severity.INFO
        hint = f"; did you mean {meant}?" if meant else ""
        if library and not library.known_to:  # a plug-in, which may be newer than the table
            severity = Severity.INFO
        fix = view.drop(name)
        if name in known.excludes:
            other = known.excludes[name]
            hint = f"; the name is {other}, with a ^ before what is left out"
            fix = _left_out(view, name, other)
        elif meant:
            value = view.original(name)
            same = Fix(
                Step(
                    shell('export {:variable}="${:variable}"', meant, name),
                    undo=shell("unset {:variable}", meant),
                )
            )
            fix = all_of(same if value is None else view.put(meant, value), fix)
        elif advice:
            fix = Fix(*(replace(step, note=advice) for step in fix.steps), text=f"{fix}: {advice}")
        reader = _OWN_NAME[library.name] if library else "any library that is known"
        message = f"{name} is not a variable of {reader}{hint}"
        yield Problem(UNKNOWN, message, fix, severity)


def _left_out(view: View, name: str, other: str) -> Fix:
    """The fix that leaves out what an unread name lists, by the variable that is read."""
    if view.is_set(other):
        said = view.says(other)
        return Fix(*view.drop(name).steps, text=f"leave the same out in {said}; {view.drop(name)}")
    line = shell('export {:variable}="^${:variable}"', other, name)
    return all_of(Fix(Step(line, undo=shell("unset {:variable}", other))), view.drop(name))


def _near(name: str) -> str:
    # A prefix that both have proves nothing.
    prefix, _, rest = name.partition("_")
    names = [each for each in table().variables if each.startswith(f"{prefix}_")]
    rests = {each.partition("_")[2]: each for each in names if not table().variables[each].gone}
    found = difflib.get_close_matches(rest, rests, n=1, cutoff=_ALIKE)
    return rests[found[0]] if found else ""


def _old_name(view: View, row: Variable) -> Iterator[Problem]:
    if row.gone:
        version = row.gone.removeprefix("<=")
        at_latest = " or earlier" if version != row.gone else ""
        if view.is_older(row.library, version) and not at_latest:
            return
        instead = f"; use {row.instead} instead" if row.instead else ""
        since = f"{_OWN_NAME[row.library]} {version}{at_latest}"
        message = f"{row.name} has not been read since {since}{instead}"
        yield Problem(DEPRECATED, message, view.drop(row.name), Severity.INFO)
        return
    new = table().variables[row.deprecated_by]
    if view.is_older(new.library, new.since):
        return
    mine, other = view.text(row.name), view.text(new.name)
    if other is None:
        drop = view.drop(row.name)
        fix: str = all_of(drop, view.put(new.name, mine or ""))
        if row.advice:
            fix = Fix(*drop.steps, text=f"{drop}: {row.advice}")
        elif new.default is not None and canonical(new, mine) == canonical(new, None):
            fix = Fix(*drop.steps, text=f"{drop}: {new.default} is the default")
        message = f"{view.says(row.name)} is the old name of {new.name}"
        yield Problem(DEPRECATED, message, fix, Severity.INFO)
        return
    differ = canonical(new, mine) != canonical(new, other)
    who = _who_set(view, new.name)
    message = f"{view.says(row.name)} is overridden by {view.says(new.name)}{who}"
    severity = Severity.WARN if differ else Severity.INFO
    yield Problem(DEPRECATED, message, view.drop(row.name), severity)


def _who_set(view: View, name: str) -> str:
    if name == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and view.launcher in ("torchrun", "accelerate"):
        return ", which torchrun sets itself"
    return ""


def _too_new(view: View, row: Variable) -> Problem:
    matters = row.default not in (None, AUTO) and view.meaning(row.name) != canonical(row, None)
    name = _OWN_NAME[row.library]
    mine = ".".join(map(str, view.version(row.library)[:3]))
    return Problem(
        UNKNOWN,
        f"{view.says(row.name)} is read since {name} {row.since}; this is {name} {mine}",
        either(view.drop(row.name), f"use {name} {row.since} or newer"),
        view.bounded(row, Severity.WARN if matters else Severity.INFO),
    )


# --- values ---


def _lines_of_files(view: View) -> Iterator[Problem]:
    for fault in view.facts["faults"]:
        if not fault["line"]:
            yield Problem(
                BAD_VALUE,
                f"NCCL_CONF_FILE={fault['path']} {fault['fault']}; ~/.nccl.conf is not read either",
                Fix(
                    Step(shell("unset NCCL_CONF_FILE"), On.EVERY),
                    alternatives=["name a file that exists"],
                ),
                Severity.WARN,
            )
            continue
        place = f"line {fault['line']} of {fault['path']}"
        name = fault["name"]
        yield Problem(
            BAD_VALUE,
            f"{place}{f' ({name})' if name else ''} {fault['fault']}",
            _moved(name, fault)
            if fault["misplaced"]
            else f"in {place} write {name or 'NAME'}=VALUE, with nothing around it",
            Severity.WARN,
        )


def _moved(name: str, fault: Mapping[str, Any]) -> Fix:
    """The fix that takes a variable out of a file that its library does not read."""
    value = shell("sed -n '{:number}s/^[^=]*=//p' {}", fault["line"], fault["path"])
    take = shell('export {:variable}="$({})"', name, value)
    step = Step(take, undo=shell("unset {:variable}", name))
    return Fix(step, text=f"{step.command} in the environment of the job")


def _value(view: View, row: Variable, text: str) -> Iterator[Problem]:
    own, refusal = view.reading(row.name), view.refusal(row.name)
    if refusal is not None:
        said = f"is refused by the gloo of this torch: `{refusal}`"
        wrong = Misread(said, row.raises) if refusal else None
    elif own is None or not text:
        wrong = misread(row, text)
    else:
        wrong = refused(row, text, own["value"], taken=own["taken"])
    if wrong is not None:
        raises = bool(wrong.raises) and not view.is_older(row.library, wrong.raises)
        fix = view.put(row.name, wrong.meant) if wrong.meant else view.drop(row.name)
        if not wrong.meant and row.values:
            others = [value for value in row.values if value.lower() != text.lower()]
            fix = either(fix, f"set it to one of {', '.join(others)}")
        is_error = ", which is an error" if raises else ""
        yield Problem(
            BAD_VALUE,
            f"{view.says(row.name)} {wrong.says}{is_error}",
            fix,
            view.bounded(row, Severity.FAIL if raises else Severity.WARN),
            # The check of interfaces finds the same, with the interfaces that there are.
            explained_by="interface-missing" if row.name == "GLOO_SOCKET_IFNAME" else None,
            variable=row.name,
        )
        return
    if row.deprecated_by and view.is_set(row.deprecated_by):
        return  # torch reads the old name as well, and may refuse it, but the new one counts
    if row.limit is not None:
        yield from _limit(view, row, row.limit)
    left = next((each for each in row.leftovers if _is_left(view, row, each, text)), None)
    if left is not None:
        drop = view.drop(row.name)
        unless = Fix(*drop.steps, text=f"{drop}, unless you are debugging")
        yield Problem(
            MISLEADS if left.misleads else LEFTOVER,
            f"{view.says(row.name)}: {left.why}",
            drop if left.misleads else unless,
            view.bounded(row, Severity(left.severity)),
        )


def _is_left(view: View, row: Variable, leftover: Leftover, text: str) -> bool:
    if leftover.needs == "local peers" and not view.has_peers_here:
        return False
    if leftover.needs == "infiniband" and not view.facts.get("infiniband"):
        return False
    if leftover.needs == "three gloo ranks" and not view.has_three_gloo_ranks:
        return False
    meant = [canonical(row, value) for value in leftover.values]
    return canonical(row, text) in meant or leftover.values == ("*",)


def _limit(view: View, row: Variable, limit: Limit) -> Iterator[Problem]:
    number = view.number(row.name)
    text = view.text(row.name)
    if number is None and text is not None and text.isdecimal():
        number = int(text)
    if number is None:
        return
    default = view.put(row.name, row.default) if row.default else view.drop(row.name)
    said = f"{view.says(row.name)}{limit.unit}: {limit.note}"
    severity = view.bounded(row, Severity(limit.severity))
    if number < limit.shortest:
        yield Problem(SHORT, said, default, severity, variable=row.name)
    elif limit.longest is not None and number > limit.longest:
        in_minutes = limit.unit == " minutes"
        fix = view.put(row.name, str(number // 60)) if in_minutes else default
        yield Problem(BAD_VALUE, said, fix, severity)


_LEAST_RETRIES_S = 10.0
"""Hosts may start that far apart, and a port that is not open yet refuses connections."""


def _retries(view: View) -> Iterator[Problem]:
    count, pause = "NCCL_SOCKET_RETRY_CNT", "NCCL_SOCKET_RETRY_SLEEP_MSEC"
    names = [name for name in (count, pause) if view.text(name) is not None]
    tries, sleep = view.number(count), view.number(pause)
    if not names or tries is None or sleep is None or view.is_older("nccl", "2.24.3"):
        return
    total = tries * (tries + 1) / 2 * sleep / 1000
    if total < _LEAST_RETRIES_S:
        yield Problem(
            SHORT,
            f"{', '.join(view.says(name) for name in names)}: NCCL waits {max(0.0, total):.1f} s "
            "for a peer that is not up yet; with the defaults, 34 tries and 100 ms, 60 s",
            all_of(*map(view.drop, names)),
            Severity.WARN,
        )


def _lets_loopback_in(view: View) -> Iterator[Problem]:
    text = view.text(NCCL_VARIABLE) or ""
    if len(text) < 2 or not text.startswith("^") or not Filter.parse(text).admits("lo"):
        return
    if view.spans_hosts:
        yield Problem(
            BAD_VALUE,
            f"{view.says(NCCL_VARIABLE)} allows lo: your list replaces NCCL's own list of "
            "exclusions",
            view.put(NCCL_VARIABLE, f"{text},lo"),
            Severity.WARN,
            explained_by="interface-loopback",
        )
