"""One report from the reports of hosts that could not reach each other.

The facts of all are put together (`merge_clusters`) and judged again. What the engine said in one
of them stays, but for a host that lost rank 0: its network path is known now.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import count
from typing import Generic, TypeVar

from nccl_doctor.judge.causes import importance
from nccl_doctor.judge.checks import judge_all
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.judge.place import PlaceIndex
from nccl_doctor.model.cluster import AFTER_LOSS, ALONE, Cluster, Facts, Host, Rank
from nccl_doctor.model.findings import CheckResult, Finding, Severity, Status, Where
from nccl_doctor.model.kinds import (
    CHECK_BROKE,
    COORDINATOR_LOST,
    MERGE_DOUBTFUL,
    RANK_KILLED,
    RANK_SILENT,
)
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.model.layout import Claim, backend_of_all, lay_out
from nccl_doctor.model.report import Report, RunRecord
from nccl_doctor.registry import Registry
from nccl_doctor.toolkit.hosts import road_to_master

# One cluster from the observations of hosts that could not reach each other. Pure.
#
# A host that cannot reach rank 0 writes a partial report. It fills the place of that host in the
# coordinator's cluster. It holds what one host saw alone: nothing that it did together with
# others is taken over, and the host does not count as joined (`Host.joined`). Of a host that was
# lost during the run, the coordinator knows all but what it saw after the loss: that is taken
# over.
#
# Hosts are told apart by `Host.key` (kernel boot, network namespace and name; in a report that
# has none, by name and addresses) and by node rank: two node ranks on one machine are two hosts.
# Of a host that several reports know, what the coordinator knows counts, then what comes first.


T = TypeVar("T", int, str)
V = TypeVar("V")


def merge_clusters(clusters: Sequence[Cluster]) -> Cluster:
    """Cluster from that of the coordinator, if there is one, and the partial reports of hosts.

    A host that is absent in the coordinator's cluster but has a partial report is present, and did
    not join. Expected ranks without any report are absent. The result is complete if there is a
    coordinator's report, or a report of every host. The coordinator's seats stay, because facts
    refer to them.

    Args:
        clusters: at least one. Of two coordinators (two hosts that both claim to be node 0), the
            one counts to which more hosts came.

    Raises:
        ValueError: there is none.
    """
    if not clusters:
        raise ValueError("no report to merge")
    ordered = sorted(clusters, key=_precedence)
    met = ordered[0] if ordered[0].complete else None
    views = _views(ordered, met)
    shape = _shape_of_met(met, views) if met else _shape_of_views(ordered, views)
    views = [_renumbered(view, shape.starts[i]) for i, view in enumerate(views)]
    seats = count(1 + max((rank.seat for rank in met.ranks), default=-1) if met else 0)
    hosts: list[Host] = []
    ranks: list[Rank] = []
    for view in views:
        hosts.append(replace(view.host, id=len(hosts)))
        for rank in view.ranks:
            seat = rank.seat if view.met else next(seats)
            ranks.append(replace(rank, host=hosts[-1], seat=seat))
    held = {rank.rank for rank in ranks}
    by_id = {view.host.id: host for view, host in zip(views, hosts, strict=True) if view.met}
    by_node: dict[int | None, Host] = {host.node_rank: host for host in reversed(hosts)}
    by_node.pop(None, None)
    nobody: dict[int | None, Host] = {}
    for rank in shape.expected:
        if rank.rank in held:
            continue
        node = rank.host.node_rank
        host = by_id.get(rank.host.id) or by_node.get(node) or nobody.get(node)
        if host is None:
            host = nobody[node] = replace(rank.host, id=len(hosts) + len(nobody))
        ranks.append(replace(rank, host=host, seat=rank.seat if met else next(seats)))
    return replace(
        ordered[0],
        world_size=shape.world_size,
        nnodes=shape.nnodes,
        backend=met.backend if met else _backend_of_views(ordered),
        hosts=(*hosts, *nobody.values()),
        ranks=tuple(ranks),
        complete=met is not None or not nobody,
    )


def machine_of(host: Host) -> Hashable:
    """Key of a machine: the same in all its reports, and different for all others."""
    return host.key or (host.name, host.addresses)


class ValuesByHost(Generic[V]):
    """Values by host, to be found again for the same host in another report."""

    def __init__(self) -> None:
        self._by_machine: dict[Hashable, list[tuple[int | None, V]]] = defaultdict(list)

    def add(self, host: Host, value: V) -> None:
        """Know one more host."""
        self._by_machine[machine_of(host)].append((host.node_rank, value))

    def find(self, host: Host) -> V | None:
        """Value for a host. A host without a node rank yet may be any of its machine."""
        for node, value in self._by_machine.get(machine_of(host), ()):
            if node == host.node_rank or None in (node, host.node_rank):
                return value
        return None


@dataclass(frozen=True)
class _View:
    """One host and its ranks that reported. `met`: they are of the coordinator's cluster."""

    host: Host
    ranks: tuple[Rank, ...]
    met: bool = False

    @property
    def launch(self) -> Launch:
        """Launch record of its first rank."""
        return next((rank.launch for rank in self.ranks if rank.launch), Launch())

    @property
    def awaits_place(self) -> bool:
        """True if it numbers its ranks itself, until the coordinator places it.

        Such a host numbers them as if all hosts were like itself, and may have no node rank.
        """
        return not self.host.joined and self.launch.launcher == OWN


@dataclass(frozen=True)
class _Shape:
    """The whole job. `expected` are those of its ranks that may be absent; `starts` maps the index
    of a view that awaits a place to its (node rank, first rank).
    """

    world_size: int
    nnodes: int
    expected: Sequence[Rank]
    starts: Mapping[int, tuple[int, int] | None]


def _precedence(cluster: Cluster) -> tuple[bool, int]:
    return not cluster.complete, -sum(host.joined for host in cluster.present_hosts)


def _views(ordered: Sequence[Cluster], met: Cluster | None) -> list[_View]:
    """Every host once: those that met, then the others in order of rank."""
    views = [_View(host, met.ranks_on(host), True) for host in met.present_hosts] if met else []
    num_met = len(views)
    places: ValuesByHost[int] = ValuesByHost()
    for place, view in enumerate(views):
        places.add(view.host, place)
    for cluster in ordered:
        for host in cluster.present_hosts if cluster is not met else ():
            i = places.find(host)
            if i is None:
                i = len(views)
                places.add(host, i)
                views.append(_View(replace(host, joined=False, facts=_alone(host.facts)), ()))
            elif i < num_met:
                known = views[i].host
                views[i] = replace(views[i], host=replace(known, facts=_with_after(known, host)))
                continue
            here = {rank.rank for rank in views[i].ranks}
            more = [rank for rank in cluster.ranks_on(host) if rank.rank not in here]
            mine = tuple(replace(rank, facts=_alone(rank.facts)) for rank in more)
            views[i] = replace(views[i], ranks=views[i].ranks + mine)
    return views[:num_met] + sorted(views[num_met:], key=_first_rank)


def _alone(facts: Facts) -> Facts:
    """Facts that were observed alone: other rounds name seats of another run."""
    return _only(facts, ALONE, AFTER_LOSS)


def _only(facts: Facts, *names: str) -> Facts:
    kept = {
        check: {name: rounds[name] for name in names if name in rounds}
        for check, rounds in facts.items()
    }
    return {check: rounds for check, rounds in kept.items() if rounds}


def _with_after(met: Host, view: Host) -> Facts:
    """Facts of a host that signed in, and what it saw when it had lost the coordinator."""
    after = _only(view.facts, AFTER_LOSS)
    return {
        **met.facts,
        **{check: {**rounds, **met.facts.get(check, {})} for check, rounds in after.items()},
    }


def _first_rank(view: _View) -> int:
    return min((rank.rank for rank in view.ranks if rank.rank is not None), default=-1)


def _shape_of_met(met: Cluster, views: Sequence[_View]) -> _Shape:
    """Shape of the job by the coordinator. Hosts without a node rank take free nodes."""
    first: dict[int, int] = {}
    for rank in met.ranks:
        node, number = rank.host.node_rank, rank.rank
        if node is not None and number is not None:
            first[node] = min(number, first.get(node, number))
    taken = {view.host.node_rank for view in views}
    free = iter([node for node in sorted(first) if node not in taken])
    starts: dict[int, tuple[int, int] | None] = {}
    for i, view in enumerate(views):
        node = view.host.node_rank
        if view.awaits_place and node is None:
            node = next(free, None)
        starts[i] = (node, first[node]) if view.awaits_place and node in first else None
    return _Shape(met.world_size, met.nnodes, met.absent, starts)


def _shape_of_views(ordered: Sequence[Cluster], views: Sequence[_View]) -> _Shape:
    """Size of the job by most hosts; for the own launcher, as the sign-in would have placed it."""
    nnodes = _most_common(cluster.nnodes for cluster in ordered)
    world_size = _most_common(cluster.world_size for cluster in ordered)
    starts: dict[int, tuple[int, int] | None] = dict.fromkeys(range(len(views)))
    sizes = [view.launch.local_world_size for view in views if view.launch.local_world_size]
    per_node = _most_common(sizes) if sizes else None

    def home_of(rank: int) -> tuple[int | None, int | None]:
        return divmod(rank, per_node) if per_node else (None, None)

    home: Callable[[int], tuple[int | None, int | None]] = home_of
    if views and all(view.awaits_place for view in views):
        claims = [
            Claim(
                i,
                view.launch.node_rank,
                view.launch.nnodes or 1,
                view.launch.local_world_size or 1,
            )
            for i, view in enumerate(views)
        ]
        layout = lay_out(claims, nnodes)
        starts = {i: (place.node_rank, place.first_rank) for i, place in layout.seats.items()}
        world_size, home = layout.world_size, layout.home_of
    expected = []
    for number in range(world_size):
        node, local = home(number)
        expected.append(Rank(number, number, local, Host(-1, None, node, False), reported=False))
    return _Shape(world_size, nnodes, expected, starts)


def _renumbered(view: _View, start: tuple[int, int] | None) -> _View:
    if start is None:
        return view
    node, first = start
    ranks = []
    for rank in view.ranks:
        number = first + (rank.local_rank or 0)
        launch = rank.launch and replace(rank.launch, rank=number, node_rank=node)
        ranks.append(replace(rank, rank=number, launch=launch))
    return replace(view, host=replace(view.host, node_rank=node), ranks=tuple(ranks))


def _backend_of_views(ordered: Sequence[Cluster]) -> str:
    """Backend as the sign-in would have chosen it."""
    asked = [(rank.backend, rank.device) for cluster in ordered for rank in cluster.present]
    return backend_of_all(asked, _most_common(cluster.backend for cluster in ordered))


def _most_common(values: Iterable[T]) -> T:
    """Most common value; the largest of several that are equally common."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


APART_S = 900.0
"""Hosts of one job start within minutes of each other, and a clock may be wrong by some more."""

_AGAIN = {CHECK_BROKE.code, RANK_SILENT.code, RANK_KILLED.code}
"""Codes of the engine that are judged again."""
_NEVER = datetime.min.replace(tzinfo=timezone.utc)


def merge_reports(reports: Sequence[Report], registry: Registry) -> Report:
    """Put the facts of several reports together, and judge them as those of one run.

    Reports of one host twice do no harm. Whether the reports can be of one run at all is said in
    findings: it may be a clock that is wrong.

    Args:
        reports: of the coordinator, of hosts that never reached it, or both; at least one.
        registry: the checks that judge.

    Raises:
        ValueError: there is no report, or they cannot be merged; says why.
    """
    _refuse(reports)
    parts = sorted(reports, key=_started, reverse=True)  # of one host twice, the newest counts
    clusters = [part.cluster for part in parts]
    cluster = merge_clusters(clusters)
    roads = _Roads(cluster, registry)
    kept = [
        finding
        for part, view in zip(parts, clusters, strict=True)
        for finding in _kept(part, view, roads, registry)
    ]
    merged = conclude(
        cluster,
        registry.checks,
        run=_run(parts, clusters),
        problems=[*registry.problems, *_doubts(parts, clusters), *kept],
        skipped=_skipped(parts, cluster, registry),
        wanted=registry.wanted,
        strict=any(part.run.strict for part in parts),
        others=_others(parts, registry),
    )
    return replace(merged, redacted=parts[0].redacted)


def _refuse(reports: Sequence[Report]) -> None:
    if not reports:
        raise ValueError("no report to merge")
    if len({report.redacted for report in reports}) > 1:
        raise ValueError(
            "some reports are redacted and some are not, so their hosts cannot be matched"
        )
    if len({report.run.redacted_with for report in reports}) > 1:
        raise ValueError(
            "the reports were redacted with different keys, so their hosts cannot be matched; "
            "redact all of them with the same key (--redact-key FILE), or merge them first"
        )
    if any(report.run.alone for report in reports):
        raise ValueError("one report is of `nccl-doctor env` (one host alone), not of a run")


def _started(report: Report) -> datetime:
    """Start of the run, by the clock of its host; the beginning of time if it is not known."""
    try:
        started = datetime.fromisoformat((report.run.started or "").replace("Z", "+00:00"))
    except ValueError:
        return _NEVER
    return started if started.tzinfo else started.replace(tzinfo=timezone.utc)


def _run(parts: Sequence[Report], clusters: Sequence[Cluster]) -> RunRecord:
    """Record of the coordinator's run, if it is known, and of the reports that were merged."""
    first = next((p for p, c in zip(parts, clusters, strict=True) if c.complete), parts[0])
    merged = [
        {
            "id": part.run.id,
            "started": part.run.started,
            "complete": cluster.complete,
            "hosts": [host.label for host in cluster.present_hosts],
        }
        for part, cluster in zip(parts, clusters, strict=True)
    ]
    return replace(
        first.run,
        duration_s=max(part.run.duration_s or 0.0 for part in parts),
        extra={**first.run.extra, "merged": merged},
    )


def _skipped(parts: Sequence[Report], cluster: Cluster, registry: Registry) -> dict[str, str]:
    known = {result.name for part in parts for result in part.checks}
    skipped = {check.name: "not part of these runs" for check in registry.checks}
    skipped = {name: reason for name, reason in skipped.items() if name not in known}
    return skipped | {
        check.name: f"needs --level {check.level.value}"
        for check in registry.checks
        if check.level.order > cluster.level.order
    }


def _others(parts: Sequence[Report], registry: Registry) -> list[CheckResult]:
    """Results of checks that are not installed here, so that their facts cannot be judged again."""
    here = {check.name for check in registry.checks}
    found: dict[str, CheckResult] = {}
    for result in (result for part in parts for result in part.checks if result.name not in here):
        if result.name not in found or result.status is Status.FAIL:
            found[result.name] = result
    return [
        result
        if len(parts) == 1 or result.status is Status.FAIL
        else replace(result, status=Status.UNKNOWN, reason="not installed where the merge was made")
        for result in found.values()
    ]


# -- what the reports themselves said --------------------------------------------------------------


class _Roads:
    """Network paths to the host of rank 0 in the united cluster."""

    def __init__(self, cluster: Cluster, registry: Registry) -> None:
        self.cluster = cluster
        self._hosts: ValuesByHost[Host] = ValuesByHost()
        for host in cluster.present_hosts:
            self._hosts.add(host, host)
        self._ground = PlaceIndex(cluster)
        judged, _ = judge_all(cluster, registry.checks)
        failures = [f for f in judged if f.level is Severity.FAIL and _is_below(f)]
        failures.sort(key=lambda f: (f.kind.layer.order, f.explained_by is not None, importance(f)))
        self._failures = [(failure.code, self._ground.place(failure.where)) for failure in failures]

    def joined(self, host: Host) -> bool:
        """True if a host of one report signed in, as the coordinator knows it."""
        known = self._hosts.find(host)
        return known is not None and known.joined

    def explain(self, finding: Finding, host: Host) -> Finding:
        """Finding about a host that could not sign in, with the failure on its network path as the
        cause.
        """
        known = self._hosts.find(host) or host
        where = finding.where if finding.where.ranks else road_to_master(self.cluster, known)
        place = self._ground.place(where)
        causes = (code for code, there in self._failures if self._ground.covers(there, place))
        cause = next(causes, None)
        why = "it is on the network path of that host" if cause else ""
        return finding.replaced(where=where, explained_by=cause, explained_why=why)


def _is_below(finding: Finding) -> bool:
    return finding.kind.layer.order < COORDINATOR_LOST.layer.order


def _kept(part: Report, view: Cluster, roads: _Roads, registry: Registry) -> Iterator[Finding]:
    """Findings of one report that no check here makes again, and that are still true."""
    here = {check.name for check in registry.checks}
    left_out = next((host for host in view.present_hosts if not roads.joined(host)), None)
    for finding in part.findings:
        if finding.check in here or finding.code in _AGAIN:
            continue
        if finding.code != COORDINATOR_LOST.code or view.complete:
            yield finding
        elif left_out is not None:
            yield roads.explain(finding, left_out)
        elif _is_of_this_run(view, roads.cluster):
            yield finding


def _is_of_this_run(view: Cluster, cluster: Cluster) -> bool:
    """True if the processes of a partial report are among those in the coordinator's report."""
    met = {(machine_of(rank.host), rank.pid) for rank in cluster.present}
    return any((machine_of(rank.host), rank.pid) in met for rank in view.present)


def _doubts(parts: Sequence[Report], clusters: Sequence[Cluster]) -> Iterator[Finding]:
    """Findings that raise doubt whether these are reports of one run."""
    times = sorted(_started(part) for part in parts)
    apart_s = (times[-1] - times[0]).total_seconds()
    if apart_s > APART_S:
        spread = f"{apart_s / 3600:.1f} h" if times[0] is not _NEVER else "an unknown time"
        yield Finding(
            MERGE_DOUBTFUL, f"the runs started {spread} apart, by the clocks of their hosts"
        )
    versions = sorted({str(part.tool.get("version", "unknown")) for part in parts})
    if len(versions) > 1:
        yield Finding(
            MERGE_DOUBTFUL, f"written by different versions: nccl-doctor {' and '.join(versions)}"
        )
    processes: dict[Hashable, set[int | None]] = defaultdict(set)
    names: dict[Hashable, str] = {}
    for cluster in clusters:
        for rank in cluster.present:
            key = (machine_of(rank.host), rank.rank)
            processes[key].add(rank.pid)
            names[key] = rank.host.label
    twice = {names[key] for key, pids in processes.items() if len(pids) > 1}
    if twice:
        yield Finding(
            MERGE_DOUBTFUL,
            "several runs of one host; the report of the coordinator is used, else the newest",
            Where(hosts=tuple(sorted(twice))),
        )
