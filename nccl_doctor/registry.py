"""All installed checks: the built-in ones, and those of other distributions.

The engine knows no check by name. A check that cannot be used is left out and becomes a finding:
it never stops the examination, and never goes unmentioned.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from nccl_doctor.autopsy.kinds import AUTOPSY_KINDS
from nccl_doctor.model.check import Check
from nccl_doctor.model.findings import Finding, Kind, Layer, Level, Scope, Severity, Turn
from nccl_doctor.model.kinds import (
    BESIDE_KINDS,
    CHECK_UNUSABLE,
    ENGINE_KINDS,
    HISTORY_KINDS,
    REMOTE_KINDS,
)
from nccl_doctor.system import folders
from nccl_doctor.system.masking import masked
from nccl_doctor.toolkit import foreign
from nccl_doctor.toolkit.suggest import suggest

GROUP = "nccl_doctor.checks"
"""Entry point group of third-party checks; also the package of the built-in ones."""

_BUILT_IN = "nccl-doctor"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_CODE = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class UnknownName(ValueError):
    """A check name or finding code that no installed check has."""


@dataclass(frozen=True)
class Registry:
    """The checks of one run.

    `checks` are those selected, by layer, turn and name. `kinds` maps every installed code,
    selected or not, to its kind and the first check that lists it (None: the engine's own).
    `owners` maps the codes of checks to the names of all that list them. `origins` maps every
    installed check name to the distribution that it came with. `vital` are checks that `select`
    left out, examined where a host cannot sign in without what they ask for.
    """

    checks: tuple[Check, ...]
    problems: tuple[Finding, ...]
    kinds: Mapping[str, tuple[Kind, Check | None]]
    origins: Mapping[str, str] = field(default_factory=dict)
    select: frozenset[str] = frozenset()
    ignore: frozenset[str] = frozenset()
    owners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    vital: tuple[Check, ...] = ()

    def with_vital(self, names: Container[str] | None = None) -> Registry:
        """The registry with the vital checks that were not selected, unless they were ignored: all,
        or those of these names.
        """
        left_out = (check for check in self.vital if check not in self.checks)
        more = [check for check in left_out if names is None or check.name in names]
        checks = sorted((*self.checks, *more), key=_order)
        select = self.select | {check.name for check in more} if more else self.select
        return replace(self, checks=tuple(checks), select=select)

    def wanted(self, code: str) -> bool:
        """True if a finding of this code belongs in the report, after --select and --ignore.

        One that several checks share belongs there if it does for any of them. What the engine
        itself has to say is dropped only when it is ignored by its code.
        """
        owners = self.owners.get(code)
        if owners is None:
            return code not in self.ignore
        return any(self.wants(check, code) for check in owners)

    def wants(self, check: str, code: str) -> bool:
        """True if this code of this check is wanted."""
        names = {check, code}
        return not names & self.ignore and (not self.select or bool(names & self.select))


def load(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> Registry:
    """Find every check, and select among them.

    Args:
        select: check names and finding codes; none selects all. A code selects its check.
        ignore: check names and finding codes to leave out.

    Raises:
        UnknownName: something to select or to ignore is not the name or code of any check.
    """
    named = _NamedChecks()
    package = importlib.import_module(GROUP)
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        target = f"{GROUP}.{info.name}"
        named.add(target, _BUILT_IN, partial(importlib.import_module, target))
    for point in sorted(metadata.entry_points(group=GROUP), key=_place_of):
        named.add_foreign(point)
    return named.choose(frozenset(select), frozenset(ignore))


def installed() -> tuple[Check, ...]:
    """Every check that can be used, by layer, turn and name."""
    return load().checks


def page(check: Check) -> str:
    """The check's own page: the docstring of its module, or else of its class."""
    module = inspect.getmodule(type(check))
    return inspect.getdoc(module) or inspect.getdoc(type(check)) or ""


def question(check: Check) -> str:
    """First line of the page of a check: the question that it answers."""
    return page(check).partition("\n")[0].strip()


def _not_ours(folder: str) -> str:
    """Reason to leave out the plug-ins of a folder: it is the working directory, and another user
    may have put them there. Empty for every other folder.
    """
    try:
        if not os.path.samefile(folder, "."):
            return ""
        folders.check_way(Path(folder).resolve())
        there = os.stat(folder)
        words = f"{folder}, the working directory, belongs to another user (uid {there.st_uid})"
        return "" if folders.is_ours(there) else words
    except OSError as error:
        return f"{folder}: {error.strerror}"


class _NamedChecks:
    """Checks in the order in which they were found; the first to use a name or code keeps it."""

    def __init__(self) -> None:
        self.checks: dict[str, Check] = {}
        self.origins: dict[str, str] = {}
        self.problems: list[Finding] = []
        self.owners: dict[str, tuple[str, ...]] = {}
        self.kinds: dict[str, tuple[Kind, Check | None]] = {
            kind.code: (kind, None)
            for kind in (
                *ENGINE_KINDS,
                *BESIDE_KINDS,
                *REMOTE_KINDS,
                *HISTORY_KINDS,
                *AUTOPSY_KINDS,
            )
        }

    def add(self, target: str, origin: str, find: Callable[[], Any]) -> None:
        try:
            check = _check_of(find(), own=origin == _BUILT_IN)
            self._refuse_duplicates(check, origin)
        except (Exception, SystemExit) as error:  # whatever its import raises is its own fault
            self._leave_out(target, origin, _in_words(error))
            return
        self.checks[check.name] = check
        self.origins[check.name] = origin
        for kind in check.kinds:
            self.kinds.setdefault(kind.code, (kind, check))
            self.owners[kind.code] = (*self.owners.get(kind.code, ()), check.name)

    def add_foreign(self, point: metadata.EntryPoint) -> None:
        """Add the check of another distribution, if a child comes back from importing it."""
        target, origin = f"{point.name} = {point.value}", _distribution(point)
        where = "" if point.dist is None else str(point.dist.locate_file(""))
        if where and (reason := _not_ours(where)):
            self._leave_out(target, origin, reason)
            return
        problem = foreign.problem_of_import(
            f"{where}: {origin}: {target}", lambda: _check_of(point.load(), own=False), _in_words
        )
        if problem:
            self._leave_out(target, origin, problem)
        else:
            self.add(target, origin, point.load)

    def _leave_out(self, target: str, origin: str, text: str) -> None:
        text = masked(text)
        self.problems.append(
            Finding(
                CHECK_UNUSABLE,
                f"{origin} ({target}): {text}",
                evidence={"distribution": origin, "target": target, "error": text},
            )
        )

    def _refuse_duplicates(self, check: Check, origin: str) -> None:
        if check.name in self.checks:
            raise _Unusable(f'the check name "{check.name}" is used by {self.origins[check.name]}')
        for kind in check.kinds:
            known, other = self.kinds.get(kind.code, (None, None))
            # Built-in checks share a code by listing the very same kind.
            if known is not None and not (other and origin == _BUILT_IN and known == kind):
                owner = "the engine" if other is None else f"check {other.name}"
                raise _Unusable(f'the finding code "{kind.code}" is used by {owner}')

    def choose(self, select: frozenset[str], ignore: frozenset[str]) -> Registry:
        known = {*self.checks, *self.kinds}
        for option, names in (("--select", select), ("--ignore", ignore)):
            for name in sorted(names - known):
                hint = suggest(name, known) or "; `nccl-doctor checks` lists them"
                if self.problems:
                    hint += "".join(f"; not loaded: {p.message}" for p in self.problems)
                raise UnknownName(f'{option}: no check or finding code is named "{name}"{hint}')
        for name in sorted(select & {code for code, (_, by) in self.kinds.items() if by is None}):
            raise UnknownName(f'--select: "{name}" is a code of the engine and cannot be selected')
        every = sorted(self.checks.values(), key=_order)
        all_of_it = Registry((), (), self.kinds, self.origins, select, ignore, self.owners)
        # A check none of whose findings is wanted would run for nothing and then read "pass".
        chosen = tuple(c for c in every if any(all_of_it.wants(c.name, k.code) for k in c.kinds))
        unselected = replace(all_of_it, select=frozenset())
        return replace(
            all_of_it,
            checks=chosen,
            vital=tuple(
                c
                for c in every
                if c.vital
                and c not in chosen
                and any(unselected.wants(c.name, k.code) for k in c.kinds)
            ),
            # Whatever was selected is here, so what could not be loaded is not part of this run.
            problems=tuple(
                p.replaced(severity=Severity.INFO) if select else p
                for p in self.problems
                if all_of_it.wanted(p.code)
            ),
        )


def _order(check: Check) -> tuple[int, int, str]:
    return check.layer.order, check.turn.order, check.name


class _Unusable(Exception):
    """Reason why a check cannot be used, as a complete sentence."""


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, _Unusable) else f"{type(error).__name__}: {error}"


def _check_of(found: Any, *, own: bool) -> Check:
    if isinstance(found, ModuleType):
        classes = [
            value
            for value in vars(found).values()
            if inspect.isclass(value)
            and issubclass(value, Check)
            and value.__module__ == found.__name__
        ]
        if len(classes) != 1:
            raise _Unusable(f"the module defines {len(classes)} checks, not one")
        found = classes[0]
    if not (inspect.isclass(found) and issubclass(found, Check) and found is not Check):
        raise _Unusable(f"{found!r} is neither a module with a check nor a Check class")
    check = found()
    for problem in _invalid(check):
        raise _Unusable(f"{found.__name__}: {problem}")
    return check if own else foreign.guarded(found)()


def _invalid(check: Check) -> Iterable[str]:
    for name, what in (("name", str), ("layer", Layer), ("scope", Scope), ("level", Level)):
        if not isinstance(getattr(check, name, None), what):
            yield f"`{name}` is not a {what.__name__}"
            return
    if not _NAME.fullmatch(check.name):
        yield f'`name` is "{check.name}", not snake_case'
    kinds = getattr(check, "kinds", None)
    if not isinstance(kinds, tuple) or not kinds or not all(isinstance(k, Kind) for k in kinds):
        yield "`kinds` is not a tuple of one or more Kind"
        return
    codes = [kind.code for kind in kinds]
    for code in codes:
        if not _CODE.fullmatch(code):
            yield f'the finding code "{code}" is not kebab-case'
        if codes.count(code) > 1:
            yield f'the finding code "{code}" is twice in `kinds`'
    if not all(isinstance(layer, Layer) for layer in check.needs):
        yield "`needs` contains something that is not a Layer"
    if not isinstance(check.turn, Turn):
        yield f"`turn` is {check.turn!r}, not a Turn"
    at_once = check.at_once
    if not isinstance(at_once, tuple) or not all(
        isinstance(kind, Kind) and kind.code in codes for kind in at_once
    ):
        yield "`at_once` is not a tuple of kinds whose codes are those of `kinds`"
    reads = check.reads
    if not isinstance(reads, tuple) or not all(
        isinstance(name, str) and _NAME.fullmatch(name) for name in reads
    ):
        yield f"`reads` is {reads!r}, not a tuple of names of checks"
    elif check.name in reads:
        yield "`reads` names the check itself"
    if not isinstance(check.deadline_s, (int, float)) or not check.deadline_s > 0:
        yield f"`deadline_s` is {check.deadline_s!r}, not a positive number"
    for method in ("observe", "judge"):
        if getattr(type(check), method) is getattr(Check, method):
            yield f"`{method}` is missing"


def _distribution(point: metadata.EntryPoint) -> str:
    if point.dist is None:
        return "an unnamed distribution"
    return f"{point.dist.name} {point.dist.version}"


def _place_of(point: metadata.EntryPoint) -> tuple[str, str, str]:
    return _distribution(point), point.name, point.value
