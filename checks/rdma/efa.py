"""EFA: what to type where a container lacks its devices, and what no host can see of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Finding,
    Fix,
    Kind,
    Layer,
    Outcome,
    OutcomeStatus,
    Severity,
    Step,
    Where,
    shell,
)

EFA_BLOCKED = Kind(
    code="efa-maybe-blocked",
    layer=Layer.ROUTE,
    title="EFA needs a security group that allows traffic from and to itself",
    why="EFA is not TCP: a security group that allows the hosts' TCP may still drop it, and then "
    "the first collective hangs without an error message.",
    fix="in the security group of the EFA interfaces: all traffic from the group itself (inbound), "
    "and all traffic to the group itself (outbound); all hosts in one availability zone",
    severity=Severity.INFO,
)
EFA_FIX = Fix(
    Step(shell("# docker run --device=/dev/infiniband --ulimit memlock=-1")),
    alternatives=["in Kubernetes: a limit vpc.amazonaws.com/efa (EFA device plug-in)"],
)
_EFA_ERROR = "unable to insert remote address"
"""Error of the plug-in if it cannot reach the EFA of another host."""


def maybe_blocked(cluster: Cluster, seen: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """A possible cause that no host can see, if all hosts use EFA and collectives do not work."""
    if len(seen) < 2 or any(facts["road"] != "efa" for facts in seen.values()):
        return
    outcomes = [each.outcome for each in cluster.evidence("collectives", "world")]
    said = ""
    if any(each.status is OutcomeStatus.RAISED and _refused(each) for each in outcomes):
        said = "a rank could not reach the EFA device of another rank, and no other check tests "
        "EFA"
    elif any(each.status is OutcomeStatus.HUNG for each in outcomes):
        said = (
            "the collective of all ranks hung, and all hosts use EFA, whose traffic no other "
            "check tests"
        )
    if said:
        yield Finding(
            EFA_BLOCKED,
            said,
            Where(hosts=tuple(sorted(seen))),
            confidence=Confidence.POSSIBLE,
        )


def _refused(outcome: Outcome) -> bool:
    return any(_EFA_ERROR in text.lower() for text in (outcome.reason, outcome.log_tail))
