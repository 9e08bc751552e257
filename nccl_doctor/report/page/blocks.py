"""The links of many hosts in blocks: one cell for all links between two blocks, as its worst one.

A block is what hangs on a leaf switch, where the user or the scheduler tells the switches, else so
many hosts in order of their ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nccl_doctor.model.cluster import Cluster
from nccl_doctor.report.network import Link, Network, Pair, show_latency, show_rate
from nccl_doctor.report.places import shortened
from nccl_doctor.toolkit.leaves import leaf_switch
from nccl_doctor.toolkit.slurm import host_ranges

MOST_BLOCKS = 64
_BADNESS = ("", "ok", "failed")


@dataclass(frozen=True)
class BlockLink(Link):
    """All links from one block to another: the worst value of each quantity among them.

    `tried` of `whole` are known, `failed` do not work, and `blamed` are named by a finding.
    """

    tried: int = 0
    whole: int = 0
    failed: int = 0
    blamed: int = 0

    def in_words(self) -> str:
        """All of it, on one line."""
        parts = [f"{self.tried} of {self.whole} links tried"]
        if self.failed:
            parts.append(f"{self.failed} fail: {self.words}")
        if self.rtt_us is not None:
            parts.append(f"longest round trip {show_latency(self.rtt_us)}")
        if self.rate is not None:
            parts.append(f"lowest bandwidth {show_rate(self.rate)}")
        if self.blamed:
            parts.append(f"{self.blamed} blamed by {', '.join(self.blame)}")
        return ", ".join(parts)


def in_blocks(network: Network, cluster: Cluster) -> Network:
    """The same network with blocks for hosts, at most `MOST_BLOCKS` of them.

    Its links are `BlockLink`s; one from a block to itself holds the links inside of it.
    """
    blocks = _blocks(network, cluster)
    block_of = {host: number for number, (_, hosts) in enumerate(blocks) for host in hosts}
    between: dict[Pair, list[Link]] = {}
    for (start, end), link in network.links.items():
        between.setdefault((block_of[start], block_of[end]), []).append(link)
    sizes = [len(hosts) for _, hosts in blocks]
    labels = tuple(label for label, _ in blocks)
    links = {
        (a, b): _worst(labels[a], labels[b], found, sizes[a] * (sizes[b] - (a == b)))
        for (a, b), found in sorted(between.items())
    }
    blamed: dict[int, dict[str, None]] = {}
    for host, codes in sorted(network.blamed.items()):
        blamed.setdefault(block_of[host], {}).update(dict.fromkeys(codes))
    absent = frozenset(n for n, (_, hosts) in enumerate(blocks) if network.absent.issuperset(hosts))
    return Network(labels, links, {n: tuple(codes) for n, codes in blamed.items()}, absent)


def worst_links(network: Network, most: int) -> list[Link]:
    """The worst links: those that fail, those that are blamed, then those that are slow or late by
    most, compared with the usual.
    """

    def goodness(link: Link) -> tuple[bool, bool, float]:
        rate, usual_rate = link.rate, network.usual_rate or 0.0
        rtt_us, usual_rtt_us = link.rtt_us, network.usual_rtt_us or 0.0
        shares = [rate / usual_rate] if rate is not None and usual_rate else []
        shares += [usual_rtt_us / rtt_us] if rtt_us else []
        return link.reach != "failed", not link.blame, min(shares, default=1.0)

    known = (link for _, link in sorted(network.links.items()) if link.is_known or link.blame)
    return sorted(known, key=goodness)[:most]


def _blocks(network: Network, cluster: Cluster) -> list[tuple[str, tuple[int, ...]]]:
    """Label and hosts, by position, of each block; hosts that only findings know are the last."""
    first: dict[int, int] = {}
    leaf_of: dict[int, str] = {}
    leaves = cluster.job.leaves
    for rank in cluster.ranks:
        number = rank.seat if rank.rank is None else rank.rank
        first[rank.host.id] = min(number, first.get(rank.host.id, number))
        leaf_of[rank.host.id] = leaf_of.get(rank.host.id) or leaf_switch(rank, leaves)
    ids = [host.id for host in cluster.hosts]
    places = range(len(network.hosts))
    last = len(first) * len(places)
    order = sorted(places, key=lambda at: (first.get(ids[at], last) if at < len(ids) else last, at))
    above = {at: leaf_of.get(ids[at], "") for at in places if at < len(ids)}
    here = {at for at in above if at not in network.absent}
    if here and (all if not leaves else any)(above[at] for at in here):
        return _by_leaf(order, above)
    size = -(-len(order) // MOST_BLOCKS)
    parts = [tuple(order[at : at + size]) for at in range(0, len(order), size)]
    return [(_ranges(network, hosts), hosts) for hosts in parts]


def _by_leaf(order: Sequence[int], leaves: Mapping[int, str]) -> list[tuple[str, tuple[int, ...]]]:
    """Blocks of a leaf each, or of neighbouring ones where there are too many."""
    below: dict[str, list[int]] = {}
    for at in order:  # a host that never came hangs where nobody knows
        below.setdefault(leaves.get(at, ""), []).append(at)
    names = list(below)
    size = -(-len(names) // MOST_BLOCKS)
    parts = [names[at : at + size] for at in range(0, len(names), size)]
    return [
        (
            " – ".join(dict.fromkeys((part[0] or "unknown", part[-1] or "unknown"))),
            tuple(host for name in part for host in below[name]),
        )
        for part in parts
    ]


def _ranges(network: Network, hosts: Sequence[int]) -> str:
    return shortened([network.hosts[at] for at in hosts], host_ranges)


def _worst(start: str, end: str, links: Sequence[Link], whole: int) -> BlockLink:
    worst = max(links, key=lambda link: _BADNESS.index(link.reach))
    return BlockLink(
        start,
        end,
        reach=worst.reach,
        words=worst.words,
        rtt_us=max((link.rtt_us for link in links if link.rtt_us is not None), default=None),
        rate=min((link.rate for link in links if link.rate is not None), default=None),
        segments=sum(link.segments for link in links),
        lost=sum(link.lost for link in links),
        blame=tuple(dict.fromkeys(code for link in links for code in link.blame)),
        tried=sum(link.is_known for link in links),
        whole=whole,
        failed=sum(link.reach == "failed" for link in links),
        blamed=sum(bool(link.blame) for link in links),
    )
