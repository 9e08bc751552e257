"""Pairs of hosts that were not tried, as there are too many; what that may miss, and hosts whose
place in the network is not known. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

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
    shell,
)
from nccl_doctor.toolkit.leaves import leaf_switch, leaf_switches
from nccl_doctor.toolkit.peers.schedule import ALL_PAIRS

SAMPLED = Kind(
    code="pairs-sampled",
    layer=Layer.PORT,
    title="Of many hosts, not every pair was tried",
    why="The calls between all pairs grow with the square of the hosts. A bad host shows in any of "
    "its pairs; a bad link between two good hosts shows only in its own.",
    fix=Fix(Step(shell("# --level full"), note="lets every host call every other one")),
    severity=Severity.INFO,
)
UNPLACED = Kind(
    code="topology-lacks-host",
    layer=Layer.PORT,
    title="The file of --topology does not name a host",
    why="Of many hosts, at least two below each two leaf switches call each other. A host whose "
    "leaf switch is not known meets others by chance alone.",
    fix=Fix(
        Step(
            shell("# SwitchName=LEAF Nodes=HOST"), note="a line for each of these hosts in the file"
        )
    ),
    severity=Severity.INFO,
)
_UPLINKS = 16
"""Uplinks of a leaf switch in the example that the message gives."""


def judge_sample(cluster: Cluster, tried: Set[tuple[int, int]]) -> Iterator[Finding]:
    """One finding where only some pairs were tried, by plan.

    Args:
        cluster: whose hosts are all that could be tried.
        tried: ordered pairs of seats.
    """
    count = len(cluster.present_hosts)
    every = count * (count - 1)
    if count <= ALL_PAIRS or len(tried) >= every // 2:
        return
    missed = 1 - len(tried) / every
    words = (
        f"{len(tried)} of {every} ordered pairs of {count} hosts, chosen at random: one bad link "
        f"between two good hosts is missed with a probability of {_percent(missed)}"
    )
    leaves, wrong = leaf_switches(cluster, {end for pair in tried for end in pair})
    chance = _chance_to_miss_an_uplink(leaves, tried)
    if chance is not None:
        words += f", one dead uplink, of {_UPLINKS} of a leaf switch: {_percent(chance)}"
    if wrong:
        words += f"; {wrong}"
    evidence = {"tried": len(tried), "pairs": every, "missed": round(missed, 4)}
    yield Finding(SAMPLED, words, evidence=evidence, confidence=Confidence.CERTAIN)


def judge_places(cluster: Cluster) -> Iterator[Finding]:
    """One finding on the hosts that the user's file of leaf switches does not name."""
    leaves = cluster.job.leaves
    if not leaves:
        return
    firsts = {host.label: cluster.first_on(host) for host in cluster.present_hosts}
    lost = [name for name, rank in firsts.items() if rank and not leaf_switch(rank, leaves)]
    if lost:
        yield Finding(
            UNPLACED,
            f"{len(lost)} of {len(firsts)} hosts are below no leaf switch of the file",
            Where(hosts=tuple(lost)),
            confidence=Confidence.CERTAIN,
        )


def _chance_to_miss_an_uplink(
    leaves: Mapping[int, int], tried: Set[tuple[int, int]]
) -> float | None:
    """Probability that no connection took an uplink that is dead, of the leaf switch with the
    fewest connections to others; None where the switches are not known.

    Each connection takes one of the uplinks by chance (ECMP).
    """
    crossing = dict.fromkeys(leaves.values(), 0)
    if len(crossing) < 2:
        return None
    for ends in tried:
        one, other = map(leaves.get, ends)
        if one is not None and other is not None and one != other:
            crossing[one] += 1
            crossing[other] += 1
    return float((1 - 1 / _UPLINKS) ** min(crossing.values()))


def _percent(share: float) -> str:
    return "less than 0.1 %" if share < 0.001 else f"{100 * share:.1f} %"
