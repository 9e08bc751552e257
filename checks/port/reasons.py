"""Explanations and excuses of a host that reached no store. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nccl_doctor.api import Cluster, Host, Rank
from nccl_doctor.toolkit.hosts import lacks_torch, shared_network
from nccl_doctor.toolkit.load_torch import TORCH_MISSING


def reason_of(
    cluster: Cluster, rank: Rank, facts: Mapping[str, Any], unserved: Mapping[int, str]
) -> str | None:
    """Code of a finding that explains why this host can reach no store, if there is one.

    A port other than rank 0's, a port that rank 0 could not serve, or an address that is not its.
    Without torch rank 0 serves nothing; and where it is missing here, it will be missing there.
    """
    last = facts["knock"]["last"]
    if last and last["outcome"] == "refused" and lacks_torch(cluster, rank.host):
        return TORCH_MISSING
    master = next((each for each in cluster.present if each.rank == 0), None)
    if master is None or master.launch is None or master.host is rank.host:
        return None
    if lacks_torch(cluster, master.host):
        return TORCH_MISSING
    if master.launch.master_port != facts["port"]:
        return "master-port-differs"
    elsewhere = last and last["address"] not in master.host.addresses
    return unserved.get(facts["port"]) or ("addr-not-on-master" if elsewhere else None)


def excuse_for(last: Mapping[str, Any], master: Host | None, of_address: str, of_port: str) -> str:
    """Code of the note that excuses a failed call, or empty.

    It is excused if nobody gave the address, and it is not known to be one of rank 0's host; or if
    nobody gave the port, and another service answers there.
    """
    is_right = master is not None and last["address"] in master.addresses
    return (of_port if last["answer"] else "") or ("" if is_right else of_address)


def in_common(cluster: Cluster, rank: Rank, master: Host | None) -> Sequence[str]:
    """Interface, address and network of rank 0's host, of the first that this host has too."""
    if master is None or master.id == rank.host.id:
        return ()
    theirs = [facts["networks"] for _, facts in cluster.facts_on("master_network", master)]
    mine = [facts["networks"] for _, facts in cluster.facts_on("master_network", rank.host)]
    return shared_network(theirs[0], mine) or () if theirs and mine else ()
