"""Copies between the GPUs of a host: who is cut off, and who only has a sick peer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.cluster import ALONE, Cluster, Evidence, OutcomeStatus
from nccl_doctor.model import Confidence, Finding, Kind, Layer, Where

TO_PEER = "copying to another GPU"
"""Breadcrumb of a call that two GPUs, or what is between them, can block."""
P2P_BROKEN = Kind(
    "gpu-p2p-broken",
    Layer.DEVICE,
    "What one GPU sends to another does not arrive, or arrives changed",
    "NCCL sends so between the ranks of a host: the first collective hangs right after `Init "
    "COMPLETE`, or adds up wrong numbers without a word.",
    "export NCCL_P2P_DISABLE=1 shows whether this is the cause; boot with iommu=pt, turn ACS off, "
    "upgrade the driver",
)
CHECK = "gpu_work"
"""Name of the check whose facts these are."""


def judge_peers(cluster: Cluster) -> Iterator[Finding]:
    """Pairs of GPUs of which both work by themselves.

    A peer that does not work, or that does not answer the driver, is named by itself.
    """
    sick = set(_sick(cluster))
    for item in cluster.evidence(CHECK, ALONE):
        end = item.outcome
        if end.status is OutcomeStatus.OK:
            peer = end.facts.get("peer")
            if peer and peer["uuid"] not in sick:
                yield from _seen(item, end.facts, peer)
        elif end.last_step == TO_PEER and end.state not in ("T", "t") and end.signal != "SIGKILL":
            crumb = end.breadcrumbs[-1]
            if crumb.get("peer") not in sick:
                hung = end.status is OutcomeStatus.HUNG
                how = f"no end within {end.duration_s:.0f} s" if hung else "the process died"
                how += f" by {end.signal}" if end.signal else ""
                yield _finding(item, (crumb.get("uuid"), crumb.get("peer")), how, crumb)


def _seen(item: Evidence, facts: Mapping[str, Any], peer: Mapping[str, Any]) -> Iterator[Finding]:
    pair = facts["uuid"], peer["uuid"]
    if peer["error"]:
        yield _finding(item, pair, peer["error"], peer)
    for wrong in peer["wrong"]:
        text = f"{wrong['count']} of {wrong['of']} numbers changed, {wrong['example']}"
        yield _finding(item, pair, text, wrong, sure=Confidence.CERTAIN)


def _finding(
    item: Evidence,
    pair: tuple[str | None, str | None],
    what: str,
    evidence: Mapping[str, Any],
    sure: Confidence = Confidence.LIKELY,
) -> Finding:
    own, peer = pair
    where = item.where | Where(devices=tuple(sorted(filter(None, pair))))
    text = f"copy from {own or 'its own GPU'} to {peer or 'another GPU'}: {what}"
    return Finding(P2P_BROKEN, text, where, dict(evidence), confidence=sure)


def _sick(cluster: Cluster) -> Iterator[str]:
    """UUIDs of GPUs that do not work by themselves, or that are not there any more."""
    for item in cluster.evidence(CHECK, ALONE):
        end = item.outcome
        if end.status is OutcomeStatus.OK and (end.facts["error"] or end.facts["wrong"]):
            yield str(end.facts["uuid"])
        elif end.status in (OutcomeStatus.HUNG, OutcomeStatus.DIED) and end.last_step != TO_PEER:
            uuid = end.breadcrumbs[-1].get("uuid") if end.breadcrumbs else None
            if uuid:
                yield str(uuid)
    for _, facts in cluster.facts("gpu_state"):
        for gpu in facts["gpus"]:
            if gpu.get("uuid") and (gpu["lost"] or gpu.get("wedged")):
                yield str(gpu["uuid"])
