"""Reports of hosts that never met, and the facts that judges ask for, made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Cluster, Finding, Rank, Where
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model import kinds
from nccl_doctor.model.findings import CheckResult
from nccl_doctor.model.report import Report
from nccl_doctor.toolkit.net.names import LookUp
from tests.support.checks import REGISTRY
from tests.support.clusters import make_cluster, outcome
from tests.support.knocks import facts, tried
from tests.support.reports import RUN, through_json

THREE = ("nd0", "nd1", "nd2")


def keyed(cluster: Cluster) -> Cluster:
    """The cluster with a key for every host that reported, as the engine makes them."""
    hosts = {
        host.id: replace(host, key=f"key of {host.name}" if host.reported else "")
        for host in cluster.hosts
    }
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    return replace(cluster, hosts=tuple(hosts.values()), ranks=ranks)


def coordinators(cluster: Cluster, *lost: int) -> Cluster:
    """The coordinator's cluster, if the nodes in `lost` never signed in."""
    hosts = {
        host.id: replace(host, name=None, reported=False, addresses=(), facts={}, key="")
        if host.node_rank in lost
        else host
        for host in cluster.hosts
    }
    ranks = [
        Rank(rank.seat, rank.rank, rank.local_rank, hosts[rank.host.id], reported=False)
        if rank.host.node_rank in lost
        else replace(rank, host=hosts[rank.host.id])
        for rank in cluster.ranks
    ]
    return replace(cluster, hosts=tuple(hosts.values()), ranks=tuple(ranks))


def own_view(cluster: Cluster, node: int) -> Cluster:
    """The cluster of one host that never got in: itself, and its first rank."""
    (host,) = (host for host in cluster.hosts if host.node_rank == node)
    host = replace(host, id=0, joined=False)
    first = min((r for r in cluster.ranks if r.host.node_rank == node), key=lambda r: r.seat)
    rank = replace(first, host=host, seat=0)
    return replace(cluster, hosts=(host,), ranks=(rank,), complete=False)


def with_facts(cluster: Cluster, check: str, by_host: Mapping[str, Any]) -> Cluster:
    hosts = {
        host.id: replace(host, facts={**host.facts, check: {"alone": outcome(by_host[host.name])}})
        if host.name in by_host
        else host
        for host in cluster.hosts
    }
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    return replace(cluster, hosts=tuple(hosts.values()), ranks=ranks)


def report_of(
    cluster: Cluster,
    *problems: Finding,
    checks: Sequence[Any] = REGISTRY.checks,
    others: Sequence[CheckResult] = (),
    **run: Any,
) -> Report:
    """A report after a trip through a file. An own view says that the coordinator was lost."""
    said = list(problems)
    if not cluster.complete:
        here = Where(hosts=(str(cluster.hosts[0].name),))
        said.append(Finding(kinds.COORDINATOR_LOST, "could not sign in at nd0:29500", here))
    made = conclude(cluster, checks, run=replace(RUN, **run), problems=said, others=others)
    return through_json(made)


def parts(cluster: Cluster, *lost: int) -> list[Report]:
    """The coordinator's report, and the own views of those it did not see."""
    seen = report_of(coordinators(cluster, *lost))
    return [seen, *(report_of(own_view(cluster, node)) for node in lost)]


def roots(report: Report) -> dict[str, Where]:
    through_json(report)
    return {finding.code: finding.where for finding in report.root_causes}


HEALTHY = keyed(make_cluster(THREE))


def master_addr(host: str, *answers: str, **more: Any) -> dict[str, Any]:
    error = "" if answers else "Name or service not known"
    mine = f"192.168.77.{THREE.index(host) + 1}"
    return {
        "master_addr": "nd0",
        "master": LookUp("nd0", answers, error, (0.001,), slow=False).to_json(),
        "reverse": [],
        "no_route": [],
        "interfaces": [["eth0", [mine]]],
        **more,
    }


def port(became: str, answer: str = "", server: str = "other", **more: Any) -> dict[str, Any]:
    return facts(tried(became, answer), server, **more)
