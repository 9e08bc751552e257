"""Leaf switches: which hosts hang on one, as the user's file or Slurm tells it. Pure.

A file is in the form of Slurm's topology.conf (its manual page has all of it):

    SwitchName=leaf1 Nodes=gpu[001-016]
    SwitchName=spine Switches=leaf[1-8]

A block (`BlockName=`, of plugin topology/block) is taken for a leaf switch: what is inside of it is
near, what is not goes through more of the network.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from nccl_doctor.model.cluster import Cluster, Rank
from nccl_doctor.model.job import Leaf
from nccl_doctor.toolkit.slurm import slurm_hosts

Leaves = tuple[Leaf, ...]
"""Leaf switches, each with its hosts as `slurm_hosts` reads them; no host has two."""

_NAMES = ("switchname", "blockname")
_PASSED = frozenset(("blocksizes",))
"""Keys of lines that name no hosts."""
_WANTED, _ABOVE = "SwitchName=NAME Nodes=LIST", "SwitchName=NAME Switches=LIST"


class TopologyError(ValueError):
    """The file cannot be used; the text is one line that says where, and why."""


def read_leaves(text: str) -> Leaves:
    """The leaf switches of a file; a switch that comes again has the hosts of all of its lines.

    Raises:
        TopologyError: a line is of another form, a list is none, a host hangs on two leaf switches,
            or there is no leaf switch.
    """
    lists: dict[str, list[str]] = {}
    leaf_of: dict[str, str] = {}
    for number, pairs in _lines(text):
        name = next((pairs[key] for key in _NAMES if key in pairs), None)
        if name is None and pairs.keys() <= _PASSED:
            continue
        if not name or ("nodes" in pairs) == ("switches" in pairs):
            raise TopologyError(f"line {number} is neither {_WANTED} nor {_ABOVE}")
        if "switches" in pairs:
            continue
        hosts = slurm_hosts(pairs["nodes"])
        if not hosts:
            raise TopologyError(f"line {number}: {pairs['nodes'][:80]!r} is no list of hosts")
        for host in hosts:
            if leaf_of.setdefault(host.lower(), name) != name:
                raise TopologyError(
                    f"line {number}: {host} is below {leaf_of[host.lower()]} and below {name}"
                )
        lists.setdefault(name, []).append(pairs["nodes"])
    if not lists:
        raise TopologyError(f"no line names hosts: {_WANTED}")
    return tuple(Leaf(name, ",".join(each)) for name, each in lists.items())


def _lines(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Number and values, by key in lower case, of each line that says something; of one that goes
    on behind a backslash, the number of its end.
    """
    words: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        part = line.partition("#")[0].rstrip()
        words += part.removesuffix("\\").split()
        if words and not part.endswith("\\"):
            pairs = [word.partition("=") for word in words]
            yield number, {key.lower(): value for key, _, value in pairs}
            words = []


def leaf_switch(rank: Rank, leaves: Leaves = ()) -> str:
    """Name of the leaf switch above the host of a rank; empty if it is not known.

    Args:
        rank: present, or with what is known of its host.
        leaves: of the user; without them Slurm's SLURM_TOPOLOGY_ADDR (`s0.s4.node7`) counts.
    """
    if not leaves:
        return _told_by_slurm(rank)[0]
    known = _by_name(leaves)
    name = (rank.host.name or "").lower()
    wanted = (name, name.partition(".")[0], *rank.host.addresses)
    return next((known[each] for each in wanted if each in known), "")


def leaf_switches(cluster: Cluster, seats: Iterable[int]) -> tuple[dict[int, int], str]:
    """Numbers of the leaf switches above hosts that are known, by seat: empty if all have the same
    one. And what is wrong with what Slurm says of them, in words, empty if nothing is.
    """
    ranks = {rank.seat: rank for rank in cluster.present}
    mine = [ranks[seat] for seat in seats if seat in ranks]
    leaves = cluster.job.leaves
    if not leaves and (wrong := _wrong_with(mine)):
        return {}, f"SLURM_TOPOLOGY_ADDR {wrong}: the leaf switches are taken as not known"
    number: dict[str, int] = {}
    found = {rank.seat: leaf_switch(rank, leaves) for rank in mine}
    numbers = {seat: number.setdefault(leaf, len(number)) for seat, leaf in found.items() if leaf}
    return (numbers if len(number) > 1 else {}), ""


@functools.lru_cache(maxsize=4)
def _by_name(leaves: Leaves) -> Mapping[str, str]:
    """Name of a host, in lower case → its leaf switch; by its first part too, if that is clear."""
    full = {host.lower(): leaf for leaf, hosts in leaves for host in slurm_hosts(hosts)}
    short: dict[str, set[str]] = {}
    for host, leaf in full.items():
        short.setdefault(host.partition(".")[0], set()).add(leaf)
    return {name: min(found) for name, found in short.items() if len(found) == 1} | full


def _told_by_slurm(rank: Rank) -> tuple[str, str]:
    """The switch above the host of a rank, and the node as it is named there; empty if unknown."""
    if not rank.env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").endswith(".node"):
        return "", ""
    above, _, node = rank.env.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")
    return above.rpartition(".")[2], node


def _wrong_with(ranks: Iterable[Rank]) -> str:
    """A contradiction in the places that Slurm tells, in words; empty if there is none."""
    told = [(rank, *_told_by_slurm(rank)) for rank in ranks]
    nodes = Counter(node for _, leaf, node in told if leaf)
    known = sum(nodes.values())
    if not known:
        return ""
    if known < len(told):
        return f"is set on {known} of {len(told)} hosts"
    node, times = nodes.most_common(1)[0]
    if times > 1:  # exported from one host to the others
        return f"names {node} on {times} hosts"
    lists = {rank.env.get("SLURM_JOB_NODELIST", "") for rank, *_ in told}
    listed = slurm_hosts(lists.pop()) if len(lists) == 1 else ()
    unknown = sorted(nodes.keys() - set(listed)) if listed else ()
    return f"names {unknown[0]}, which SLURM_JOB_NODELIST does not have" if unknown else ""
