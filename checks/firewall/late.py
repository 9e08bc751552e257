"""Calls that say nothing of the road: the host had what was said, and read it too late. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nccl_doctor.api import Cluster, Confidence, Finding, Where, host_labels
from nccl_doctor.toolkit.peers.matrix import Pair, unread_s
from nccl_doctor.toolkit.shared_kinds import HOST_ANSWERS_LATE


def judge_late(cluster: Cluster, rounds: Iterable[str]) -> Iterator[Finding]:
    """One finding on all hosts that read too late what a caller said: these calls are not judged.

    Args:
        cluster: with the facts of check `firewall`.
        rounds: those in which hosts call each other.
    """
    longest = dict(_unread(cluster, rounds))
    if not longest:
        return
    labels = host_labels(cluster)
    of_host: dict[str, float] = {}
    for (_, listener), seconds in longest.items():
        of_host[labels[listener]] = max(seconds, of_host.get(labels[listener], 0.0))
    pairs = "pair" if len(longest) == 1 else "pairs"
    yield Finding(
        HOST_ANSWERS_LATE,
        f"on new connections, data lay unread for up to {max(of_host.values()):.1f} s: "
        f"{len(longest)} ordered {pairs} of hosts could not be judged",
        Where(hosts=tuple(sorted(of_host))),
        {"longest, s": of_host},
        confidence=Confidence.CERTAIN,
    )


def _unread(cluster: Cluster, rounds: Iterable[str]) -> Iterator[tuple[Pair, float]]:
    """Ordered pair of seats, and the seconds for which what the first one said lay unread."""
    for name in rounds:
        reports = {rank.seat: facts for rank, facts in cluster.facts("firewall", name)}
        late = {str(seat): facts for seat, facts in reports.items() if facts.get("late")}
        for caller, facts in reports.items() if late else ():
            for listener in late.keys() & facts["peers"].keys():
                waited = [unread_s(each, late[listener]) for each in facts["peers"][listener]]
                if any(waited):
                    yield (caller, int(listener)), max(waited)
