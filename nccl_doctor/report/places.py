"""Places in words, for every renderer that people read."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from nccl_doctor.model.cluster import Cluster, Host
from nccl_doctor.model.findings import Finding, Where, numbered
from nccl_doctor.model.report import Report
from nccl_doctor.toolkit.hosts import is_namesake
from nccl_doctor.toolkit.slurm import host_ranges

_MOST_NAMES = 8
"""Checks whose names are written out; a host that is absent blocks most of them."""
_FEW_HOSTS = 3
MOST_RANGES = 8
"""Ranges of numbers, or of hosts, that are written out."""
MOST_PLACES = 6
"""Messages of one kind that are written out; a report of ten thousand ranks stays readable."""


def full_names(cluster: Cluster) -> dict[str, str]:
    """Names of hosts that do not say which host it is → the name, with node rank and address.

    Several hosts may have one name; or one that is not node 0 has that of MASTER_ADDR.
    """
    named: dict[str, list[Host]] = defaultdict(list)
    for host in cluster.hosts:
        if host.name:
            named[host.name].append(host)
    twins = {rank.host.id for rank in cluster.ranks if is_namesake(rank)}
    return {
        name: f"{name} ({'; '.join(map(_which, hosts))})"
        for name, hosts in named.items()
        if len({host.node_rank for host in hosts}) > 1 or any(host.id in twins for host in hosts)
    }


def _which(host: Host) -> str:
    return ", ".join([f"node {host.node_rank}", *host.addresses[:1]])


class Places:
    """Places of a report's findings in words: `ranks 8–15 on node3`, `nd1 → nd0`."""

    def __init__(self, report: Report, *, ranges: bool = False) -> None:
        """`ranges`: many hosts are written as `gpu[001-064]`."""
        self._ranges = ranges
        self._host_of: dict[int, set[str]] = defaultdict(set)
        self._nodes: dict[str, set[int]] = defaultdict(set)
        self._full = full_names(report.cluster)
        for rank in report.cluster.ranks:
            if rank.rank is not None and rank.host.name:
                self._host_of[rank.rank].add(rank.host.name)
        for host in report.cluster.hosts:
            if host.name and host.node_rank is not None:
                self._nodes[host.name].add(host.node_rank)

    def say(self, where: Where) -> str:
        """One place, as short as it can be said."""
        parts = []
        left = set(where.hosts)
        by_hosts: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number in where.ranks:
            on = self._host_of.get(number, set())
            here = tuple(sorted(on & left) or sorted(on))
            by_hosts[here].append(number)
        named = {name for hosts in by_hosts for name in hosts}
        if len(named) > MOST_PLACES:
            parts.append(f"{numbered('rank', where.ranks, MOST_RANGES)} on {len(named)} hosts")
        else:
            for hosts, numbers in by_hosts.items():
                on_hosts = f" on {', '.join(self._hosts(hosts))}" if hosts else ""
                parts.append(numbered("rank", numbers) + on_hosts)
        parts += self._hosts(sorted(left - named))
        parts += some(_links(where.links))
        known = {node for name in where.hosts for node in self._nodes.get(name, ())}
        nodes = [node for node in where.nodes if node not in known]
        if nodes:
            parts.append(numbered("node", nodes, MOST_RANGES))
        parts += some(where.devices)
        text = ", ".join(parts)
        if where.interfaces:
            interfaces = ", ".join(some(where.interfaces))
            text = f"{interfaces} on {text}" if text else interfaces
        return text

    def _hosts(self, names: Sequence[str]) -> list[str]:
        if self._ranges and len(names) > _FEW_HOSTS and not self._full.keys() & set(names):
            return [shortened(names, host_ranges)]
        return some([self._full.get(name, name) for name in names])


def _links(links: Sequence[tuple[str, str]]) -> list[str]:
    there = set(links)
    both = {(start, end) for start, end in there if (end, start) in there and start != end}
    return [
        f"{start} {'↔' if (start, end) in both else '→'} {end}"
        for start, end in links
        if (start, end) not in both or start < end
    ]


def checks_in_words(names: Sequence[str]) -> str:
    """Names of a few checks, and only the number of many: `-v` and the JSON report list them."""
    return f"{len(names)} other checks" if len(names) > _MOST_NAMES else ", ".join(names)


def shortened(names: Sequence[str], say: Callable[[Sequence[str]], str]) -> str:
    """Many hosts in few ranges: as many of them as that takes, and how many more there are.

    Args:
        names: in their order.
        say: gives the ranges of names, with commas between them.
    """

    def fits(count: int) -> bool:
        return say(names[:count]).count(",") < MOST_RANGES

    if fits(len(names)):
        return say(names)
    shown = bisect_left(range(len(names)), True, key=lambda count: not fits(count)) - 1
    return f"{say(names[:shown])} and {len(names) - shown} more"


def some(items: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    more = len(items) - MOST_PLACES
    return [*items[:MOST_PLACES], *([f"and {more} more"] if more > 0 else [])]


def by_kind(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one code, title and severity together, in the order in which they came."""
    groups: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.code, finding.kind.title, finding.level.value].append(finding)
    return list(groups.values())
