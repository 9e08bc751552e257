"""Findings of the engine about participants that stopped responding. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nccl_doctor.model.cluster import Cluster, Evidence, OutcomeStatus
from nccl_doctor.model.findings import Confidence, Finding
from nccl_doctor.model.kinds import RANK_SILENT


def silent_ranks(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each participant that signed in and then posted no evidence in a round."""
    for rank, facts in cluster.observed():
        for check, rounds in facts.items():
            for name, outcome in rounds.items():
                if outcome.status is OutcomeStatus.SILENT:
                    yield Finding(
                        RANK_SILENT,
                        f"{outcome.reason} ({check}, round {name})",
                        Evidence.rank_place(rank),
                        {"check": check, "round": name, "pid": rank.pid},
                        confidence=Confidence.LIKELY,
                    )
