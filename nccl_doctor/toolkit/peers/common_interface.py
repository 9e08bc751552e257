"""The interface by which all hosts reach each other, as the round of calls saw it. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.fixes import Fix
from nccl_doctor.toolkit.hosts import host_labels
from nccl_doctor.toolkit.nccl.use_interface import use_interface
from nccl_doctor.toolkit.net.interfaces import is_alone
from nccl_doctor.toolkit.peers.matrix import Pair, first_calls

Choice = Mapping[int, str]
"""Seat of each host → the interface to be used there."""

NONE_FOUND = Fix(
    text="no interface was found by which every host reaches every other one: mend that first (one "
    "network for all hosts, or routes between them)"
)


def common_interface(cluster: Cluster) -> Choice | None:
    """The interface of each host by which every pair of hosts was reached; empty where there is
    none, and None where no calls were made.

    It has one name on all hosts, or is in one network. Of several, the one in MASTER_ADDR's network
    comes first, then the one with the highest line rate.
    """
    read = ("firewall", "interfaces", "own_name")
    return cluster.once(common_interface, read, lambda: _common_interface(cluster))


def interface_fix(cluster: Cluster, *, nccl: bool = True, gloo: bool = True) -> Fix:
    """The fix that makes the libraries use the common interface, or says that there is none."""
    chosen = common_interface(cluster)
    if chosen is None:
        return Fix(use_interface(nccl=nccl, gloo=gloo))
    labels = host_labels(cluster)
    by_name: dict[str, list[str]] = {}
    for seat, name in sorted(chosen.items()):
        by_name.setdefault(name, []).append(labels[seat])
    steps = [(use_interface(name, nccl=nccl, gloo=gloo), on) for name, on in by_name.items()]
    if len(steps) < 2:
        return Fix(*(step for step, _ in steps)) if steps else NONE_FOUND
    return Fix(*(replace(step, on=tuple(sorted(on))) for step, on in steps))


def _common_interface(cluster: Cluster) -> Choice | None:
    calls, by_fault = first_calls(cluster)
    if not calls:
        return None
    facts = {rank.seat: each for rank, each in cluster.facts("interfaces")}
    nics = {seat: {nic["name"]: nic for nic in each["interfaces"]} for seat, each in facts.items()}
    by_name: dict[str, set[Pair]] = {}
    by_network: dict[str, set[Pair]] = {}
    at: dict[str, dict[int, str]] = {}
    """Network → seat → its interface there."""
    of_address: dict[tuple[int, str, str], list[str]] = {}
    for call in calls:
        if call.outcome != "ok":
            continue
        by_name.setdefault(call.interface, set()).add(call.pair)
        key = call.listener, call.interface, call.address
        if key not in of_address:
            nic = nics.get(call.listener, {}).get(call.interface, {})
            of_address[key] = _networks(call.address, nic.get("subnets", ()))
        for network in of_address[key]:
            by_network.setdefault(network, set()).add(call.pair)
            at.setdefault(network, {})[call.listener] = call.interface
    every = by_fault.tested
    seats = sorted({seat for pair in every for seat in pair})
    found = [dict.fromkeys(seats, name) for name, pairs in by_name.items() if every <= pairs]
    found += [at[network] for network, pairs in by_network.items() if every <= pairs]
    sources = {rank.seat: each.get("source") for rank, each in cluster.facts("own_name")}

    def order(choice: Choice) -> tuple[int, int, int]:
        used = {seat: nics.get(seat, {}).get(name, {}) for seat, name in choice.items()}
        to_master = sum(sources.get(s) in nic.get("addresses", ()) for s, nic in used.items())
        slowest = min(nic.get("mbps") or 0 for nic in used.values())
        return -to_master, -slowest, len(set(choice.values()))

    return min(found, key=order, default={})


@lru_cache(maxsize=1024)
def _parsed(network: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(network)


def _networks(address: str, subnets: Iterable[str]) -> list[str]:
    own = ipaddress.ip_address(address.partition("%")[0])
    return [each for each in subnets if not is_alone(each) and own in _parsed(each)]
