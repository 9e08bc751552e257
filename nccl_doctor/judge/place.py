"""Places and their relations: which finding explains another, or a missing outcome.

A place names hosts, ranks and links in words of the job; here they become the hosts and
participants of one cluster, so that "rank 3" is known to be on "nd1", and "node 1" to be "nd1".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from nccl_doctor.model.cluster import AFTER_LOSS, ALONE, Cluster, Host, OutcomeStatus, Rank
from nccl_doctor.model.findings import Layer, Where

Key = Hashable
"""A host: its id in the cluster, or the name of one that the cluster does not know."""


@dataclass(frozen=True)
class Place:
    """A `Where`, with its hosts and ranks looked up.

    `whole` are hosts meant as a whole: a host that stands beside some of its ranks only says where
    they are. `ends` are the hosts that links touch, `starts` those where links begin. `things` are
    devices and interfaces.
    """

    whole: frozenset[Key]
    ranks: frozenset[int]
    links: frozenset[frozenset[str]]
    ends: frozenset[Key]
    things: frozenset[str]
    starts: frozenset[Key] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.whole or self.ranks or self.links or self.things)


class PlaceIndex:
    """Hosts and ranks of one cluster, by the names that findings use."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._by_name: dict[str, set[Key]] = defaultdict(set)
        self._by_node: dict[int, set[Key]] = defaultdict(set)
        self._hosts_of: dict[int, set[Key]] = defaultdict(set)
        self._ranks_on: dict[Key, set[int]] = defaultdict(set)
        self._names: dict[Key, str] = {}
        for host in cluster.hosts:
            self._names[host.id] = host.label
            if host.name is not None:
                self._by_name[host.name].add(host.id)
            if host.node_rank is not None:
                self._by_node[host.node_rank].add(host.id)
        self._never_came = {host.id for host in cluster.hosts if not host.reported}
        self._came = {host.id for host in cluster.hosts if host.reported and host.joined}
        self._alone = {host.id for host in cluster.hosts if host.reported} - self._came
        for rank in cluster.ranks:
            if rank.rank is not None:
                self._hosts_of[rank.rank].add(rank.host.id)
                self._ranks_on[rank.host.id].add(rank.rank)

    def place(self, where: Where) -> Place:
        """Look a place up."""
        hosts = self._named(where.hosts)
        for node in where.nodes:
            hosts |= self._by_node.get(node, {f"node {node}"})
        narrowed = {host for rank in where.ranks for host in self._hosts_of.get(rank, ())}
        return Place(
            whole=frozenset(hosts - narrowed),
            ranks=frozenset(where.ranks),
            links=frozenset(frozenset(link) for link in where.links),
            ends=frozenset(self._named(end for link in where.links for end in link)),
            starts=frozenset(self._named(start for start, _ in where.links)),
            things=frozenset({*where.devices, *where.interfaces}),
        )

    def hosts_of(self, rank: int) -> frozenset[Key]:
        """Hosts that claim a rank; none where the cluster does not know it."""
        return frozenset(self._hosts_of.get(rank, ()))

    def covers(self, one: Place, other: Place) -> bool:
        """True if all of the other place is in this one. An empty place is everywhere.

        A host covers its ranks and every link that touches it; all ranks of a host cover the host;
        a link covers itself in both directions, and nothing else.
        """
        if not one:
            return True
        if not (other.whole or other.ranks or other.links):
            return bool(other.things) and other.things <= one.things
        return (
            all(self._covers_rank(one, rank) for rank in other.ranks)
            and all(self._covers_host(one, host) for host in other.whole)
            and all(
                link in one.links or bool(self._named(link) & one.whole) for link in other.links
            )
        )

    def keeps_out(self, one: Place, other: Place) -> bool:
        """True if every host of the other place is at the start of a link of this one."""
        hosts = other.whole | self._under(other)
        return bool(hosts) and hosts <= one.starts

    def parts_from_store(self, one: Place, other: Place) -> bool:
        """True if a link of the one place joins the host of rank 0 and the one host of the other
        place: all that its ranks say to rank 0 takes that way.
        """
        masters, hosts = self._hosts_of.get(0, set()), other.whole | self._under(other)
        between = [self._named(link) for link in one.links]
        return len(hosts) == 1 and any(
            ends & masters and hosts <= ends - masters for ends in between
        )

    def shut_out(self, one: Place, other: Place, *, cut_off: bool = False) -> bool:
        """True if the one place is the host of rank 0, no other host signed in, and no host of the
        other place ever signed in.

        If rank 0's host is `cut_off`, others may have signed in before, but none answered since.
        """
        masters, hosts = self._hosts_of.get(0, set()), other.whole | self._under(other)
        return (
            bool(masters & one.whole)
            and bool(hosts)
            and hosts <= self._never_came
            and (self._answered if cut_off else self._came) <= masters
        )

    @cached_property
    def _answered(self) -> set[Key]:
        """Hosts that took part in a round after the sign-in."""
        return {
            rank.host.id
            for rank, facts in self._cluster.observed()
            for rounds in facts.values()
            for name, outcome in rounds.items()
            if name not in (ALONE, AFTER_LOSS) and outcome.status is OutcomeStatus.OK
        }

    def alone(self, place: Place) -> bool:
        """True if no host of the place signed in, and each has left a report of its own."""
        hosts = place.whole | self._under(place)
        return bool(hosts) and hosts <= self._alone

    def meets(self, one: Place, other: Place) -> bool:
        """True if the two have anything in common. No place at all is everywhere. The eth0 of one
        host is not that of another.
        """
        if not one or not other:
            return True
        mine, theirs = one.whole | one.ends, other.whole | other.ends
        if (mine or one.ranks) and (theirs or other.ranks):
            return bool(
                mine & theirs
                or one.ranks & other.ranks
                or mine & self._under(other)
                or theirs & self._under(one)
            )
        return bool(one.things & other.things)

    def hosts(self, places: Iterable[Place]) -> tuple[str, ...]:
        """Names of every host that the places touch, sorted."""
        touched = {key for place in places for key in place.whole | place.ends | self._under(place)}
        return tuple(sorted(self._names.get(key, str(key)) for key in touched))

    def _covers_rank(self, place: Place, rank: int) -> bool:
        hosts = self._hosts_of.get(rank, set())
        return rank in place.ranks or bool(hosts and hosts <= place.whole)

    def _covers_host(self, place: Place, host: Key) -> bool:
        ranks = self._ranks_on.get(host, set())
        return host in place.whole or bool(ranks and ranks <= place.ranks)

    def _named(self, names: Iterable[str]) -> set[Key]:
        found: set[Key] = set()
        for name in names:
            found |= self._by_name.get(name, {name})
        return found

    def _under(self, place: Place) -> set[Key]:
        return {host for rank in place.ranks for host in self._hosts_of.get(rank, ())}


def host_where(host: Host) -> Where:
    """A whole host, by name or else by node rank."""
    if host.name is not None:
        return Where(hosts=(host.name,))
    return Where(nodes=() if host.node_rank is None else (host.node_rank,))


def rank_where(rank: Rank) -> Where:
    """One participant and its host; of a participant without a rank, its host."""
    here = host_where(rank.host)
    if rank.rank is None:
        return here
    return Where(hosts=here.hosts, ranks=(rank.rank,), nodes=here.nodes)


def is_of_a_group(layer: Layer) -> bool:
    """True if one bad member stops the whole group on this layer."""
    return layer.order >= Layer.GROUP.order
