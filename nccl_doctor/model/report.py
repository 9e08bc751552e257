"""Report as data: what every renderer reads, and what is saved as JSON.

A report holds everything that was gathered, so a saved one can be judged again elsewhere, with
newer rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nccl_doctor.model.cluster import (
    JOINING,
    Cluster,
    Facts,
    Host,
    Outcome,
    OutcomeStatus,
    Rank,
    Trail,
    facts_to_json,
)
from nccl_doctor.model.codec import MAX_SECONDS, Node, Seconds, decode, encode
from nccl_doctor.model.findings import (
    CheckResult,
    Confidence,
    Effect,
    Finding,
    Kind,
    Layer,
    Severity,
    Status,
    Where,
)
from nccl_doctor.model.fixes import StepHosts, fix_from_json, fix_to_json
from nccl_doctor.model.job import Job
from nccl_doctor.model.kinds import HOSTS_NOT_EXAMINED
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.unfold import unfolded

# A cluster as the report holds it: the only place that writes and reads this JSON.


_STATUSES = frozenset(status.value for status in OutcomeStatus)
_NONE: Json = {}
_EMPTY: list[Any] = []
Known = dict[int, Any]
"""What was read already, by the identity of the object: as long as all of them are held."""


def hosts_to_json(cluster: Cluster, to_json: Callable[[Facts], Any] = facts_to_json) -> list[Json]:
    """`hosts` of the report, with what `to_json` makes of their facts."""
    return [host_to_json(host, to_json) for host in cluster.hosts]


def host_to_json(host: Host, to_json: Callable[[Facts], Any] = facts_to_json) -> Json:
    """One of `hosts`, with what `to_json` makes of its facts."""
    return {**encode(host), "facts": to_json(host.facts)}


def ranks_to_json(cluster: Cluster, to_json: Callable[[Facts], Any] = facts_to_json) -> list[Json]:
    """`ranks` of the report, with what `to_json` makes of their facts."""
    return [rank_to_json(rank, to_json) for rank in cluster.ranks]


def rank_to_json(rank: Rank, to_json: Callable[[Facts], Any] = facts_to_json) -> Json:
    """One of `ranks`, with what `to_json` makes of its facts."""
    host = {"host": rank.host.name, "host_id": rank.host.id}
    return {**encode(rank), **host, "facts": to_json(rank.facts)}


def cluster_from_json(report: Node) -> Cluster:
    """The cluster of a report, from its `run`, `hosts` and `ranks`.

    Raises:
        ValueError: it is not whole; says what is wrong.
    """
    run = Node(f"{report.path}.run", report.get("run", dict))
    known: Known = {}
    hosts = report.each("hosts", lambda node: _host(node, known))
    by_id = {host.id: host for host in hosts}
    ranks = report.each("ranks", lambda node: _rank(node, by_id, known))
    job = _job(run.get("job", dict, {}))
    return decode(
        Cluster, run, hosts=hosts, ranks=ranks, job=job, run_id=run.readable("id", str) or ""
    )


def _job(data: Mapping[str, Any]) -> Job:
    try:
        return decode(Job, Node("job", data))
    except ValueError as error:
        raise ValueError(f"report.run.job is not a job record: {error}") from error


def _host(node: Node, known: Known) -> Host:
    return decode(Host, node, facts=facts_from_json(node, known))


def _rank(node: Node, hosts: Mapping[int, Host], known: Known) -> Rank:
    host_id = node.get("host_id", int)
    if host_id not in hosts:
        raise ValueError(f"{node.path}.host_id is {host_id}, but no host has that id")
    return decode(
        Rank,
        node,
        host=hosts[host_id],
        launch=None if node.data.get("launch") is None else launch_from_json(node),
        joining=joining_from_json(node),
        facts=facts_from_json(node, known),
    )


def joining_from_json(node: Node) -> dict[str, float]:
    """The phases at `joining` that this version knows; ValueError if one is no time."""
    phases = Node(f"{node.path}.joining", node.get("joining", dict, {}))
    return {name: phases.get(name, Seconds) for name in JOINING if name in phases.data}


def launch_from_json(node: Node) -> Launch:
    """The launch record at `launch`; ValueError if it is none."""
    data = node.get("launch", dict)
    try:
        return decode(Launch, Node("launch", data))
    except ValueError as error:
        raise ValueError(f"{node.path}.launch is not a launch record: {error}") from error


def facts_from_json(node: Node, known: Known | None = None) -> Facts:
    """The facts at `facts`, whose outcomes may be read already; ValueError if one is malformed.

    `known` holds what was read before: hosts and ranks that share an object share what it says.
    """
    known = {} if known is None else known
    if "facts" not in node.data:
        return {}
    checks = node.get("facts", dict)
    facts: Facts | None = known.get(id(checks))
    if facts is None:
        facts = known[id(checks)] = {
            check: _rounds(f"{node.path}.facts.{check}", rounds, known)
            for check, rounds in checks.items()
        }
    return facts


def _rounds(path: str, data: Any, known: Known) -> Mapping[str, Outcome]:
    rounds: Mapping[str, Outcome] | None = known.get(id(data))
    if rounds is None:
        rounds = known[id(data)] = {
            name: _outcome(path, name, each, known) for name, each in Node(path, data).data.items()
        }
    return rounds


def _outcome(path: str, name: str, data: Any, known: Known) -> Outcome:
    if type(data) is Outcome:
        return data
    outcome: Outcome | None = known.get(id(data))
    if outcome is None:
        if _is_right(data):
            outcome = Outcome.from_json(data)
        else:
            outcome = outcome_from_json(Node(f"{path}.{name}", data))
        known[id(data)] = outcome
    return outcome


def _is_right(data: Any) -> bool:
    """True if an outcome surely is not malformed: a look that needs no words."""
    return (
        type(data) is dict
        and type(data.get("status")) is str
        and data["status"] in _STATUSES
        and type(data.get("facts", _NONE)) is dict
        and type(data.get("breadcrumbs", _EMPTY)) in (list, Trail)
        and type(data.get("reason", "")) is str
        and type(data.get("duration_s", 0.0)) in (float, int)
        and 0 <= data.get("duration_s", 0.0) <= MAX_SECONDS
    )


def outcome_from_json(node: Node) -> Outcome:
    """One outcome; ValueError if it is malformed."""
    if _is_right(node.data):
        return Outcome.from_json(node.data)
    node.get("status", OutcomeStatus)
    node.get("facts", dict, {})
    if type(node.data.get("breadcrumbs")) is not Trail:
        node.get("breadcrumbs", list, [])
    node.get("reason", str, "")
    node.get("duration_s", Seconds, 0.0)
    return Outcome.from_json(node.data)


# The run as its report records it: what the cluster does not know.


_TYPES: Mapping[str, type[Any]] = {
    "id": str,
    "started": str,
    "duration_s": float,
    "launcher": str,
    "command": str,
    "options": dict,
    "baseline": dict,
    "redacted_with": str,
    "source": str,
}


@dataclass(frozen=True)
class RunRecord:
    """`run` of a report, without what its cluster knows; None where the report does not say.

    `started` is ISO 8601, in UTC. `options` and `baseline` (`Comparison.record`) are kept as JSON,
    so that a key of another version is not lost. `redacted_with` identifies the key of the
    pseudonyms. `source` is "autopsy" for a job that is over; None for an examination. `alone` says
    that one host was examined by itself (`nccl-doctor env`). `extra` are keys that are written and
    never read, and those that this version does not know or cannot read.
    """

    id: str | None = None
    started: str | None = None
    duration_s: float | None = None
    launcher: str | None = None
    command: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    baseline: Mapping[str, Any] | None = None
    redacted_with: str | None = None
    source: str | None = None
    alone: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def strict(self) -> bool:
        """True if warnings fail."""
        return bool(self.options.get("strict"))

    @property
    def selected(self) -> bool:
        """True if only some checks were to be run."""
        return bool(self.options.get("select"))

    def to_json(self, cluster: Cluster) -> dict[str, Any]:
        """`run` of the report, with what the cluster knows."""
        values = {name: getattr(self, name) for name in _TYPES}
        known = {name: value for name, value in values.items() if value is not None}
        extra = {name: value for name, value in self.extra.items() if name not in known}
        return {**known, **extra, **encode(cluster), "alone": self.alone}

    @classmethod
    def from_json(cls, node: Node, cluster: Cluster) -> RunRecord:
        """Inverse of `to_json`. A value of another type is not known, but is written again.

        Raises:
            ValueError: `options` is not an object, so that nobody knows how to judge again.
        """
        node.get("options", dict, {})
        values = {name: node.readable(name, what) for name, what in _TYPES.items()}
        read: dict[str, Any] = {name: each for name, each in values.items() if each is not None}
        extra = node.beyond({*read, *encode(cluster), "alone"})
        return cls(**read, alone=node.readable("alone", bool) is True, extra=extra)


SCHEMA_VERSION = "3"
READ_VERSIONS = ("1", "2", "3")
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
        """The report, as `schema.json` describes it, with what `facts` makes of facts."""
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
            "checks": [encode(check) for check in self.checks],
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
            known = ", ".join(f'"{each}"' for each in READ_VERSIONS)
            raise ValueError(
                f'report: schema_version is "{version}"; this version of nccl-doctor reads {known}'
            )
        if version == "2":
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
            checks=root.each("checks", partial(decode, CheckResult)),
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
    return {
        **finding.to_json(),
        **fix_to_json(finding, hosts),
        "why": finding.kind.why,
        "drains": finding.drains,
        **({"beside": True} if finding.has(Effect.SHOWN) else {}),
    }


def _finding(node: Node) -> Finding:
    kind = Kind(
        code=node.get("code", str),
        layer=node.get("layer", Layer),
        title=node.get("title", str),
        why=node.get("why", str, ""),
        fix=fix_from_json(node),
        severity=node.get("severity", Severity),
        effects=tuple(
            effect
            for name, effect in (("drains", Effect.DRAINS), ("beside", Effect.SHOWN))
            if node.get(name, bool, False)
        ),
    )
    return Finding(
        kind=kind,
        message=node.get("message", str),
        where=decode(Where, Node(f"{node.path}.where", node.get("where", dict))),
        evidence=node.get("evidence", dict),
        confidence=node.get("confidence", Confidence),
        explained_by=node.maybe("explained_by", str),
        explained_why=node.get("explained_why", str, ""),
        check=node.get("check", str),
        cause=node.get("cause", str, ""),
    )
