"""Names of the hosts that connect to the store, looked up by the host that serves it.

torch's store looks up the name of every client that it accepts, for its log, in the thread that
serves all of them (`startRead` and `formatSockAddr` in torch/csrc/distributed/c10d). Since 2.9 the
first look-up that fails is the last one (pytorch/pytorch issue 159007).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from nccl_doctor.api import Cluster, master_host, spans_machines
from nccl_doctor.toolkit.net.names import look_up

LOOK_UP_S = 4.0
_MOST = 16
"""A name server that does not answer for one of them will hardly answer for the others."""


def clients_of_store(cluster: Cluster) -> dict[str, Any]:
    """Parameters of a round: `store`, the first seat of rank 0's host, and `clients`, the addresses
    from which the other hosts call it, by check `own_name`; nothing where that is not known.
    """
    host = master_host(cluster)
    first = cluster.first_on(host) if host is not None else None
    if first is None or not spans_machines(cluster):
        return {}
    found = {
        facts["source"]
        for rank, facts in cluster.facts("own_name")
        if rank.host.id != first.host.id and facts.get("source")
    }
    return {"store": first.seat, "clients": sorted(found)[:_MOST]}


@contextmanager
def looked_up(addresses: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Look up the names of addresses while the body runs; the list is filled when it ends."""
    found: list[dict[str, Any]] = []
    if not addresses:
        yield found
        return
    with ThreadPoolExecutor(len(addresses)) as pool:
        asked = [pool.submit(look_up, each, LOOK_UP_S, reverse=True) for each in addresses]
        yield found
        found += [each.result().to_json() for each in asked]
