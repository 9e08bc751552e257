"""What several checks ask about the hosts of a cluster. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from nccl_doctor.cluster import Cluster
from nccl_doctor.tools.net import is_link_local

_VIRTUAL = re.compile(r"docker|veth|br-|virbr|cni|flannel|cali|tun|tap")


def spans_machines(cluster: Cluster) -> bool:
    """Whether the job needs a network.

    Two node ranks on one machine need none; while somebody is missing, nnodes is trusted.
    """
    machines = {(host.name, host.addresses) for host in cluster.present_hosts}
    everybody_is_in = cluster.complete and not cluster.absent
    return cluster.is_multi_host() and (len(machines) > 1 or not everybody_is_in)


def host_labels(cluster: Cluster) -> dict[int, str]:
    """Seat of every participant that signed in → name of its host, for people."""
    return {rank.seat: rank.host.label for rank in cluster.present}


def link_names(
    labels: Mapping[int, str], pairs: Iterable[tuple[int, int]]
) -> tuple[tuple[str, str], ...]:
    """Ordered pairs of seats as links of a `Where`, sorted."""
    return tuple(sorted({(labels[a], labels[b]) for a, b in pairs}))


def likely_address(nics: Iterable[tuple[str, Sequence[str]]]) -> tuple[str, str] | None:
    """(interface, address) that peers are most likely to reach, or None where there is none.

    Args:
        nics: (interface, its addresses) of those that are up, without loopback.
    """
    usable = [
        (bool(_VIRTUAL.match(nic)), ":" in address, nic, address)
        for nic, addresses in nics
        for address in addresses
        if not is_link_local(address)
    ]
    return min(usable, key=lambda u: u[:2])[2:] if usable else None
