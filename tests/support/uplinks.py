"""Made-up hosts and their cables: facts of check `uplink`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import AFTER_LOSS, ALONE, Cluster, Finding
from nccl_doctor.checks.uplink import Uplink
from tests.support.clusters import make_cluster, outcome, reread
from tests.support.findings import judge

CHECK = Uplink()
GATEWAY = "192.168.77.254"


def address(name: str) -> str:
    """Hosts as `make_cluster` gives them."""
    return f"192.168.77.{int(name.removeprefix('nd')) + 1}"


def nic(of: str, name: str = "eth0", **fields: Any) -> dict[str, Any]:
    made = {"name": name, "addresses": [address(of)], "up": True, "running": True, "changes": 2}
    return {**made, **fields}


def look(of: str, *nics: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Facts of a host on itself; `calls`: name of a host → outcome."""
    calls = [
        {"host": name, "addresses": [address(name)], "outcome": result}
        for name, result in fields.pop("calls", {}).items()
    ]
    mine = list(nics) or [nic(of)]
    main = mine[0]["name"]
    return {"interfaces": mine, "towards_master": main, "gateway": None, "calls": calls, **fields}


def gateway(result: str) -> dict[str, Any]:
    return {"address": GATEWAY, "interface": "eth0", "outcome": result}


def with_looks(
    cluster: Cluster, first: Mapping[str, Any], after: Mapping[str, Any] | None = None
) -> Cluster:
    """The same hosts with what they saw at first, and after a loss."""
    hosts = []
    for host in cluster.hosts:
        rounds = {
            name: outcome(facts[host.name])
            for name, facts in ((ALONE, first), (AFTER_LOSS, after or {}))
            if host.name in facts
        }
        more = reread({CHECK.name: rounds}) if rounds else {}
        hosts.append(replace(host, facts={**host.facts, **more}))
    ranks = [replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks]
    return replace(cluster, hosts=tuple(hosts), ranks=tuple(ranks))


def cables(
    names: Sequence[str],
    first: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Cluster:
    """Hosts with healthy cables, but for what is said."""
    healthy = {name: look(name) for name in names}
    return with_looks(make_cluster(names, **fields), {**healthy, **(first or {})}, after)


def calls_of(caller: str, **results: str) -> dict[str, Any]:
    """Facts of a host with a healthy cable after the loss."""
    return {caller: look(caller, calls=results)}


def judged(cluster: Cluster) -> list[Finding]:
    return judge(CHECK, cluster)
