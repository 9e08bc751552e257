"""Copies between the GPUs of a host: broken pairs, without those of a faulty GPU. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    ALONE,
    Cluster,
    Confidence,
    Evidence,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    OutcomeStatus,
    Rank,
    Severity,
    Step,
    Where,
    export,
    shell,
)
from nccl_doctor.toolkit.fabric.direct import blockers
from nccl_doctor.toolkit.gpu.ends import certainty_of, is_gone

TO_PEER = "copying to another GPU"
"""Breadcrumb of a call that two GPUs, or what is between them, can block."""
P2P_BROKEN = Kind(
    "gpu-p2p-broken",
    Layer.DEVICE,
    "Data that one GPU copies to another does not arrive, or arrives corrupted",
    "NCCL copies this way between the ranks of a host: the first collective hangs right after "
    "`Init COMPLETE`, or silently gives wrong sums.",
    Fix(
        export(NCCL_P2P_DISABLE="1"),
        alternatives=["if that helps: boot with iommu=pt, turn ACS off, upgrade the driver"],
    ),
)
P2P_UNTESTED = Kind(
    "gpu-p2p-untested",
    Layer.DEVICE,
    "Copies between the GPUs of a host were not tested",
    "Each rank sees only its own GPU, so none can copy to another's: only a collective shows "
    "whether NCCL can.",
    Fix(
        text="let every rank of a host see all its GPUs (one CUDA_VISIBLE_DEVICES for all), and "
        "run again",
        alternatives=[Fix(Step(shell("# srun --gpu-bind=none"), On.EVERY))],
    ),
    Severity.INFO,
)
CHECK = "gpu_work"
"""Name of the check whose facts these are."""


def judge_peers(cluster: Cluster) -> Iterator[Finding]:
    """Findings on pairs of GPUs that work by themselves, but not together.

    A peer that does not work, or that does not answer the driver, has its own finding. What check
    `gpu_direct` saw on the path between the two is added.
    """
    yield from _untested(cluster)
    for rank, finding in _broken(cluster):
        text = "; ".join([finding.message, *blockers(cluster, rank.host)])
        yield finding.replaced(message=text)


def _broken(cluster: Cluster) -> Iterator[tuple[Rank, Finding]]:
    bad = [
        (rank, facts, peer)
        for rank, facts in cluster.facts(CHECK)
        if (peer := facts.get("peer")) and (peer["error"] or peer["wrong"])
    ]
    ended = [
        item
        for item in cluster.ended(CHECK)
        if item.outcome.last_step == TO_PEER and certainty_of(item.outcome) is not None
    ]
    sick = set(_sick(cluster)) if bad or ended else set()
    for rank, facts, peer in bad:
        if peer["uuid"] not in sick:
            yield from ((rank, found) for found in _seen(rank, facts, peer))
    for item in ended:
        end, crumb = item.outcome, item.outcome.breadcrumbs[-1]
        if crumb.get("peer") not in sick:
            hung = end.status is OutcomeStatus.HUNG
            how = f"no end within {end.duration_s:.0f} s" if hung else "the process died"
            how += f" by {end.signal}" if end.signal else ""
            pair = crumb.get("uuid"), crumb.get("peer")
            yield item.rank, _finding(item.rank, pair, how, crumb)


def _untested(cluster: Cluster) -> Iterator[Finding]:
    """Notes on ranks that see only one GPU, on a host with other ranks; NCCL may copy directly."""
    with_one = {
        rank.seat
        for rank, facts in cluster.facts("backend_device", ALONE)
        if len(facts["devices"]) == 1
    }
    for rank, facts in cluster.facts(CHECK, ALONE) if with_one else ():
        alone = rank.seat in with_one and len(cluster.ranks_on(rank.host)) > 1
        is_part = str(facts["uuid"]).startswith("MIG-")  # between parts nothing is copied directly
        off = rank.env.get("NCCL_P2P_DISABLE") == "1"
        if alone and not (facts["peer"] or is_part or off or facts["error"] or facts["wrong"]):
            yield Finding(
                P2P_UNTESTED,
                "copies to the GPU of the next rank: this rank sees only its own GPU",
                Evidence.rank_place(rank),
            )


def _seen(rank: Rank, facts: Mapping[str, Any], peer: Mapping[str, Any]) -> Iterator[Finding]:
    pair = facts["uuid"], peer["uuid"]
    if peer["error"]:
        yield _finding(rank, pair, peer["error"], peer)
    for wrong in peer["wrong"]:
        text = f"{wrong['count']} of {wrong['of']} numbers changed, {wrong['example']}"
        yield _finding(rank, pair, text, wrong, sure=Confidence.CERTAIN)


def _finding(
    rank: Rank,
    pair: tuple[str | None, str | None],
    what: str,
    evidence: Mapping[str, Any],
    sure: Confidence = Confidence.LIKELY,
) -> Finding:
    own, peer = pair
    where = Evidence.rank_place(rank) | Where(devices=tuple(sorted(filter(None, pair))))
    text = f"copy from {own or 'its own GPU'} to {peer or 'another GPU'}: {what}"
    return Finding(P2P_BROKEN, text, where, dict(evidence), confidence=sure)


def _sick(cluster: Cluster) -> Iterator[str]:
    """UUIDs of GPUs that do not work by themselves, or that are lost."""
    for _, facts in cluster.facts(CHECK):
        if facts["error"] or facts["wrong"]:
            yield str(facts["uuid"])
    for item in cluster.ended(CHECK):
        end = item.outcome
        uuid = end.breadcrumbs[-1].get("uuid") if end.breadcrumbs else None
        if uuid and end.last_step != TO_PEER:
            yield str(uuid)
    for _, facts in cluster.facts("gpu_state"):
        for gpu in facts["gpus"]:
            if gpu.get("uuid") and is_gone(gpu):
                yield str(gpu["uuid"])
