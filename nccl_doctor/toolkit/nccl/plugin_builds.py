"""Hosts whose plug-ins of NCCL are not the same. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.model.cluster import Host
from nccl_doctor.model.findings import Confidence, Finding, Kind, Severity, Where
from nccl_doctor.toolkit.blame import odd_ones_out
from nccl_doctor.toolkit.hosts import WHO, who_has_what


def only_some_load(
    kind: Kind,
    seen: Sequence[tuple[Host, str | None]],
    total: int,
    severity: Severity | None = None,
) -> Iterator[Finding]:
    """Finding if some hosts load a plug-in and others load none: on the few of them.

    Args:
        kind: of the finding.
        seen: hosts, and the library that each one loads.
        total: number of hosts to name.
        severity: of the finding, if not that of the kind.
    """
    having = [host for host, loaded in seen if loaded]
    without = [host for host, loaded in seen if not loaded]
    if not (having and without):
        return
    libraries = sorted({loaded for _, loaded in seen if loaded})
    tie = len(without) == len(having)
    odd = without if len(without) < len(having) else having
    yield Finding(
        kind,
        f"{len(having)} of {total} hosts load {' or '.join(libraries)}, {len(without)} load none",
        place_of_hosts(without + having if tie else odd),
        {WHO: who_has_what((host.label, loaded or "none") for host, loaded in seen)},
        severity=severity,
        confidence=Confidence.POSSIBLE if tie else Confidence.LIKELY,
    )


def differing_builds(
    kind: Kind, use: Iterable[tuple[Host, Mapping[str, Any] | None]]
) -> Iterator[Finding]:
    """Findings on hosts whose plug-in file differs from that of most hosts.

    Builds of one file name with the same interfaces are only a note: hosts may compile it
    themselves.

    Args:
        kind: of the findings.
        use: hosts and their `PluginBuild`; None for one that is not known.
    """
    builds: dict[str, Mapping[str, Any]] = {}
    hosts: dict[str, list[Host]] = {}
    for host, build in use:
        if build and build.get("fingerprint"):
            builds[build["fingerprint"]] = build
            hosts.setdefault(build["fingerprint"], []).append(host)
    odd = odd_ones_out({host.id: mark for mark, each in hosts.items() for host in each})
    if odd is None:
        return
    who = who_has_what(
        (host.label, _in_words(builds[mark])) for mark, each in hosts.items() for host in each
    )
    parts = [list(builds)] if odd.usual is None else [[m] for m in builds if m != odd.usual]
    for marks in parts:
        text = " and ".join(_in_words(builds[mark]) for mark in marks)
        alike = marks
        if odd.usual is not None:
            text += f"; {len(hosts[odd.usual])} hosts have {_in_words(builds[odd.usual])}"
            alike = [*marks, odd.usual]
        looks = {(builds[m]["path"].rpartition("/")[2], *builds[m]["versions"]) for m in alike}
        yield Finding(
            kind,
            text,
            place_of_hosts([host for mark in marks for host in hosts[mark]]),
            {**{mark: dict(builds[mark]) for mark in alike}, WHO: who},
            severity=None if len(looks) > 1 else Severity.INFO,
            confidence=Confidence.POSSIBLE if odd.tie else Confidence.LIKELY,
        )


def place_of_hosts(hosts: Iterable[Host]) -> Where:
    """These hosts, by their labels."""
    return Where(hosts=tuple(sorted(host.label for host in hosts)))


def _in_words(build: Mapping[str, Any]) -> str:
    versions = ", ".join(f"v{each}" for each in build["versions"])
    return f"{build['path']} ({versions}, build {build['fingerprint'][:8]})"
