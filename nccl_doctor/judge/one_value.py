"""One value for each setting of a host, in all that a report proposes. Pure.

Rules that know nothing of each other may propose two values for one variable: whoever types both
has the second one. What the most telling finding proposes stands; another way that sets it to
another value is left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from nccl_doctor.judge.causes import importance
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.commands import unknown_in
from nccl_doctor.model.findings import Finding, Where
from nccl_doctor.model.fixes import Fix, StepHosts, join_ways, ways_of

_Set = tuple[str, str]
"""A host, and a setting of it."""


def one_value_each(findings: Sequence[Finding], cluster: Cluster) -> list[Finding]:
    """The findings, without ways to fix them that set a setting of a host to another value than a
    more telling finding does, or a way before them.
    """
    settled = _Settled(cluster)
    new = {id(each): settled.kept(each) for each in sorted(findings, key=_order)}
    return [new[id(each)] for each in findings]


def _order(finding: Finding) -> tuple[Any, ...]:
    """Causes first, as `root_causes` sorts them."""
    return (finding.explained_by is not None, *importance(finding))


@lru_cache(maxsize=4096)
def settings_of(command: str) -> Mapping[str, str]:
    """Setting → value that a command gives it: variables of `export` (empty for `unset`), keys of
    `sysctl -w`, options in the line that starts the job, the MTU of an interface.

    Empty where a value is not known, or the command does something else.
    """
    option = command.startswith("# --")
    if (command.startswith("#") and not option) or unknown_in(command):
        return {}
    try:
        words = shlex.split(command.removeprefix("# "))
    except ValueError:
        return {}
    return dict(_settings(words))


def _settings(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    first, rest = words[0] if words else "", words[1:]
    pairs = [each.partition("=") for each in rest]
    if first == "export" and all(sign for _, sign, _ in pairs):
        yield from ((name, value) for name, _, value in pairs)
    elif first == "unset":
        yield from ((name, "") for name in rest)
    elif words[:2] == ["sysctl", "-w"] and all(sign for _, sign, _ in pairs[1:]):
        yield from ((name.replace("/", "."), value) for name, _, value in pairs[1:])
    elif words[:4] == ["ip", "link", "set", "dev"] and words[5:6] == ["mtu"] and len(words) == 7:
        yield f"the MTU of {words[4]}", words[6]
    elif first.startswith("--") and len(rest) == 1:
        yield first, rest[0]


class _Settled:
    """Values that the findings so far set."""

    def __init__(self, cluster: Cluster) -> None:
        self._hosts = StepHosts(cluster)
        self._values: dict[_Set, tuple[str, str]] = {}
        """Host and setting → its value, and the code of the finding that proposes it."""

    def kept(self, finding: Finding) -> Finding:
        """The finding with those of its ways that agree; their settings are settled then."""
        fix = finding.fix or finding.kind.fix
        if not isinstance(fix, Fix):
            return finding
        left: list[Fix] = []
        other: tuple[str, str] | None = None
        for way in ways_of(fix):
            values = self._of(way, finding.where)
            clash = next(
                (
                    (key[1], self._values[key][1])
                    for key, value in values.items()
                    if self._values.get(key, (value, ""))[0] != value
                ),
                None,
            )
            if clash is not None:
                other = other or clash
                continue
            for key, value in values.items():
                self._values.setdefault(key, (value, finding.code))
            left.append(way)
        if other is None:
            return finding
        name, code = other
        first = Fix(text=f"do first what is said for {code}, which sets {name}")
        return finding.replaced(fix=join_ways(left or [first]))

    def _of(self, way: Fix, where: Where) -> dict[_Set, str]:
        return {
            (host, name): value
            for step in way.steps
            for name, value in settings_of(step.command).items()
            for host in self._hosts.of(step, where)
        }
