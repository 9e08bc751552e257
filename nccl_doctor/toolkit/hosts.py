"""Questions of several checks about the hosts of a cluster. Pure functions."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from nccl_doctor.model.cluster import Cluster, Host, OutcomeStatus, Rank
from nccl_doctor.model.findings import Where
from nccl_doctor.toolkit.net.interfaces import (
    first_bindable,
    is_alone,
    is_link_local,
    is_virtual,
    leads_inside,
)

_MOST_NAMES = 4
WHO = "who has what"
"""Key of the evidence that holds a difference in words."""
MASTER_NOT_SET = "master-not-set"
"""Code of the note on a MASTER_ADDR and MASTER_PORT that nobody gave."""


def everybody_came_in(cluster: Cluster) -> bool:
    """True if every host that is expected reached the coordinator."""
    return cluster.complete and not cluster.absent and all(host.joined for host in cluster.hosts)


def spans_machines(cluster: Cluster) -> bool:
    """True if the job needs a network.

    Two node ranks on one machine need none; if a host is missing, nnodes decides.
    """
    networks = set(map(network_of, cluster.present_hosts))
    return cluster.is_multi_host() and (len(networks) > 1 or not everybody_came_in(cluster))


def network_of(host: Host) -> Hashable:
    """Key of the network that a host sees: the same for several node ranks on one machine, also in
    containers with the network of the host, and names of their own.

    Behind a dot, `Host.key` has a digest of kernel boot and network namespace; that of an older
    report has none. Clones of one image may have both in common, but no two of them all addresses.
    """
    _, _, network = host.key.partition(".")
    return (network or host.name, host.addresses)


def is_namesake(rank: Rank) -> bool:
    """True if a host that is not rank 0's calls itself as MASTER_ADDR does: it may be a clone."""
    launch, name = rank.launch, rank.host.name
    if launch is None or not name or not launch.node_rank or not launch.master_addr:
        return False
    return name.lower().partition(".")[0] == launch.master_addr.lower().partition(".")[0]


def published_address(rank: Rank, facts: Mapping[str, Any]) -> str:
    """Address of its host that gloo publishes for the own name, by the facts of check `own_name`;
    empty where the name leads to none of its own.
    """
    own = {address for _, addresses in facts["interfaces"] for address in addresses}
    return first_bindable(facts["own"]["answers"], own | set(rank.host.addresses))


def shared_network(
    mine: Iterable[Sequence[str]], others: Sequence[Sequence[Sequence[str]]]
) -> Sequence[str] | None:
    """The first network of a host, except those of containers, that all these others have too.

    Args:
        mine: (interface, address, network) of the host.
        others: the same of each other one.
    """
    for entry in mine:
        if not (leads_inside(entry[0]) or is_alone(entry[2])) and all(
            any(entry[2] == theirs[2] for theirs in networks) for networks in others
        ):
            return entry
    return None


def listens_at(cluster: Cluster, master: Host) -> str:
    """Address at which the others find the store on rank 0's host: one to which MASTER_ADDR leads
    there, or else the likeliest.
    """
    for _, facts in cluster.facts_on("master_addr", master):
        led = [each for each in facts["master"]["answers"] if each in master.addresses]
        likely = likely_address(facts.get("interfaces", ()), facts.get("source", ""))
        return led[0] if led else likely[1] if likely else ""
    return next(iter(master.addresses), "")


def host_labels(cluster: Cluster) -> Mapping[int, str]:
    """Seat of every participant that signed in → name of its host, for people."""

    def find() -> Mapping[int, str]:
        return {rank.seat: rank.host.label for rank in cluster.present}

    return cluster.once(host_labels, (), find)


def master_host(cluster: Cluster) -> Host | None:
    """The host of rank 0, if it reported; of several that claim to be, one that joined."""
    claims = [rank.host for rank in cluster.claiming(0)]
    return min(claims, key=lambda host: not host.joined, default=None)


def lacks_torch(cluster: Cluster, host: Host) -> bool:
    """True if no process of a host could import torch, by check `torch_import`."""
    seen = [facts["error"] for _, facts in cluster.facts_on("torch_import", host)]
    return bool(seen) and all(seen)


def collectives_worked(cluster: Cluster, host: Host) -> bool:
    """True if the collectives of all ranks, by check `collectives`, worked on a host."""
    seen = cluster.evidence_on("collectives", host, "world")
    return bool(seen) and all(each.outcome.status is OutcomeStatus.OK for each in seen)


def excuse_of(cluster: Cluster, name: str = "master_addr") -> str:
    """Code of the note that excuses what is wrong with MASTER_ADDR, or with MASTER_PORT
    (`master_port`): nobody gave it to a rank, so that the program derived it; else empty.
    """
    launches = [rank.launch for rank in cluster.present if rank.launch is not None]
    derived = any(getattr(launch, name) is not None for launch in launches)
    told = any(launch.given(name) is not None for launch in launches)
    return MASTER_NOT_SET if derived and not told else ""


def road_to_master(cluster: Cluster, host: Host) -> Where:
    """The link from a host to rank 0's, as a place: a fault on it keeps the host out."""
    master, first = master_host(cluster), cluster.first_on(host)
    if master is not None and master.id == host.id:
        return Where(hosts=(host.label,))
    address = first.launch.master_addr if first and first.launch else None
    end = master.label if master else address
    return Where(links=((host.label, end),)) if end else Where(hosts=(host.label,))


def sides_in_words(sides: Mapping[str, Sequence[str]]) -> str:
    """A difference in words: each value, and the hosts or ranks that have it, the most first.

    Args:
        sides: value as text → names of the places.
    """
    return "; ".join(
        f"{value} on {some_of(names)}"
        for value, names in sorted(sides.items(), key=lambda side: (-len(side[1]), side[0]))
    )


def who_has_what(claims: Iterable[tuple[str, str]]) -> str:
    """A difference in words, from (place, value as text) in any order: as `sides_in_words`."""
    sides: dict[str, dict[str, None]] = {}
    for place, value in claims:
        sides.setdefault(value, {})[place] = None
    return sides_in_words({value: list(places) for value, places in sides.items()})


def some_of(names: Sequence[str]) -> str:
    """All of a few names; of many, the first ones and how many more there are."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more"


def between(names: Sequence[str]) -> Where:
    """The place of one host, or of the path between two, both ways."""
    if len(names) == 1:
        return Where(hosts=(names[0],))
    a, b = names
    return Where(links=((a, b), (b, a)))


def link_names(
    labels: Mapping[int, str], pairs: Iterable[tuple[int, int]]
) -> tuple[tuple[str, str], ...]:
    """Ordered pairs of seats as links of a `Where`, sorted."""
    return tuple(sorted({(labels[a], labels[b]) for a, b in pairs}))


def likely_address(
    nics: Iterable[tuple[str, Sequence[str]]], source: str = ""
) -> tuple[str, str] | None:
    """(interface, address) that peers can most likely reach, or None if there is none.

    Args:
        nics: (interface, its addresses) of those that are up, without loopback.
        source: the own address on the way to MASTER_ADDR, from `source_towards`. It comes before
            every rule by names, unless its interface leads to no other host.
    """
    usable = [
        (leads_inside(nic), address != source, is_virtual(nic), ":" in address, nic, address)
        for nic, addresses in nics
        for address in addresses
        if not is_link_local(address)
    ]
    return min(usable, key=lambda u: u[:4])[4:] if usable else None
