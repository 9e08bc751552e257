"""One cluster from the observations of hosts that could not reach each other. Pure.

A host that cannot reach rank 0 writes a partial report. It fills the place of that host in the
coordinator's cluster. It holds what one host saw alone: nothing that it did together with others
is taken over, and the host does not count as joined (`Host.joined`). Of a host that was lost
during the run, the coordinator knows all but what it saw after the loss: that is taken over.

Hosts are told apart by `Host.key` (kernel boot, network namespace and name; in a report that has
none, by name and addresses) and by node rank: two node ranks on one machine are two hosts. Of a
host that several reports know, what the coordinator knows counts, then what comes first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Generic, TypeVar

from nccl_doctor.model.cluster import AFTER_LOSS, ALONE, Cluster, Facts, Host, Rank
from nccl_doctor.model.launch import OWN, Launch
from nccl_doctor.model.layout import Claim, backend_of_all, lay_out

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


class Known(Generic[V]):
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
    places: Known[int] = Known()
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
