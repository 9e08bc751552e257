"""Groups of hosts with one file system at a path, by what they saw of each other. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from nccl_doctor.toolkit.storage.file_systems import is_network, may_be_shared

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Sharing:
    """Groups of seats with one file system, the largest first.

    `apart`: those that lack what the others share, none where nothing has to be shared; with `tie`
    two groups are as large, and nobody knows which one is right. `unseen`: ordered pairs (looks,
    wrote) in one group that did not see each other; `tried`: all pairs that were to. `must`: it had
    to be shared whatever it lies on.
    """

    groups: tuple[frozenset[int], ...]
    apart: frozenset[int]
    tie: bool
    unseen: frozenset[tuple[int, int]]
    tried: frozenset[tuple[int, int]]
    must: bool = False

    @property
    def main(self) -> frozenset[int]:
        """The largest group that may share something."""
        return self.groups[0] if self.groups else frozenset()


def sharing_of(hosts: Mapping[int, Facts], *, must: bool = False) -> Sharing:
    """Groups of hosts that share a path, and the hosts that lack what they should share.

    Two hosts have the same file system if one sees a file of the other, or if both mount the same
    source of a network file system. It has to be shared if half of the hosts have it so from a
    network, and not each its own; of types that may also come from the machine around a virtual
    one, if more than half do and saw each other. A disk of one machine that several containers see
    is not shared.

    Args:
        hosts: seat → facts of `examine`, without those of hosts whose path is broken.
        must: the path has to be shared whatever it lies on.
    """
    union = _Union()
    tried, unseen = set(), set()
    for seat, facts in hosts.items():
        union.find(seat)
        if is_network(facts["type"]):
            union.join(seat, (facts["type"], facts["source"]))
        for text, after_s in facts["sees"].items():
            if int(text) in hosts:
                tried.add((seat, int(text)))
                if after_s is None:
                    unseen.add((seat, int(text)))
                else:
                    union.join(seat, int(text))
    members: dict[Hashable, set[int]] = defaultdict(set)
    for seat in hosts:
        members[union.find(seat)].add(seat)

    def worth(group: set[int]) -> tuple[bool, int, int]:
        return must or _weight(hosts, group) > 0, len(group), _weight(hosts, group)

    ranked = sorted(members.values(), key=worth, reverse=True)
    apart: frozenset[int] = frozenset()
    tie = False
    if len(ranked) > 1 and (must or _is_shared(hosts, *ranked[:2])):
        first, second = ranked[:2]
        tie = len(first) == len(second) and _weight(hosts, first) == _weight(hosts, second)
        apart = frozenset(hosts).difference(() if tie else ranked[0])
    inside = {(a, b) for a, b in unseen if union.find(a) == union.find(b)}
    return Sharing(
        tuple(map(frozenset, ranked)), apart, tie, frozenset(inside), frozenset(tried), must
    )


def _weight(hosts: Mapping[int, Facts], group: set[int]) -> int:
    """2 for a network file system, 1 for one that may be shared, 0 for the disk of a machine."""
    kinds = {hosts[seat]["type"] for seat in group}
    return 2 if any(map(is_network, kinds)) else int(any(map(may_be_shared, kinds)))


def _is_shared(hosts: Mapping[int, Facts], group: set[int], second: set[int]) -> bool:
    weight = _weight(hosts, group)
    if weight == 2:  # of hosts without disks, each may have an export of its own
        own = len(group) == 1 and _weight(hosts, second) == 2
        return 2 * len(group) >= len(hosts) and not own
    return weight == 1 and 2 * len(group) > len(hosts)


class _Union:
    """Disjoint sets of whatever is joined."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, one: Hashable) -> Hashable:
        parent = self._parent.setdefault(one, one)
        while parent != one:
            self._parent[one] = self._parent.setdefault(parent, parent)
            one, parent = parent, self._parent[parent]
        return one

    def join(self, a: Hashable, b: Hashable) -> None:
        self._parent[self.find(a)] = self.find(b)
