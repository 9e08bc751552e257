"""Faults and healthy clusters as data, and what the doctor has to say of each.

A record of `faults/*.toml` or `healthy.toml` is one cluster: its hosts, what is injected, and the
causes that a right answer names. Adding a fault is adding a record; a new way of breaking something
is a function in `inject`. `blind` draws faults that nobody chose.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HERE = Path(__file__).parent
LAUNCHERS = ("own", "torchrun", "c10d", "plain", "srun")
"""The own launcher, `torchrun -m nccl_doctor`, `run -- torchrun` with c10d, plain variables for
each rank, and real Slurm.
"""


@dataclass(frozen=True)
class Cause:
    """One cause that a right answer names: one of some codes, at exactly this place.

    A place is hosts, or else links (ordered pairs of host names), or else node ranks of hosts that
    nobody knows by name. Ranks are not compared: which ranks a host has follows. `or_links`: links
    that are as right, where nothing can tell their two ends apart.
    """

    codes: frozenset[str]
    hosts: frozenset[str] = frozenset()
    links: frozenset[tuple[str, str]] = frozenset()
    nodes: frozenset[int] = frozenset()
    or_links: frozenset[tuple[str, str]] = frozenset()

    def __str__(self) -> str:
        where = [
            *sorted(self.hosts),
            *(f"{a} → {b}" for a, b in sorted(self.links)),
            *(f"node {node}" for node in sorted(self.nodes)),
        ]
        return f"{' or '.join(sorted(self.codes))} ({', '.join(where) or 'everywhere'})"


@dataclass(frozen=True)
class Case:
    """One record.

    Attributes:
        id: unique.
        row: the row of the fault catalogue, or empty.
        hosts: number of hosts, nd0, nd1, …
        inject: steps, each `{"do": function of inject, "on": host, …its arguments}`; with `"at":
            check`, taken during the run, as soon as that check is examined on the host.
        expect: the causes; none for a healthy cluster.
        waits: the verdict can come only after the join time-out.
        slice: part of the quick selection that every change is tested with.
        nproc: ranks per host.
        options: more options of `run`, on all hosts.
        stock: False where plain torchrun says nothing about it worth a minute.
        launcher: one of `LAUNCHERS`.
        clocks: by how many seconds the uptime of a host differs.
    """

    id: str
    title: str
    row: str = ""
    hosts: int = 2
    inject: tuple[Mapping[str, Any], ...] = ()
    expect: tuple[Cause, ...] = ()
    waits: bool = False
    slice: bool = False
    nproc: int = 1
    options: tuple[str, ...] = ()
    stock: bool = True
    launcher: str = "own"
    clocks: Mapping[str, int] = field(default_factory=dict)

    @property
    def during(self) -> bool:
        """Whether something begins while it is examined."""
        return any("at" in step or step["do"] == "strike" for step in self.inject)

    @property
    def touched(self) -> frozenset[str]:
        """Hosts that something was done to, and both ends of broken links."""
        on = {host for step in self.inject for host in (step.get("on"), step.get("source")) if host}
        everywhere = any(step["do"].endswith("_everywhere") for step in self.inject)
        causes = {host for cause in self.expect for host in cause.hosts}
        ends = {host for cause in self.expect for link in cause.links for host in link}
        return frozenset(self.names if everywhere else on | causes | ends)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its hosts."""
        return tuple(f"nd{index}" for index in range(self.hosts))

    def without(self, unstruck: Collection[str]) -> Case:
        """The case as it came, where what was to begin during the run never did on these hosts: the
        check that it waits for was not held there. It is no cause then, and its title says so.
        """
        if not unstruck:
            return self
        on = [
            {*cause.hosts, *(end for link in cause.links for end in link)} for cause in self.expect
        ]
        came = (
            each for each, hosts in zip(self.expect, on, strict=True) if not hosts & {*unstruck}
        )
        title = f"{self.title} (did not begin on {', '.join(sorted(unstruck))})"
        return replace(self, title=title, expect=tuple(came))


@dataclass(frozen=True)
class Corpus:
    """All records: `faults` and `healthy` clusters that look odd but are fine."""

    faults: tuple[Case, ...] = field(default=())
    healthy: tuple[Case, ...] = field(default=())


def load() -> Corpus:
    """Read the records.

    Raises:
        ValueError: a record has an unknown key, or an id that another one has.
    """
    files = {"faults": sorted(_HERE.glob("faults/*.toml")), "healthy": [_HERE / "healthy.toml"]}
    parts = {
        name: tuple(_case(data) for path in paths for data in _records(path))
        for name, paths in files.items()
    }
    ids = [case.id for cases in parts.values() for case in cases]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ValueError(f"corpus: two records have the id {', '.join(twice)}")
    return Corpus(**parts)


def _records(path: Path) -> list[Mapping[str, Any]]:
    return list(tomllib.loads(path.read_text(encoding="utf-8"))["case"])


def _case(data: Mapping[str, Any]) -> Case:
    unknown = set(data) - set(Case.__dataclass_fields__)
    if unknown:
        raise ValueError(f"corpus: {data.get('id')}: unknown key {', '.join(sorted(unknown))}")
    values = {**data, "expect": tuple(_cause(data["id"], item) for item in data.get("expect", ()))}
    for name in ("inject", "options"):
        values[name] = tuple(data.get(name, ()))
    if data.get("launcher", "own") not in LAUNCHERS:
        raise ValueError(f"corpus: {data.get('id')}: no launcher {data['launcher']}")
    return Case(**values)


def _cause(case: str, data: Mapping[str, Any]) -> Cause:
    unknown = set(data) - {"code", "hosts", "links", "nodes", "or_links"}
    if unknown:
        raise ValueError(f"corpus: {case}: unknown key {', '.join(sorted(unknown))} in expect")
    code = data["code"]
    return Cause(
        codes=frozenset([code] if isinstance(code, str) else code),
        hosts=frozenset(data.get("hosts", ())),
        links=frozenset((a, b) for a, b in data.get("links", ())),
        nodes=frozenset(data.get("nodes", ())),
        or_links=frozenset((a, b) for a, b in data.get("or_links", ())),
    )
