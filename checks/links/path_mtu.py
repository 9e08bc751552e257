"""Paths that carry smaller packets than both of their ends. Pure.

TCP finds out while it sends: a router on the way says so, or the other end asked for less when it
connected. Source: `tcp_mtu_to_mss` in the kernel's net/ipv4/tcp_output.c.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Confidence,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Severity,
    Where,
    blame_links,
    fill,
    look,
    shell,
)
from nccl_doctor.toolkit.hosts import link_names

PATH_MTU_LOW = Kind(
    "path-mtu-low",
    Layer.ROUTE,
    "A path carries smaller packets than the interfaces at both of its ends",
    "More packets for the same data: sockets reach less bandwidth, and a packet that may not be "
    "cut, as those of RoCE, is lost.",
    Fix(
        look(shell("tracepath -n ADDRESS"), "shows where"),
        alternatives=[
            Fix(
                text="set the MTU there to that of the hosts (switch ports and routers: 9216), or "
                "that of the hosts to what the path carries"
            )
        ],
    ),
    Severity.WARN,
)

_HEADERS = {4: 20 + 20 + 12, 6: 40 + 20 + 12}
"""Bytes of IP, TCP and its time stamps; more options leave less for data."""
_SHARE = 0.9
"""A rule of a firewall may leave some room for the headers of a tunnel."""


def judge_paths(
    reports: Sequence[tuple[Rank, Mapping[str, Any]]], labels: Mapping[int, str]
) -> Iterator[Finding]:
    """Findings on the hosts or links whose packets are smaller than both ends could have them.

    A warning only where other links of as large an MTU carry it.

    Args:
        reports: (observer, facts) of both tries, with `mtu`.
        labels: seat → name of its host.
    """
    facts = {rank.seat: each for rank, each in reports}
    paths = {
        (rank.seat, int(partner)): _Path(mss, report, facts[int(partner)])
        for rank, report in reports
        for partner, record in report["sent"].items()
        if int(partner) in facts and (mss := (record.get("tcp") or {}).get("mss"))
    }
    low = {pair for pair, path in paths.items() if path.is_low}
    most = max((paths[pair].could for pair in low), default=0)
    fine = {pair for pair in paths if pair not in low and paths[pair].could >= _SHARE * most}
    places = [
        (
            Where(
                hosts=tuple(labels[end] for end in cause.ends) if cause.is_host else (),
                links=() if cause.is_host else link_names(labels, cause.pairs),
            ),
            cause.pairs,
        )
        for cause in (blame_links(fine | low, low).causes if fine else ())
    ]
    if low and not fine:
        everywhere = {labels[end] for pair in low for end in pair}
        places = [(Where(hosts=tuple(sorted(everywhere))), frozenset(low))]
    for where, pairs in places:
        some = [paths[pair] for pair in sorted(pairs)]
        yield Finding(
            PATH_MTU_LOW,
            f"packets of at most {max(path.carried for path in some)} bytes; the interfaces have "
            f"an MTU of {min(path.could for path in some)}",
            where,
            {
                "bytes": {
                    f"{labels[a]} to {labels[b]}": paths[a, b].carried
                    for a, b in sorted(pairs)[:20]
                }
            },
            fix=fill(PATH_MTU_LOW.fix, on=(labels[min(pairs)[0]],), ADDRESS=some[0].target),
            severity=None if fine else Severity.INFO,
            confidence=Confidence.LIKELY,
        )


class _Path:
    """One direction between two hosts: bytes of the packets that it carried, and could."""

    def __init__(self, mss: int, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
        self.target = str(there["address"])
        self.carried = mss + _HEADERS[6 if ":" in self.target else 4]
        self.could = min(here.get("mtu") or 0, there.get("mtu") or 0)
        self.is_low = self.carried < _SHARE * self.could
