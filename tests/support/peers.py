"""Made-up hosts that choose interfaces and call each other: facts of two checks that share them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from nccl_doctor.api import ALONE, Cluster, Finding, Outcome
from nccl_doctor.checks.firewall import Firewall
from nccl_doctor.checks.interfaces import Interfaces
from tests.support.clusters import make_cluster, outcome, reread
from tests.support.findings import judge

DROPPED = {"outcome": "dropped", "detail": "no answer", "duration_s": 3.0}
REFUSED = {"outcome": "refused", "detail": "Connection refused", "duration_s": 0.001}
NO_ROUTE = {"outcome": "unreachable", "detail": "Network is unreachable", "duration_s": 0.0}
OWN = {"outcome": "own-address"}
OK = {"outcome": "ok", "duration_s": 0.01}
SILENT_PROXY = {"outcome": "intercepted", "detail": "no proof of identity", "duration_s": 3.0}


def stuck(way: str, arrived: int = 0) -> dict[str, Any]:
    key = f"{way}ed"
    return {"outcome": "mtu", "detail": f"{way} stopped", "stalled": way, key: arrived}


Link = tuple[str, str]


class World:
    """Healthy facts of some hosts, to be spoilt by a test.

    `facts` holds those of check `interfaces` and of round `matrix` of check `firewall` together.
    """

    def __init__(self, count: int, backend: str = "nccl") -> None:
        self.names = [f"nd{i}" for i in range(count)]
        self.backend = backend
        self.facts: dict[str, dict[str, Any]] = {}
        self.rules: dict[str, dict[str, Any]] = {}
        self.outcomes: dict[str, Outcome] = {}
        for index, name in enumerate(self.names):
            self.facts[name] = {
                "interfaces": [nic("eth0", f"192.168.77.{index + 1}"), nic("lo", "127.0.0.1")],
                "choices": {
                    library: choice([("eth0", f"192.168.77.{index + 1}")])
                    for library in ("nccl-bootstrap", "nccl-sockets", "gloo")
                },
                "listen": [self.entry(name)],
                "nccl_data": "sockets",
                "port_range": [32768, 60999],
                "peers": {
                    str(self.seat(other)): [self.call(other)]
                    for other in self.names
                    if other != name
                },
            }

    def seat(self, name: str) -> int:
        return 2 * self.names.index(name)

    def address(self, name: str) -> str:
        return f"192.168.77.{self.names.index(name) + 1}"

    def entry(self, name: str) -> dict[str, Any]:
        roles = ["nccl-bootstrap", "nccl-sockets", "gloo"]
        return {"interface": "eth0", "address": self.address(name), "roles": roles}

    def call(self, to: str, **fields: Any) -> dict[str, Any]:
        return {**self.entry(to), "port": 40000 + self.seat(to), "attempts": [OK], **fields}

    def fail(self, links: Iterable[Link], attempt: Mapping[str, Any]) -> World:
        for a, b in links:
            for call in self.facts[a]["peers"][str(self.seat(b))]:
                call["attempts"] = [dict(attempt)] * 2
                call["source"] = self.address(a)
        return self

    def extra(self, a: str, b: str, nic: str, attempt: Mapping[str, Any], *roles: str) -> World:
        entry = {"interface": nic, "address": f"10.0.0.{self.seat(b)}", "roles": list(roles)}
        self.facts[a]["peers"][str(self.seat(b))].append(
            {**entry, "port": 5, "attempts": [dict(attempt)] * 2}
        )
        return self

    def hit(self, host: str, link: Link, kind: str = "connect", **fields: Any) -> World:
        rules = self.rules.setdefault(
            host, {"readable": True, "reason": "", "managers": [], "drops": [], "hits": []}
        )
        caller, listener = link
        rules["hits"].append(
            {
                "tool": "nft",
                "table": "inet fw",
                "chain": "input",
                "rule": "tcp dport 32768-60999 drop",
                "handle": "4",
                "verdict": "drop",
                "sure": True,
                "packet": "first",
                "incoming": True,
                "caller": self.seat(caller),
                "listener": self.seat(listener),
                "kind": kind,
                **fields,
            }
        )
        return self

    def cluster(self, **fields: Any) -> Cluster:
        made = make_cluster(self.names, backend=self.backend, **fields)
        hosts = []
        for host in made.hosts:
            name = host.name or ""
            rounds = {"matrix": outcome(self.outcomes.get(name, self.facts[name]))}
            if name in self.rules:
                rounds["rules"] = outcome(self.rules[name])
            facts = {"firewall": rounds, "interfaces": {ALONE: outcome(self.facts[name])}}
            hosts.append(replace(host, facts=reread(facts)))
        ranks = [replace(rank, host=hosts[rank.host.id]) for rank in made.ranks]
        return replace(made, hosts=tuple(hosts), ranks=tuple(ranks))

    def judge(self, **fields: Any) -> list[Finding]:
        """Findings of both checks."""
        cluster = self.cluster(**fields)
        return [*judge(Interfaces(), cluster), *judge(Firewall(), cluster)]


def nic(name: str, address: str, mtu: int = 1500) -> dict[str, Any]:
    net = "127.0.0.0/8" if name == "lo" else address.rpartition(".")[0] + ".0/24"
    return {
        "name": name,
        "addresses": [address],
        "up": True,
        "running": True,
        "loopback": name == "lo",
        "mtu": mtu,
        "subnets": [net],
    }


def choice(picks: Sequence[Link], **fields: Any) -> dict[str, Any]:
    return {
        "picks": [list(pick) for pick in picks],
        "reason": "by rule",
        "variable": "",
        "value": "",
        "origin": "",
        "problem": "",
        "names": [],
        **fields,
    }


def only(findings: Sequence[Finding], code: str) -> Finding:
    assert [each.code for each in findings] == [code]
    return findings[0]


def pairs(world: World) -> list[Link]:
    return list(permutations(world.names, 2))
