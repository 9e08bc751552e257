"""Has a link that the job uses gone down again and again?

What it checks
--------------
With several hosts: how often the carrier of the interfaces that the job uses has changed
(carrier_changes: each loss and each return counts; check `uplink` reads it), and how often the link
of the RDMA ports that NCCL may use went down (link_downed, read by check `fabric_ports`). A link is
named if it lost its carrier ten times or more, and four times as often as is usual on the other
hosts.

Why it matters
--------------
A cable or transceiver that loses its link now and then works during an examination, and ends a job
after hours with error 12 or a time-out.

How to fix
----------
`ip -s link show <nic>`, `ethtool <nic>`, for RDMA `mlxlink -d <device>`; `dmesg -T` and the log of
the switch show when it happened. Clean or replace the cable and the transceiver, then try another
switch port.

When it is wrong
----------------
Both counters start when the interface is made or the driver is loaded, and show no time: all may
have happened in one evening of maintenance, so this is only information. Links that rise while the
examination runs are named by check `rdma_errors`. Members of a bond, and interfaces outside of a
container, are not seen. Where most hosts have high counts, none is named.
Not validated on hardware: tested on made-up clusters.

References
----------
Linux Documentation/ABI/testing/sysfs-class-net (carrier_changes); Documentation/ABI/stable/
sysfs-class-infiniband (link_downed).
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    Severity,
    Skip,
    Where,
    look,
    shell,
)

FLAPPED = Kind(
    "link-flapped",
    Layer.ROUTE,
    "A link has gone down much more often than those of the other hosts",
    "A link that goes down now and then ends a job after hours, with error 12 or a time-out.",
    Fix(
        look(shell("dmesg -T | grep -i link"), "shows when; so does the log of the switch"),
        alternatives=["clean or replace cable and transceiver, then try another switch port"],
    ),
    Severity.INFO,
    effects=(Effect.JOB_ONLY,),
)

_LEAST = 10
"""Losses. Starting a host, its driver and its switch costs a handful."""
_TIMES = 4
_DAY_S = 86400


class LinkFlaps(Check):
    """Compares counts that checks `uplink` and `fabric_ports` read."""

    name = "link_flaps"
    layer = Layer.ROUTE
    kinds = (FLAPPED,)
    reads = ("fabric_ports", "interfaces", "uplink")

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`up_s`: seconds since this host was started, None if that cannot be read."""
        if ctx.launch.nnodes == 1:
            raise Skip("one host: its ranks need no link")
        return {"up_s": _up_s(ctx.root)}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each link."""
        if not cluster.is_multi_host():
            return
        up = {rank.host.id: facts["up_s"] for rank, facts in cluster.facts(self.name)}
        for links in (_carriers(cluster), _ports(cluster)):
            usual_elsewhere = _usual_elsewhere(links)
            for link in links:
                usual = usual_elsewhere[link.host.id]
                if link.losses >= _LEAST and link.losses >= _TIMES * usual:
                    up_s = up.get(link.host.id)
                    days = f" in {up_s / _DAY_S:.0f} days or less" if up_s else ""
                    yield Finding(
                        FLAPPED,
                        f"{link.name} went down {link.losses} times{days}; usual on the other "
                        f"hosts: {usual:.0f}",
                        Where(hosts=(link.host.label,), interfaces=(link.name,)),
                        {"counter": link.counter, "up_s": up_s},
                        confidence=Confidence.LIKELY,
                    )


class _Link(NamedTuple):
    """A link, and how often it went down by a counter."""

    host: Host
    name: str
    losses: int
    counter: str


def _up_s(root: Path) -> float | None:
    try:
        return float((root / "proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _carriers(cluster: Cluster) -> list[_Link]:
    """Interfaces that lead to MASTER_ADDR, that the libraries take, or that carry RoCE."""
    used: dict[int, set[str]] = {}
    for rank, facts in cluster.facts("interfaces"):
        names = {entry["interface"] for entry in facts.get("listen") or ()}
        used.setdefault(rank.host.id, set()).update(names)
    for rank, facts in cluster.facts("fabric_ports"):
        names = {port["netdev"] for port in _wanted(facts)}
        used.setdefault(rank.host.id, set()).update(names)
    return [
        # The first change is that it came up.
        _Link(rank.host, nic["name"], nic["changes"] // 2, "carrier_changes")
        for rank, facts in cluster.facts("uplink")
        for nic in facts["interfaces"]
        if nic["changes"] is not None
        if nic["name"] in {facts["towards_master"], *used.get(rank.host.id, ())}
    ]


def _ports(cluster: Cluster) -> list[_Link]:
    """RDMA ports that NCCL may use."""
    return [
        _Link(rank.host, port["name"], counters["link_downed"], "link_downed")
        for rank, facts in cluster.facts("fabric_ports")
        for port in _wanted(facts)
        if "link_downed" in (counters := facts["counters"].get(port["name"]) or {})
    ]


def _wanted(facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (
        port
        for device in facts["devices"]
        for port in device["ports"]
        if port["wanted"] and port["state"] != "DOWN"
    )


def _usual_elsewhere(links: list[_Link]) -> dict[int, float]:
    """Host → the median of the links of all other hosts; 0 where there are none."""
    of_host: dict[int, list[int]] = {}
    for link in links:
        of_host.setdefault(link.host.id, []).append(link.losses)
    ordered = sorted(link.losses for link in links)
    return {host: _median_without(ordered, sorted(own)) for host, own in of_host.items()}


def _median_without(ordered: Sequence[int], own: Sequence[int]) -> float:
    """The median of sorted numbers without some of them, which are sorted too."""
    count = len(ordered) - len(own)
    middle = [_nth_without(ordered, own, at) for at in {(count - 1) // 2, count // 2} if count]
    return statistics.fmean(middle) if middle else 0.0


def _nth_without(ordered: Sequence[int], own: Sequence[int], at: int) -> int:
    for number, value in enumerate(own):
        same = number - bisect_left(own, value)
        at += bisect_left(ordered, value) + same <= at
    return ordered[at]
