"""Report as data: what every renderer reads, and what is saved as JSON.

A report holds everything that was gathered, so a saved one can be judged again elsewhere, with
newer rules: `cluster_of` is the inverse of `record`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.model.cluster import (
    Cluster,
    Facts,
    Host,
    OutcomeStatus,
    Rank,
    facts_from_json,
    facts_to_json,
)
from nccl_doctor.model.findings import (
    CheckResult,
    Confidence,
    Finding,
    Kind,
    Layer,
    Level,
    Scope,
    Severity,
    Status,
    Where,
)
from nccl_doctor.model.job import Job
from nccl_doctor.model.json_node import Node
from nccl_doctor.model.launch import Launch

SCHEMA_VERSION = "1"
VERDICTS = ("pass", "warn", "fail", "unknown")

Json = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """One report. `hosts` and `ranks` are plain JSON data, as `record` makes them.

    `root_causes` are findings too, the most important first; each also stands in `findings`.
    """

    verdict: str
    exit_code: int
    summary: str
    run: Mapping[str, Any]
    root_causes: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    hosts: tuple[Mapping[str, Any], ...] = ()
    ranks: tuple[Mapping[str, Any], ...] = ()
    tool: Mapping[str, Any] = field(default_factory=dict)
    redacted: bool = False
    schema_version: str = SCHEMA_VERSION

    def to_json(self) -> Json:
        """The report as `schema.json` describes it."""
        return {
            "schema_version": self.schema_version,
            "tool": dict(self.tool),
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "summary": self.summary,
            "run": dict(self.run),
            "root_causes": [_finding_json(finding) for finding in self.root_causes],
            "findings": [_finding_json(finding) for finding in self.findings],
            "checks": [check.to_json() for check in self.checks],
            "hosts": [dict(host) for host in self.hosts],
            "ranks": [dict(rank) for rank in self.ranks],
            "redacted": self.redacted,
        }

    @classmethod
    def from_json(cls, data: Any) -> Report:
        """Inverse of `to_json`; keys that this version does not know are ignored.

        Raises:
            ValueError: this is not a report of a known schema version; says where it goes wrong.
        """
        root = Node("report", data)
        version = root.get("schema_version", str)
        if version != SCHEMA_VERSION:
            raise ValueError(
                f'report: schema_version is "{version}"; '
                f'this version of nccl-doctor reads "{SCHEMA_VERSION}"'
            )
        verdict = root.get("verdict", str)
        if verdict not in VERDICTS:
            raise ValueError(f'report.verdict is "{verdict}", not one of {", ".join(VERDICTS)}')
        exit_code = root.get("exit_code", int)
        if exit_code not in range(4):
            raise ValueError(f"report.exit_code is {exit_code}, not one of 0, 1, 2, 3")
        Node("report.run", root.get("run", dict)).get("options", dict, {})
        report = cls(
            verdict=verdict,
            exit_code=exit_code,
            summary=root.get("summary", str),
            run=root.get("run", dict),
            root_causes=root.each("root_causes", _finding),
            findings=root.each("findings", _finding),
            checks=root.each("checks", _check),
            hosts=root.each("hosts", _plain),
            ranks=root.each("ranks", _plain),
            tool=root.get("tool", dict),
            redacted=root.get("redacted", bool),
        )
        cluster_of(report)
        return report


@dataclass(frozen=True)
class ParticipantResult:
    """How a participant leaves: with whose report (None: the coordinator has it), and what code.

    `aside` marks the own view of one that is not the coordinator: it must not take the place of the
    report. `finish` tells the others, and must be called once the report is written.
    """

    code: int
    report: Report | None = None
    aside: bool = False
    finish: Callable[[int], None] = field(default=lambda code: None)


def record(cluster: Cluster) -> tuple[list[Json], list[Json]]:
    """Hosts and ranks as the report holds them, nothing left out."""
    hosts = [
        {
            "id": host.id,
            "host": host.name,
            "node_rank": host.node_rank,
            "reported": host.reported,
            "joined": host.joined,
            "key": host.key,
            "addresses": list(host.addresses),
            "facts": facts_to_json(host.facts),
        }
        for host in cluster.hosts
    ]
    ranks = [
        {
            "seat": rank.seat,
            "rank": rank.rank,
            "local_rank": rank.local_rank,
            "host": rank.host.name,
            "host_id": rank.host.id,
            "device": rank.device,
            "backend": rank.backend,
            "reported": rank.reported,
            "last_breadcrumb": rank.last_breadcrumb,
            "launch": None if rank.launch is None else rank.launch.to_json(),
            "env": dict(rank.env),
            "pid": rank.pid,
            "signed_in_s": rank.signed_in_s,
            "facts": facts_to_json(rank.facts),
        }
        for rank in cluster.ranks
    ]
    return hosts, ranks


def run_of(cluster: Cluster) -> Json:
    """The part of `run` that a cluster knows, and needs again to be judged."""
    return {
        "world_size": cluster.world_size,
        "nnodes": cluster.nnodes,
        "backend": cluster.backend,
        "level": cluster.level.value,
        "join_timeout_s": cluster.join_timeout_s,
        "collective_timeout_s": cluster.collective_timeout_s,
        "complete": cluster.complete,
        "expected": dict(cluster.expected),
        "job": cluster.job.to_json(),
    }


def cluster_of(report: Report) -> Cluster:
    """Cluster from a report: the inverse of `record` and `run_of`.

    Raises:
        ValueError: the report does not hold a whole cluster; says what is wrong.
    """
    run = Node("report.run", dict(report.run))
    hosts = tuple(
        _host(Node(f"report.hosts[{i}]", dict(host))) for i, host in enumerate(report.hosts)
    )
    by_id = {host.id: host for host in hosts}
    ranks = tuple(
        _rank(Node(f"report.ranks[{i}]", dict(rank)), by_id) for i, rank in enumerate(report.ranks)
    )
    return Cluster(
        world_size=run.get("world_size", int),
        nnodes=run.get("nnodes", int),
        backend=run.get("backend", str),
        level=run.choice("level", Level),
        hosts=hosts,
        ranks=ranks,
        join_timeout_s=run.get("join_timeout_s", float, 60.0),
        collective_timeout_s=run.get("collective_timeout_s", float, 20.0),
        complete=run.get("complete", bool, True),
        expected=run.get("expected", dict, {}),
        job=_job(run.get("job", dict, {})),
    )


def _job(data: Mapping[str, Any]) -> Job:
    try:
        return Job.from_json(data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"report.run.job is not a job record: {error!r}") from error


def _finding_json(finding: Finding) -> Json:
    return {**finding.to_json(), "why": finding.kind.why, "drains": finding.kind.drains}


def _plain(node: Node) -> Mapping[str, Any]:
    return node.data


def _finding(node: Node) -> Finding:
    where = Node(f"{node.path}.where", node.get("where", dict))
    links = where.get("links", list, [])
    if not all(
        isinstance(link, list) and len(link) == 2 and all(isinstance(end, str) for end in link)
        for link in links
    ):
        raise ValueError(f"{where.path}.links is not a list of pairs of host names")
    kind = Kind(
        code=node.get("code", str),
        layer=node.choice("layer", Layer),
        title=node.get("title", str),
        why=node.get("why", str, ""),
        fix=node.get("fix", str),
        severity=node.choice("severity", Severity),
        drains=node.get("drains", bool, False),
    )
    return Finding(
        kind=kind,
        message=node.get("message", str),
        where=Where(
            hosts=where.many("hosts", str),
            ranks=where.many("ranks", int),
            links=tuple((link[0], link[1]) for link in links),
            devices=where.many("devices", str),
            interfaces=where.many("interfaces", str),
            nodes=where.many("nodes", int),
        ),
        evidence=node.get("evidence", dict),
        confidence=node.choice("confidence", Confidence),
        explained_by=node.maybe("explained_by", str),
        check=node.get("check", str),
    )


def _check(node: Node) -> CheckResult:
    return CheckResult(
        name=node.get("name", str),
        layer=node.choice("layer", Layer),
        scope=node.choice("scope", Scope),
        status=node.choice("status", Status),
        reason=node.get("reason", str, ""),
        duration_s=node.get("duration_s", float, 0.0),
        tested=node.many("hosts_or_ranks_tested", str),
    )


def _host(node: Node) -> Host:
    return Host(
        id=node.get("id", int),
        name=node.maybe("host", str),
        node_rank=node.maybe("node_rank", int),
        reported=node.get("reported", bool),
        addresses=node.many("addresses", str),
        facts=_facts(node),
        joined=node.get("joined", bool, True),
        key=node.get("key", str, ""),
    )


def _rank(node: Node, hosts: Mapping[int, Host]) -> Rank:
    host_id = node.get("host_id", int)
    if host_id not in hosts:
        raise ValueError(f"{node.path}.host_id is {host_id}, but no host has that id")
    launch = node.maybe("launch", dict)
    return Rank(
        seat=node.get("seat", int),
        rank=node.maybe("rank", int),
        local_rank=node.maybe("local_rank", int),
        host=hosts[host_id],
        reported=node.get("reported", bool),
        launch=None if launch is None else _launch(node.path, launch),
        env=node.get("env", dict, {}),
        device=node.maybe("device", str),
        backend=node.get("backend", str, ""),
        pid=node.maybe("pid", int),
        signed_in_s=node.get("signed_in_s", float, 0.0),
        last_breadcrumb=node.maybe("last_breadcrumb", str),
        facts=_facts(node),
    )


def _launch(path: str, data: Mapping[str, Any]) -> Launch:
    try:
        launch = Launch.from_json(data)
        Node(f"{path}.launch", data).get("sources", dict, {})
        return launch
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}.launch is not a launch record: {error!r}") from error


def _facts(node: Node) -> Facts:
    facts = node.get("facts", dict, {})
    for check, rounds in facts.items():
        place = Node(f"{node.path}.facts.{check}", rounds)
        for name in rounds:
            outcome = Node(f"{place.path}.{name}", place.get(name, dict))
            outcome.choice("status", OutcomeStatus)
            outcome.get("facts", dict, {})
            outcome.get("breadcrumbs", list, [])
            outcome.get("reason", str, "")
            outcome.get("duration_s", float, 0.0)
    return facts_from_json(facts)
