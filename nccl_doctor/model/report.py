"""Report as data: what every renderer reads, and what is saved as JSON.

A report holds everything that was gathered, so a saved one can be judged again elsewhere, with
newer rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.model.cluster import Cluster, Facts, facts_to_json
from nccl_doctor.model.cluster_json import cluster_from_json, hosts_to_json, ranks_to_json
from nccl_doctor.model.findings import (
    CheckResult,
    Confidence,
    Finding,
    Kind,
    Layer,
    Scope,
    Severity,
    Status,
    Where,
)
from nccl_doctor.model.fixes import StepHosts, fix_from_json, fix_to_json
from nccl_doctor.model.folding.report import unfolded
from nccl_doctor.model.json_node import Node
from nccl_doctor.model.kinds import HOSTS_NOT_EXAMINED
from nccl_doctor.model.run_record import RunRecord

SCHEMA_VERSION = "2"
READ_VERSIONS = ("1", "2")
"""Versions that are read. In 2, facts that are equal on many hosts and ranks may stand once."""
VERDICTS = ("pass", "warn", "fail", "unknown")

Json = dict[str, Any]


@dataclass(frozen=True)
class Report:
    """One report. `run` is how it was made, `cluster` what it was made of.

    `root_causes` are findings too, the most important first; each also stands in `findings`.
    """

    verdict: str
    exit_code: int
    summary: str
    run: RunRecord
    cluster: Cluster
    root_causes: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    tool: Mapping[str, Any] = field(default_factory=dict)
    redacted: bool = False
    schema_version: str = SCHEMA_VERSION

    def gaps(self) -> dict[tuple[Status, str], list[str]]:
        """(`unknown` or `blocked`, reason) → names of the checks that ended so."""
        found: dict[tuple[Status, str], list[str]] = {}
        for check in self.checks:
            if check.status in (Status.UNKNOWN, Status.BLOCKED):
                reason = check.reason or check.status.value
                found.setdefault((check.status, reason), []).append(check.name)
        return found

    def to_json(self, facts: Callable[[Facts], Any] = facts_to_json) -> Json:
        """The report in full, as `schema.json` describes it, with what `facts` makes of facts."""
        hosts, ranks = hosts_to_json(self.cluster, facts), ranks_to_json(self.cluster, facts)
        return {**self.head_to_json(), "hosts": hosts, "ranks": ranks}

    def head_to_json(self) -> Json:
        """The report without its hosts and ranks."""
        hosts = StepHosts(self.cluster)
        return {
            "schema_version": self.schema_version,
            "tool": dict(self.tool),
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "summary": self.summary,
            "run": self.run.to_json(self.cluster),
            "root_causes": [_finding_json(finding, hosts) for finding in self.root_causes],
            "findings": [_finding_json(finding, hosts) for finding in self.findings],
            "checks": [check.to_json() for check in self.checks],
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
        if version not in READ_VERSIONS:
            known = " and ".join(f'"{each}"' for each in READ_VERSIONS)
            raise ValueError(
                f'report: schema_version is "{version}"; this version of nccl-doctor reads {known}'
            )
        if version == SCHEMA_VERSION:
            root = unfolded(root)
        verdict = root.get("verdict", str)
        if verdict not in VERDICTS:
            raise ValueError(f'report.verdict is "{verdict}", not one of {", ".join(VERDICTS)}')
        exit_code = root.get("exit_code", int)
        if exit_code not in range(4):
            raise ValueError(f"report.exit_code is {exit_code}, not one of 0, 1, 2, 3")
        findings = root.each("findings", _finding)
        starts = verdict in ("pass", "warn") or (
            verdict == "unknown" and any(f.code == HOSTS_NOT_EXAMINED.code for f in findings)
        )
        if exit_code == 0 and not starts:
            raise ValueError(f'report.exit_code is 0, but report.verdict is "{verdict}"')
        cluster = cluster_from_json(root)
        return cls(
            verdict=verdict,
            exit_code=exit_code,
            summary=root.get("summary", str),
            run=RunRecord.from_json(Node("report.run", root.get("run", dict)), cluster),
            root_causes=root.each("root_causes", _finding),
            findings=findings,
            checks=root.each("checks", _check),
            tool=root.get("tool", dict),
            redacted=root.get("redacted", bool),
            cluster=cluster,
        )


@dataclass(frozen=True)
class ParticipantResult:
    """End of a participant: its report (None: the coordinator has it), and its exit code.

    `aside` marks the partial report of a participant that is not the coordinator: it must not
    replace the report. `finish` tells the others, and must be called once the report is written.
    """

    code: int
    report: Report | None = None
    aside: bool = False
    finish: Callable[[int], None] = field(default=lambda code: None)


def _finding_json(finding: Finding, hosts: StepHosts) -> Json:
    drains = finding.kind.drains and finding.drains
    return {
        **finding.to_json(),
        **fix_to_json(finding, hosts),
        "why": finding.kind.why,
        "drains": drains,
        **({"beside": True} if finding.kind.beside else {}),
    }


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
        fix=fix_from_json(node),
        severity=node.choice("severity", Severity),
        drains=node.get("drains", bool, False),
        beside=node.get("beside", bool, False),
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
