"""A cluster as the report holds it: the only place that writes and reads this JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nccl_doctor.model.cluster import (
    JOINING,
    Cluster,
    Facts,
    Host,
    Outcome,
    OutcomeStatus,
    Rank,
    facts_to_json,
)
from nccl_doctor.model.findings import Level
from nccl_doctor.model.job import Job
from nccl_doctor.model.json_node import Node
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.limits import MAX_RANKS, MAX_SECONDS
from nccl_doctor.model.outcome import Trail

Json = dict[str, Any]
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
    return {
        "id": host.id,
        "host": host.name,
        "node_rank": host.node_rank,
        "reported": host.reported,
        "joined": host.joined,
        "key": host.key,
        "addresses": list(host.addresses),
        "facts": to_json(host.facts),
        **host.extra,
    }


def ranks_to_json(cluster: Cluster, to_json: Callable[[Facts], Any] = facts_to_json) -> list[Json]:
    """`ranks` of the report, with what `to_json` makes of their facts."""
    return [rank_to_json(rank, to_json) for rank in cluster.ranks]


def rank_to_json(rank: Rank, to_json: Callable[[Facts], Any] = facts_to_json) -> Json:
    """One of `ranks`, with what `to_json` makes of its facts."""
    return {
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
        "facts": to_json(rank.facts),
        **({"refused": rank.refused} if rank.refused else {}),
        **({"joining": dict(rank.joining)} if rank.joining else {}),
        **rank.extra,
    }


def run_to_json(cluster: Cluster) -> Json:
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
    return Cluster(
        world_size=_size(run, "world_size"),
        nnodes=_size(run, "nnodes"),
        backend=run.get("backend", str),
        level=run.choice("level", Level),
        hosts=hosts,
        ranks=ranks,
        join_timeout_s=run.get("join_timeout_s", float, 60.0),
        collective_timeout_s=run.get("collective_timeout_s", float, 20.0),
        complete=run.get("complete", bool, True),
        expected=run.get("expected", dict, {}),
        job=_job(run.get("job", dict, {})),
        run_id=run.readable("id", str) or "",
    )


def _size(run: Node, key: str) -> int:
    """Number that becomes the length of lists."""
    run.number(key, 0, MAX_RANKS)
    return run.get(key, int)


def _job(data: Mapping[str, Any]) -> Job:
    try:
        return Job.from_json(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"report.run.job is not a job record: {error!r}") from error


def _host(node: Node, known: Known) -> Host:
    host = Host(
        id=node.get("id", int),
        name=node.maybe("host", str),
        node_rank=node.maybe("node_rank", int),
        reported=node.get("reported", bool),
        addresses=node.many("addresses", str),
        joined=node.get("joined", bool, True),
        key=node.get("key", str, ""),
    )
    return replace(host, facts=facts_from_json(node, known), extra=node.beyond(host_to_json(host)))


def _rank(node: Node, hosts: Mapping[int, Host], known: Known) -> Rank:
    host_id = node.get("host_id", int)
    if host_id not in hosts:
        raise ValueError(f"{node.path}.host_id is {host_id}, but no host has that id")
    rank = Rank(
        seat=node.get("seat", int),
        rank=node.maybe("rank", int),
        local_rank=node.maybe("local_rank", int),
        host=hosts[host_id],
        reported=node.get("reported", bool),
        launch=None if node.data.get("launch") is None else launch_from_json(node),
        env=node.get("env", dict, {}),
        device=node.maybe("device", str),
        backend=node.get("backend", str, ""),
        pid=node.maybe("pid", int),
        signed_in_s=node.get("signed_in_s", float, 0.0),
        last_breadcrumb=node.maybe("last_breadcrumb", str),
        refused=node.get("refused", str, ""),
        joining=joining_from_json(node),
    )
    return replace(rank, facts=facts_from_json(node, known), extra=node.beyond(rank_to_json(rank)))


def joining_from_json(node: Node) -> dict[str, float]:
    """The phases at `joining` that this version knows; ValueError if one is no time."""
    phases = Node(f"{node.path}.joining", node.get("joining", dict, {}))
    return {name: phases.seconds(name) for name in JOINING if name in phases.data}


def launch_from_json(node: Node) -> Launch:
    """The launch record at `launch`; ValueError if it is none."""
    data = node.get("launch", dict)
    try:
        return Launch.from_json(data)
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
    """Whether an outcome surely is not malformed: a look that needs no words."""
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
    node.choice("status", OutcomeStatus)
    node.get("facts", dict, {})
    if type(node.data.get("breadcrumbs")) is not Trail:
        node.get("breadcrumbs", list, [])
    node.get("reason", str, "")
    if "duration_s" in node.data:
        node.seconds("duration_s")
    return Outcome.from_json(node.data)
