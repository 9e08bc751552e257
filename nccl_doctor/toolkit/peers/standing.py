"""Roads to and from the host of the store, by the connections that stand there anyway.

Every participant has a connection to the store from its sign-in on. Where a road loses so much that
calls of their own come to no end, the counters of these connections have seen it all the while.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from nccl_doctor.model.cluster import AFTER_LOSS, Cluster
from nccl_doctor.toolkit.net.sock_diag import connections_at

Roads = dict[str, list[int]]
"""Address of another host → segments sent there, and those of them that were lost."""
_TELLING = 2
"""Segments lost on some road, from which on the roads of a host are told."""
_MOST_ROADS = 64
"""Roads that one host tells: those that lost most, and the busiest of the others."""
_SOURCES = (
    ("clock", "all"),
    ("firewall", "matrix"),
    ("loss", "calls"),
    ("loss", "again"),
    ("uplink", AFTER_LOSS),
)
"""Checks and rounds whose facts have `roads`."""


def roads_of_store(port: int | None) -> Roads:
    """Segments that this host sent over connections of the store, and those lost, by road; none
    where (nearly) nothing was lost, or the kernel does not tell.

    Args:
        port: of the store; None if it is not known.
    """
    found: Roads = defaultdict(lambda: [0, 0])
    for each in connections_at(port) if port else ():
        if each.remote != each.local:
            road = found[each.remote]
            road[0] += each.tcp.segments
            # A road that is cut sends again in vain: lost is what something came through after.
            road[1] += max(0, each.tcp.lost - each.tcp.unanswered)
    worst = sorted(found, key=lambda address: (-found[address][1], -found[address][0]))
    if not worst or found[worst[0]][1] < _TELLING:
        return {}
    return {address: found[address] for address in worst[:_MOST_ROADS]}


def roads_seen(cluster: Cluster) -> dict[tuple[int, int], tuple[int, int]]:
    """Pair of hosts, as seats of their first participants (sender, receiver) → (segments, lost), by
    the report that saw most of them lost.
    """
    told: dict[int, list[Mapping[str, list[int]]]] = defaultdict(list)
    for check, round_ in _SOURCES:
        for rank, facts in cluster.facts(check, round_):
            if roads := facts.get("roads"):
                told[rank.host.id].append(roads)
    if not told:
        return {}
    seats = {h.id: first.seat for h in cluster.present_hosts if (first := cluster.first_on(h))}
    owners: dict[str, set[int]] = defaultdict(set)
    for host in cluster.present_hosts:
        for address in host.addresses:
            owners[address].add(host.id)
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for sender, reports in told.items():
        for roads in reports:
            for address, (segments, lost) in roads.items():
                if len(owners[address]) == 1 and not owners[address] & {sender}:
                    pair = (seats[sender], seats[min(owners[address])])
                    found[pair] = max(
                        found.get(pair, (0, 0)), (segments, lost), key=lambda each: each[::-1]
                    )
    return found
