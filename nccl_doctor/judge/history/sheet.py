"""All figures of one run, found again in another by check, name and place. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from nccl_doctor.judge.checks import in_words, view_for
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster, OutcomeStatus
from nccl_doctor.model.findings import Figure, Where

Key = tuple[str, str, Where]
"""Check, name of the figure, and place."""


@dataclass(frozen=True)
class Sheet:
    """The figures of one run.

    `numbers` are measured, `words` are not; words of a host on which all ranks agree stand for the
    host. `seen` are the hosts on which a check observed, so that what it did not name was not
    there. `broken` maps checks to what their `figures` raised.
    """

    numbers: Mapping[Key, Figure] = field(default_factory=dict)
    words: Mapping[Key, Figure] = field(default_factory=dict)
    seen: Mapping[str, frozenset[str]] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)


def sheet_of(cluster: Cluster, checks: Iterable[Check]) -> Sheet:
    """Ask every check; one that breaks keeps what it said before."""
    numbers: dict[Key, Figure] = {}
    words: dict[Key, list[Figure]] = {}
    seen: dict[str, frozenset[str]] = {}
    broken: dict[str, str] = {}
    for check in checks:
        if type(check).figures is Check.figures:
            continue  # it has none
        view = view_for(check, cluster)
        try:
            for figure in check.figures(view):
                key = (check.name, figure.name, _place(figure))
                if not figure.better:
                    words.setdefault(key, []).append(figure)
                elif isinstance(figure.value, (int, float)) and math.isfinite(figure.value):
                    numbers[key] = _worse(figure, numbers.get(key))
        except Exception as error:  # of a plug-in, or on the facts of another version
            broken[check.name] = in_words(error)
        seen[check.name] = frozenset(
            item.host.label
            for item in view.evidence(check.name)
            if item.outcome.status is OutcomeStatus.OK
        )
    return Sheet(numbers, {key: _united(found) for key, found in words.items()}, seen, broken)


def hosts_of(where: Where) -> set[str]:
    """Every host that a place touches."""
    return {*where.hosts, *(end for link in where.links for end in link)}


def _place(figure: Figure) -> Where:
    where = figure.where
    if not figure.better and where.hosts:
        return Where(hosts=where.hosts)
    named = where.hosts or where.links or where.devices
    return replace(where, ranks=()) if named else where


def _worse(one: Figure, other: Figure | None) -> Figure:
    """The worse of two figures at one place: it stands for both, in every run alike."""
    if other is None:
        return one
    worst = min if one.better == "higher" else max
    return worst(one, other, key=lambda figure: float(figure.value or 0.0))


def _united(found: list[Figure]) -> Figure:
    """One figure of all ranks of a host: their value, or all values if they differ."""
    values = sorted({str(each.value) for each in found if each.value is not None})
    where = found[0].where
    for each in found[1:]:
        where = where | each.where
    return replace(found[0], value=" / ".join(values) or None, where=where)
