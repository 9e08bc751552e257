"""Comparison of the interfaces that hosts use, and of their MTUs."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Step,
    Where,
    odd_ones_out,
    shell,
)
from nccl_doctor.toolkit.hosts import link_names, sides_in_words
from nccl_doctor.toolkit.nccl.use_interface import CHOOSE
from nccl_doctor.toolkit.net.interfaces import is_alone
from nccl_doctor.toolkit.peers.matrix import Sorted

INTERFACE_DIFFERS = Kind(
    code="interface-differs",
    layer=Layer.ROUTE,
    title="Hosts chose interfaces in networks that cannot reach each other",
    why="The library picks the first interface that fits, which may be another network on each "
    "host.",
    fix=CHOOSE,
    severity=Severity.WARN,
)
MTU_DIFFERS = Kind(
    code="mtu-differs",
    layer=Layer.ROUTE,
    title="Hosts in one network have different MTUs",
    why="A packet that one host can send may be too large for another: slower at best, lost at "
    "worst.",
    fix=Fix(
        Step(shell("# ip link set dev NIC mtu SIZE"), note="the same on every host and switch port")
    ),
    severity=Severity.WARN,
)


_RAISE = "the larger one on every host, if the switch ports carry it"


def uses(cluster: Cluster, library: str) -> bool:
    """True if the job's collectives go by the interface of this library."""
    return ("nccl" in cluster.backend) == library.startswith("nccl")


_parsed = lru_cache(maxsize=1024)(ipaddress.ip_network)
"""A network by its text: hosts have few different ones."""
Main = tuple[str, str, int]
"""(interface, subnet, MTU) of the address that the job's backend uses first on a host."""


def main_of(cluster: Cluster, facts: Mapping[str, Any]) -> Main | None:
    """Address that the job's backend uses first on a host; None where that is not known."""
    mine = [each for each in facts["listen"] if any(uses(cluster, role) for role in each["roles"])]
    for entry in (mine or facts["listen"])[:1]:
        for nic in facts["interfaces"]:
            if nic["name"] == entry["interface"]:
                own = ipaddress.ip_address(entry["address"])
                nets = [net for net in nic["subnets"] if own in _parsed(net)]
                return nic["name"], _network(nic, str(own), nets), nic["mtu"]
    return None


def _network(nic: Mapping[str, Any], own: str, nets: Sequence[str]) -> str:
    """Network of an address, by its gateway where the address stands alone (/32, /128)."""
    wide = [net for net in nets if not is_alone(net)]
    if wide:
        return wide[0]
    ways = (way for way in nic.get("gateways", ()) if (":" in way) == (":" in own))
    way = next(ways, "")
    return f"the network of {nic['name']} behind {way}" if way else own


def mtu_differs(
    labels: Mapping[int, str],
    mains: Mapping[int, Main],
    reports: Mapping[int, Mapping[str, Any]],
) -> Iterator[Finding]:
    """Findings on hosts of one network with another MTU.

    Where as many hosts have the one as the other, hosts of `reports` (seat → facts) decide that
    have an interface in that network too, and use another one.
    """
    by_subnet: dict[str, dict[int, int]] = {}
    for seat, (_, subnet, mtu) in mains.items():
        by_subnet.setdefault(subnet, {})[seat] = mtu
    for subnet, mtus in by_subnet.items():
        odd = odd_ones_out(mtus)
        if odd is None:
            continue
        if odd.tie:
            more = {**_beside(subnet, reports), **mtus}
            decided = odd_ones_out(more)
            if decided is not None and not decided.tie and set(decided.places) <= set(mtus):
                odd, mtus = decided, more
        sides: dict[str, list[str]] = {}
        for seat, mtu in mtus.items():
            sides.setdefault(str(mtu), []).append(labels[seat])
        # With two equal halves it is not known which one is wrong: all are named. What the smaller
        # one can send, the larger one can take.
        wrong = odd.places
        usual = min(mtus.values()) if odd.tie or odd.usual is None else odd.usual
        steps = [
            _set_mtu(labels[seat], mains[seat], usual) for seat in wrong if mtus[seat] != usual
        ]
        yield Finding(
            MTU_DIFFERS,
            f"in {subnet}: MTU {sides_in_words(sides)}",
            Where(
                hosts=tuple(sorted(labels[seat] for seat in wrong)),
                interfaces=tuple(sorted({mains[seat][0] for seat in odd.places})),
            ),
            {"mtu": {labels[seat]: mtu for seat, mtu in mtus.items()}},
            fix=Fix(*steps, alternatives=[_RAISE] if odd.tie else []),
            confidence=Confidence.POSSIBLE if odd.tie else Confidence.LIKELY,
        )


def _beside(subnet: str, reports: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """Seat → MTU of the running interface that its host has in a network."""
    return {
        seat: nic["mtu"]
        for seat, facts in reports.items()
        for nic in facts["interfaces"]
        if subnet in nic["subnets"] and nic["running"]
    }


def _set_mtu(host: str, main: Main, mtu: int) -> Step:
    command = shell("ip link set dev {} mtu", main[0].partition(":")[0])
    return Step(shell("{} {}", command, mtu), on=(host,), undo=shell("{} {}", command, main[2]))


def differs(
    labels: Mapping[int, str], mains: Mapping[int, Main], by_fault: Sorted, fix: Fix
) -> Iterator[Finding]:
    """The choices of hosts that could not reach each other; `fix`: the interface that they have in
    common.
    """
    apart = {
        call.pair
        for call in (*by_fault.no_route, *by_fault.blocked, *by_fault.unroutable)
        if call.job
        and (a := mains.get(call.caller))
        and (b := mains.get(call.listener))
        and a[0] != b[0]
        and a[1] != b[1]
    }
    if not apart:
        return
    odd = odd_ones_out({seat: main[1] for seat, main in mains.items()})
    wrong = odd.places if odd is not None else ()
    chosen = {seat: f"{nic} in {net}" for seat, (nic, net, _) in mains.items()}
    failing = (code for code, calls in by_fault.by_code.items() if any(c.job for c in calls))
    yield Finding(
        INTERFACE_DIFFERS,
        f"chosen: {', '.join(sorted(set(chosen.values())))}",
        Where(
            hosts=tuple(sorted(labels[seat] for seat in wrong)),
            links=link_names(labels, apart),
            interfaces=tuple(sorted({mains[seat][0] for seat in wrong})),
        ),
        {labels[seat]: text for seat, text in chosen.items()},
        fix=fix,
        confidence=Confidence.LIKELY if odd and not odd.tie else Confidence.POSSIBLE,
        # A reason, not a fault of its own: the calls that fail decide the verdict.
        explained_by=next(failing, None),
    )
