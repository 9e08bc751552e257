"""Calls that say nothing, as the host that was called had no CPU to answer in time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Where,
    host_labels,
    look,
)
from nccl_doctor.toolkit.peers.matrix import unread_s

LATE = Kind(
    code="host-answers-late",
    layer=Layer.HOST,
    title="A host takes seconds to read what the others say",
    why="The connection stands and the data has arrived, but the process that is to read it does "
    "not run: the CPUs are busy, or limited. A job there is as late, and in each collective all "
    "ranks wait for the slowest one.",
    fix=Fix(look("top -b -n 1 -o %CPU | head -n 20", "shows what uses the CPUs")),
    severity=Severity.WARN,
    delays=True,
)


def judge_late(cluster: Cluster, rounds: Iterable[str]) -> Iterator[Finding]:
    """One finding on all hosts that read too late what a caller said: these calls are not judged.

    Args:
        cluster: with the facts of check `firewall`.
        rounds: those in which hosts call each other.
    """
    longest: dict[tuple[int, int], float] = {}
    for name in rounds:
        reports = {rank.seat: facts for rank, facts in cluster.facts("firewall", name)}
        late = {seat: facts for seat, facts in reports.items() if facts.get("late")}
        for caller, facts in reports.items() if late else ():
            for text, entries in facts["peers"].items():
                pair = caller, int(text)
                waited = (unread_s(entry, late.get(pair[1], {})) for entry in entries)
                longest[pair] = max(longest.get(pair, 0.0), *waited)
    of_host: dict[int, float] = {}
    for (_, listener), seconds in longest.items():
        of_host[listener] = max(seconds, of_host.get(listener, 0.0))
    of_host = {seat: seconds for seat, seconds in sorted(of_host.items()) if seconds}
    if not of_host:
        return
    labels = host_labels(cluster)
    count = sum(seconds > 0 for seconds in longest.values())
    yield Finding(
        LATE,
        f"on new connections, data lay unread for up to {max(of_host.values()):.1f} s: {count} "
        f"ordered {'pair' if count == 1 else 'pairs'} of hosts could not be judged",
        Where(hosts=tuple(labels[seat] for seat in of_host)),
        {"longest, s": {labels[seat]: seconds for seat, seconds in of_host.items()}},
        confidence=Confidence.CERTAIN,
    )
