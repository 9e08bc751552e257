"""Ports that a firewall leaves open, and whether the job has room in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Cluster, Command, Fix, Rank, Step, shell
from nccl_doctor.toolkit.firewall.netfilter import Packet, Rules
from nccl_doctor.toolkit.net.ports import reserve_port
from nccl_doctor.toolkit.peers.matrix import PeerCall

_SPAN = (1024, 65535)
_LEAST = 16
"""A smaller window is that of a service, such as MASTER_PORT."""
_MOST_HOSTS = 4
_MOST_QUESTIONS = 600
"""Packets that are followed through the rules of a host: each edge of a window takes some 30."""
_GLOO, _NCCL, _NCCL_SOCKETS = 1, 2, 6
"""Ports on which a rank listens for each group: gloo on one; NCCL for its bootstrap and its proxy,
and over sockets for two channels of a ring and of a tree."""


def open_windows(rules: Rules, packet: Packet) -> list[tuple[int, int]]:
    """Ranges of target ports, from 1024 on, on which no rule may stop the packet.

    Empty if that takes too many questions, as where a rule is not understood.
    """
    found: list[tuple[int, int]] = []
    left = [_SPAN]
    for _ in range(_MOST_QUESTIONS):
        if not left:
            break
        low, high = left.pop()
        hits = rules.hits(replace(packet, target_ports=(low, high)))
        if not hits:
            if found and found[-1][1] == low - 1:
                found[-1] = (found[-1][0], high)
            else:
                found.append((low, high))
        elif low < high and not any(hit.sure for hit in hits):
            middle = (low + high) // 2
            left += [(middle + 1, high), (low, middle)]  # the lower half comes first
    return [] if left else [each for each in found if each[1] - each[0] + 1 >= _LEAST]


def how_to_stay_inside(
    cluster: Cluster,
    rules: Mapping[int, Mapping[str, Any]],
    seats: Sequence[int],
    ranges: Mapping[int, Sequence[int]],
) -> list[Fix]:
    """Ways that move the ports of the job on these hosts into what their firewalls leave open;
    none if they leave nothing open, or are not known. Of many hosts, the first ones.

    `rules`: seat → facts of the round that read the rules; `ranges`: seat → the range that is set.
    """
    speakers = {rank.seat: rank for rank in cluster.ranks}
    steps, too_few = [], []
    for seat in seats[:_MOST_HOSTS]:
        rank, facts = speakers[seat], rules[seat]
        windows: Sequence[Sequence[int]] = facts.get("open") or ()
        if not windows:
            continue
        low, high = max(windows, key=lambda each: each[1] - each[0])
        needed, estimate = _ports_needed(cluster, rank)
        if high - low + 1 < needed:
            too_few.append(f"on {rank.host.label} too few are open, {low}-{high} ({estimate})")
            continue
        port = rank.launch.master_port if rank.launch else None
        # The kernel would give the port of the store to somebody else.
        inside = port is not None and low <= port <= high
        before = facts.get("reserved", "")
        reserve = shell(" {}", reserve_port(port or 0, before)) if inside else Command()
        restore = (
            shell(" net.ipv4.ip_local_reserved_ports={:number}", before) if inside else Command()
        )
        old = " ".join(map(str, ranges.get(seat, ())))
        steps.append(
            Step(
                shell(
                    'sysctl -w net.ipv4.ip_local_port_range="{:number} {:number}"{}',
                    low,
                    high,
                    reserve,
                ),
                on=(rank.host.label,),
                undo=shell('sysctl -w net.ipv4.ip_local_port_range="{:number}"{}', old, restore)
                if old
                else Command(),
                note=f"{high - low + 1} ports are open, about {needed} needed",
            )
        )
    ways = [Fix(*steps)] if steps else []
    return ways + [Fix(text=f"stay inside of what is open: {each}") for each in too_few]


def where_other_ports_pass(cluster: Cluster, calls: Iterable[PeerCall]) -> str:
    """Advice where a call failed on one port and worked on another one of the same address, by
    check `advertised_addresses`: some ports are open. Empty if no call shows that.
    """
    reached = ports_reached(cluster)
    for call in calls:
        port = reached.get((call.caller, call.listener, call.address))
        if port is not None:
            rank = next(rank for rank in cluster.ranks if rank.seat == call.listener)
            return (
                f"port {port} of {call.address} is open and {call.port} is not: where only a "
                "window of ports may be open, set net.ipv4.ip_local_port_range to it on every host "
                f"({_ports_needed(cluster, rank)[1]})"
            )
    return ""


def ports_reached(cluster: Cluster) -> Mapping[tuple[int, int, str], int]:
    """Seat of the caller, seat of the listener and its address → port that was reached there."""
    return cluster.once(ports_reached, ("advertised_addresses",), lambda: _ports_reached(cluster))


def _ports_reached(cluster: Cluster) -> Mapping[tuple[int, int, str], int]:
    return {
        (rank.seat, int(seat), entry["address"]): int(entry["port"])
        for rank, facts in cluster.facts("advertised_addresses", "calls")
        for seat, entries in facts["peers"].items()
        for entry in entries
        if entry["attempts"] and entry["attempts"][-1]["outcome"] == "ok"
    }


def _ports_needed(cluster: Cluster, rank: Rank) -> tuple[int, str]:
    """Estimate of the ports that the job needs on a host, and in words how it is made."""
    ranks = max(1, len(cluster.ranks_on(rank.host)))
    groups = max(1, len(cluster.job.mesh))
    each = _GLOO
    if "nccl" in cluster.backend:
        made = [facts for _, facts in cluster.facts_on("firewall", rank.host, "matrix")]
        sockets = any(facts.get("nccl_data") == "sockets" for facts in made)
        each = _NCCL_SOCKETS if sockets else _NCCL
    needed = max(_LEAST, 2 * ranks * groups * each)
    words = f"ranks on the host {ranks} x groups {groups} x listening ports of each {each}, doubled"
    return needed, f"the job needs about {needed}: {words}, {_LEAST} at least"
