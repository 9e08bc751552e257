"""One rank's variables, as its libraries read them: the input of the rules."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nccl_doctor.api import Cluster, Command, Confidence, Fix, Rank, Severity, Step, Where, shell
from nccl_doctor.system.masking import MASK
from nccl_doctor.toolkit.variables.recorded import SET
from nccl_doctor.toolkit.variables.table import Variable, table
from nccl_doctor.toolkit.variables.values import canonical, number_of
from nccl_doctor.toolkit.versions import loaded_nccl

from .gather import ENVIRONMENT
from .gpu_models import hosts_of_several_models

# Workers of Ray have the environment of their host's `ray start`, not that of the driver's shell.
_AT_RAY = " before Ray starts"
_OR_RAY = "or put it into env_vars of the job's runtime_env"
_PLAIN = re.compile(r"[\w.,:=^/+-]*")
"""A value that sed takes for nothing but itself."""


@dataclass(frozen=True)
class Problem:
    """A problem of one rank's variables, which becomes a finding of the same code.

    Equal problems of several ranks are one finding, so nothing here may depend on the rank.
    `variable` is the one whose value or limit it is about, if any.
    """

    code: str
    message: str
    fix: str
    severity: Severity
    explained_by: str | None = None
    confidence: Confidence = Confidence.CERTAIN
    variable: str = ""


@dataclass(frozen=True)
class Placed:
    """A problem with its place."""

    problem: Problem
    where: Where
    evidence: Mapping[str, Any] = field(default_factory=dict)


def version_tuple(text: str | None) -> tuple[int, ...]:
    """`"2.13.0+cpu"` gives (2, 13, 0); empty for None."""
    return tuple(map(int, re.findall(r"\d+", (text or "").split("+", maxsplit=1)[0])))


class View:
    """The effective variables of one rank, and the facts that decide their severity."""

    def __init__(
        self,
        cluster: Cluster,
        facts: Mapping[str, Any],
        given: Mapping[str, str],
        *,
        launcher: str,
        has_peers_here: bool,
    ) -> None:
        """`given`: the environment of the rank: variables that a rule may ask for."""
        self.facts = facts
        self.backend = cluster.backend
        self.spans_hosts = cluster.is_multi_host()
        self.has_three_gloo_ranks = "gloo" in cluster.backend and cluster.world_size > 2
        self.launcher = launcher
        self.given = given
        self.has_peers_here = has_peers_here
        self.has_several_models = bool(facts.get("several_models"))
        self._settings: Mapping[str, Mapping[str, Any]] = facts["variables"]

    @cached_property
    def rows(self) -> tuple[Variable, ...]:
        """Rows of the table that are set here, by name."""
        known = table().variables
        return tuple(self._row(name) for name in sorted(self._settings) if name in known)

    def _row(self, name: str) -> Variable:
        """The row of a variable, with the default of the library that is here."""
        row = table().variables[name]
        return row.at(self.version(row.library)) if row.moved else row

    def text(self, name: str) -> str | None:
        """The value as it was typed; None where it is not set or was masked."""
        value = self._settings.get(name, {}).get("value")
        return None if value in (None, MASK, SET) else str(value)

    def is_set(self, name: str) -> bool:
        """True if it is set, whatever the value."""
        return name in self._settings

    def meaning(self, name: str) -> str | None:
        """The meaning for its library: the default if it is not set, None if unknown."""
        return canonical(self._row(name), self.text(name))

    def number(self, name: str) -> int | None:
        """The number that its library reads; the default if it is not set."""
        row, text = self._row(name), self.text(name)
        return number_of(row, row.default or "" if text is None else text)

    def reading(self, name: str) -> Mapping[str, Any] | None:
        """`value` and `taken`, as NCCL itself reads this text; None where it did not say so.

        It was asked once on the host, in the environment of one rank.
        """
        found: Mapping[str, Any] | None = self.facts.get("readings", {}).get(name)
        return found if found and found["text"] == self.text(name) else None

    def refusal(self, name: str) -> str | None:
        """Error of the library that tried this text, empty if it took it, None if none tried."""
        found = self.facts.get("tried", {}).get(name)
        return found["error"] if found and found["text"] == self.text(name) else None

    def says(self, name: str, value: str | None = None) -> str:
        """`NAME=value`, with the file and line in which it is set, if any."""
        setting = self._settings[name]
        text = setting["value"] if value is None else value
        return f"{name}={text}{self._at(name)}"

    def _at(self, name: str) -> str:
        setting = self._settings.get(name, {"origin": ENVIRONMENT})
        if setting["origin"] == ENVIRONMENT:
            return ""
        return f" ({setting['origin']} line {setting['line']})"

    def put(self, name: str, value: str) -> Fix:
        """The fix that sets another value, in the place where it is set now."""
        setting = self._settings.get(name, {"origin": ENVIRONMENT})
        ray = f"{_AT_RAY}, {_OR_RAY}" if self.launcher == "ray" else ""
        if setting["origin"] == ENVIRONMENT:
            step = Step(
                shell("export {:variable}={}", name, value), undo=self._back(name), note=ray.strip()
            )
            return Fix(step, text=step.command + ray)
        text = f"write {name}={value} in line {setting['line']} of {setting['origin']}"
        before = str(setting["value"])
        if not (_PLAIN.fullmatch(value) and _PLAIN.fullmatch(before)):
            return Fix(text=text)

        def written(new: str) -> Command:
            line, file = setting["line"], setting["origin"]
            return shell("sed -i '{:number}s|.*|{:variable}={:plain}|' {}", line, name, new, file)

        return Fix(Step(written(value), undo=written(before), persists=True), text=text)

    def drop(self, name: str) -> Fix:
        """The fix that removes it; a line of a file becomes a comment."""
        setting = self._settings.get(name, {"origin": ENVIRONMENT})
        ray = _AT_RAY if self.launcher == "ray" else ""
        if setting["origin"] == ENVIRONMENT:
            step = Step(shell("unset {:variable}", name), undo=self._back(name), note=ray.strip())
            return Fix(step, text=step.command + ray)
        line, file = setting["line"], setting["origin"]
        hide = shell("sed -i '{:number}s/^/# /' {}", line, file)
        show = shell("sed -i '{:number}s/^# //' {}", line, file)
        text = f"remove line {line} ({name}) from {setting['origin']}"
        return Fix(Step(hide, undo=show, persists=True), text=text)

    def _back(self, name: str) -> Command:
        """The command that restores what the environment has; empty where that is not known."""
        if name not in self._settings and name not in self.given:
            return shell("unset {:variable}", name)
        value = self.original(name)
        return shell("export {:variable}={}", name, value) if value is not None else Command()

    def original(self, name: str) -> str | None:
        """The value in the environment of the rank; None where it is not recorded as it is."""
        value = self.given.get(name, self.text(name))
        return None if value is None or MASK in value or value == SET else value

    def version(self, library: str) -> tuple[int, ...]:
        """The version of the loaded NCCL, or of torch; empty if unknown."""
        return version_tuple(self.facts.get("torch" if library == "gloo" else library))

    def is_older(self, library: str, version: str) -> bool:
        """True if the library in use is known to be older than that."""
        mine, other = self.version(library), version_tuple(version)
        return bool(mine and other) and mine[: len(other)] < other

    def is_newer(self, library: str, version: str) -> bool:
        """True if the library in use is known to be newer than that."""
        mine, other = self.version(library), version_tuple(version)
        return bool(mine and other) and mine[: len(other)] > other

    def bounded(self, row: Variable, severity: Severity) -> Severity:
        """The severity, at most a warning if it is not certain that this job reads the variable,
        and information if it has no effect on this host.
        """
        if row.mixed and not self.has_several_models:
            return Severity.INFO
        readers = {
            "nccl": "nccl" in self.backend,
            "gloo": "gloo" in self.backend,
            "deepspeed": bool(self.facts.get("deepspeed")),
        }
        is_read = readers.get(row.read_by, True)
        return Severity.WARN if severity is Severity.FAIL and not is_read else severity


def all_of(*fixes: Fix) -> Fix:
    """The fixes one after the other."""
    whole = all(fix.steps for fix in fixes)
    return Fix(*(s for fix in fixes if whole for s in fix.steps), text="; ".join(fixes))


def either(first: Fix, *others: str) -> Fix:
    """The first fix, and others in place of it."""
    ways = [each if isinstance(each, Fix) else Fix(text=each) for each in others]
    text = ", or ".join([str(first), *others])
    return Fix(*first.steps, text=text, alternatives=ways)


Seen = Mapping[int, tuple[Rank, View]]
"""Seat → the participant and its variables. Ranks with the same variables have one `View`."""


def views_of(seen: Seen) -> dict[int, View]:
    """Each `View` once, by its identity."""
    return {id(view): view for _, view in seen.values()}


def look(cluster: Cluster, check: str) -> Seen:
    """The variables of every rank, from the facts of `check`."""
    rows = table().variables
    loaded, mixed = loaded_nccl(cluster), frozenset[int]()
    asks = [name for name, row in rows.items() if row.mixed]
    if any(name in facts["variables"] for _, facts in cluster.facts(check) for name in asks):
        mixed = hosts_of_several_models(cluster)
    answers = {
        rank.host.id: facts.get("asked") or _NO_ANSWER
        for rank, facts in cluster.facts("interfaces")
    }
    same, views = _Same(), dict[Hashable, View]()
    seen = {}
    for rank, facts in cluster.facts(check):
        answer = answers.get(rank.host.id, _NO_ANSWER)
        unknown = facts["unknown"]
        given = {n: value for n, value in rank.env.items() if n in rows or n in unknown}
        # The version that torch was built with, if the loaded one is not known.
        nccl = loaded.get(rank.seat) or facts.get("nccl")
        launcher = rank.launch.launcher if rank.launch else "none"
        peers = len(cluster.ranks_on(rank.host)) > 1
        key = (
            *(same.number(facts), same.number(answer), tuple(given.items())),
            *(nccl, rank.host.id in mixed, launcher, peers),
        )
        if key not in views:
            listed = answer.get("names", ())
            read = {
                **facts,
                # An NCCL that is newer than the table may list them itself.
                "unknown": [name for name in unknown if name not in listed],
                "readings": answer.get("readings", {}),
                "nccl": nccl,
                "several_models": rank.host.id in mixed,
            }
            views[key] = View(cluster, read, given, launcher=launcher, has_peers_here=peers)
        seen[rank.seat] = rank, views[key]
    return seen


_NO_ANSWER: Mapping[str, Any] = {}


class _Same:
    """Numbers of facts, the same for equal ones; those that are one object are looked at once."""

    def __init__(self) -> None:
        self._of_object: dict[int, int] = {}
        self._of_text: dict[str, int] = {}

    def number(self, facts: Mapping[str, Any]) -> int:
        """The number of facts that live longer than this."""
        if id(facts) not in self._of_object:
            text = json.dumps(facts, default=repr)
            self._of_object[id(facts)] = self._of_text.setdefault(text, len(self._of_text))
        return self._of_object[id(facts)]
