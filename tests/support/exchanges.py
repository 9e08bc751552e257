"""Made-up hosts that measure the links between them, twice: facts of check `links`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from nccl_doctor.api import Cluster, Finding, Outcome, OutcomeStatus, Round, Severity
from nccl_doctor.checks.links import Links
from tests.support.clusters import make_cluster, outcome, reread
from tests.support.findings import judge

CHECK = Links()
FIRST, AGAIN = 1, 2
BOTH = (FIRST, AGAIN)
USUAL = 1.25e9

Link = tuple[str, str]


class World:
    """Healthy hosts that measure each other twice, to be spoilt by a test.

    Only what the check itself asks for is measured the second time.
    """

    def __init__(self, count: int, backend: str = "gloo") -> None:
        self.names = [f"nd{i}" for i in range(count)]
        self.backend = backend
        self.pairs: list[Link] = list(permutations(self.names, 2))
        self.records = {(number, pair): record() for number in BOTH for pair in self.pairs}
        self.host_facts: dict[str, dict[str, Any]] = {name: {} for name in self.names}
        self.silent: set[str] = set()

    def seat(self, name: str) -> int:
        return 2 * self.names.index(name)

    def of(self, name: str, way: str = "both") -> list[Link]:
        """Links of one host, by direction."""
        ends = {"out": (0,), "in": (1,), "both": (0, 1)}[way]
        return [pair for pair in self.pairs if name in {pair[end] for end in ends}]

    def change(self, links: Iterable[Link], tries: Sequence[int] = BOTH, **fields: Any) -> World:
        for pair in links:
            for number in tries:
                self.records[number, pair] = {**self.records[number, pair], **fields}
        return self

    def slow(self, links: Iterable[Link], tries: Sequence[int] = BOTH, share: float = 0.1) -> World:
        return self.change(links, tries, rate=share * USUAL)

    def starve(self, name: str, tries: Sequence[int] = BOTH) -> World:
        """The CPU of a host is taken: both sides of its links know."""
        for pair in self.of(name):
            ends = [cpu(0.6 if end == name else 0.0) for end in pair]
            self.change([pair], tries, cpu={"echo": ends, "burst": ends})
        return self

    def noise(self, seed: int, share: float) -> World:
        """Every value of every try is off by up to a share of it."""
        chance = random.Random(seed)
        for key, each in self.records.items():
            self.records[key] = {
                **each,
                "rate": each["rate"] * chance.uniform(1 - share, 1 + share),
                "rtt_us": each["rtt_us"] * chance.uniform(1 - share, 1 + share),
            }
        return self

    def cluster(self, **fields: Any) -> Cluster:
        """After both rounds, as re-read from a saved report."""
        return self.after(CHECK.plan(self.after(**fields))[1:], **fields)

    def judge(self, **fields: Any) -> list[Finding]:
        cluster = self.cluster(**fields)
        assert [r.name for r in CHECK.plan(cluster)] == [
            r.name for r in CHECK.plan(self.after(**fields))
        ]
        return judge(CHECK, cluster)

    def meetings(self) -> set[frozenset[str]]:
        """Pairs of hosts that meet again."""
        _, *again = CHECK.plan(self.after())
        return {frozenset(self.names[seat // 2] for seat in m) for r in again for m in _met(r)}

    def after(self, again: Sequence[Round] = (), **fields: Any) -> Cluster:
        """After the first round and these."""
        made = make_cluster(self.names, backend=self.backend, **fields)
        hosts = []
        for host in made.hosts:
            name = host.name or ""
            rounds = {"exchange": outcome(self._facts(name, FIRST, None))}
            for each in again:
                if self.seat(name) in each.groups[0]:
                    rounds[each.name] = outcome(self._facts(name, AGAIN, set(_met(each))))
            if name in self.silent:
                rounds = {key: outcome(Outcome(OutcomeStatus.SILENT)) for key in rounds}
            hosts.append(replace(host, facts=reread({"links": rounds})))
        ranks = [replace(rank, host=hosts[rank.host.id]) for rank in made.ranks]
        return replace(made, hosts=tuple(hosts), ranks=tuple(ranks))

    def _facts(self, name: str, number: int, only: set[frozenset[int]] | None) -> dict[str, Any]:
        return {
            "address": f"192.168.77.{self.names.index(name) + 1}",
            "interface": "eth0",
            "nic_mbps": None,
            "carries_data": True,
            "load": 0.5,
            "sent": {
                str(self.seat(other)): self.records[number, (name, other)]
                for other in self.names
                if other != name
                and (only is None or frozenset((self.seat(name), self.seat(other))) in only)
            },
            **self.host_facts[name],
        }


def _met(round_: Round) -> list[frozenset[int]]:
    return [frozenset(meeting) for slot in round_.params["slots"] for meeting in slot]


def cpu(waited: float) -> dict[str, Any]:
    return {"wall_s": 1.0, "cpu_s": 0.1, "waited_s": waited, "preempted": 3}


def record(**fields: Any) -> dict[str, Any]:
    return {
        "rtt_us": 50.0,
        "rate": USUAL,
        "tcp": {"segments": 100_000, "lost": 0, "rtt_us": 60, "rttvar_us": 9, "retransmits": 0},
        "cpu": {"echo": [cpu(0.0)] * 2, "burst": [cpu(0.01)] * 2},
        "stalled": "",
        **fields,
    }


def loud(findings: Iterable[Finding]) -> list[Finding]:
    return [found for found in findings if found.level is not Severity.INFO]


def only(findings: Sequence[Finding], code: str) -> Finding:
    assert [each.code for each in findings] == [code], findings
    assert findings[0].fix
    return findings[0]


def both(a: str, b: str) -> list[Link]:
    return [(a, b), (b, a)]
