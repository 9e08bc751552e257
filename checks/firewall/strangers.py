"""Callers that do not belong to the job: port scanners, metrics scrapers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from nccl_doctor.api import Cluster, Confidence, Effect, Finding, Kind, Layer, Severity, Where
from nccl_doctor.toolkit.releases import STRANGERS, known_faults

STRANGER = Kind(
    code="stranger-connects",
    layer=Layer.PORT,
    title="Somebody who is not of the job connects to its ports",
    why="NCCL before 2.30.7 does not put such a connection aside: a port scan or a metrics scraper "
    "can stop its bootstrap or its proxy thread for ever.",
    fix="keep scanners and scrapers from the ephemeral ports of these hosts, or install NCCL "
    "2.30.7 or newer",
    severity=Severity.WARN,
    effects=(Effect.JOB_ONLY,),
)
_MOST = 5
"""Sources that get a finding of their own."""


def judge_strangers(cluster: Cluster, troubled: Collection[int]) -> Iterator[Finding]:
    """One finding for each stranger, on the hosts whose ports they called.

    Args:
        cluster: with the facts.
        troubled: seats of hosts that could not be called by all: who says nothing there may be a
            host of the job, behind an address translation, whose call broke off.
    """
    own = {address for host in cluster.hosts for address in host.addresses}
    for _, facts in cluster.facts("interfaces"):
        for nic in facts.get("interfaces", ()):
            own |= set(nic["addresses"])
    reports = [
        *cluster.facts("firewall", "matrix"),
        *cluster.facts("advertised_addresses", "calls"),
    ]
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for rank, facts in reports:
        for each in facts.get("strangers", ()):
            if each["first"] or not (each["source"] in own or rank.seat in troubled):
                found.setdefault(each["source"], []).append((rank.host.label, each))
    if not found:
        return
    versions = _versions(cluster)
    nccl = "nccl" in cluster.backend
    hangs = nccl and (not versions or any(fault.has(v) for fault in _faults() for v in versions))
    busiest = sorted(found.items(), key=lambda item: (-_times(item[1]), item[0]))
    for source, calls in busiest[:_MOST]:
        said = sorted({each["first"] for _, each in calls if each["first"]})
        times, ports = _times(calls), len({(host, each["port"]) for host, each in calls})
        words = f'"{said[0]}"' if said else "nothing: a port scan, or a health probe"
        release = f"; NCCL {', '.join(versions) or 'of unknown release'}" if nccl else ""
        fix = (
            f"keep {source} from the ephemeral ports (net.ipv4.ip_local_port_range) of these hosts"
        )
        yield Finding(
            STRANGER,
            f"{source} connected {_counted(times, 'time')} to {_counted(ports, 'port')} open for "
            f"seconds, and said {words}{release}",
            Where(hosts=tuple(sorted({host for host, _ in calls}))),
            {"calls": [{"host": host, **each} for host, each in calls[:16]]},
            fix=f"{fix}, or install NCCL 2.30.7 or newer" if hangs else fix,
            severity=Severity.WARN if hangs else Severity.INFO,
            confidence=Confidence.LIKELY,
        )


def _faults() -> list[Any]:
    return [fault for fault in known_faults("nccl") if fault.condition == STRANGERS]


def _versions(cluster: Cluster) -> list[str]:
    """Releases of NCCL that the ranks load; RCCL has others."""
    return sorted(
        {
            facts["loaded"]["version"]
            for _, facts in cluster.facts("nccl_library")
            if facts.get("cuda") and (facts.get("loaded") or {}).get("version")
        }
    )


def _times(calls: list[tuple[str, Mapping[str, Any]]]) -> int:
    return sum(int(each["times"]) for _, each in calls)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
