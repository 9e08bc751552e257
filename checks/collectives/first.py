"""First communicators: one rank of each host by itself, before any group of several. Pure.

Without code for the GPU in NCCL, and without a JIT cache, a communicator takes a minute to start;
and that is no hang. In a group of one rank no other host and no network takes part: what is slow
there is slow because of the host itself, and the next groups have a measure of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Round,
    Severity,
    Step,
    export,
    place_of,
    shell,
)
from nccl_doctor.toolkit.groups.attempts import (
    CONNECT,
    FIRST,
    FIRST_S,
    WORLD,
    Attempt,
    driver_start_s,
    driver_starts,
    group_times,
)
from nccl_doctor.toolkit.groups.culprits import judge_groups
from nccl_doctor.toolkit.groups.doing import step_of, what_they_did
from nccl_doctor.toolkit.groups.kinds import INIT_HANG

START_SLOW = Kind(
    "group-start-slow",
    Layer.GROUP,
    "A GPU or its first communicator is slow to start",
    "every start of a job waits for it in its first collective; a short time-out of the process "
    "group would take it for a hang",
    "keep the JIT cache (CUDA_CACHE_PATH on a disk that stays, no CUDA_CACHE_DISABLE), or "
    "install an NCCL built for this GPU; run again: what was compiled is there now",
    Severity.INFO,
)
_SLOW_S = 15.0
_STAYS = Step(
    shell("systemctl enable --now nvidia-persistenced"),
    undo=shell("systemctl disable --now nvidia-persistenced"),
    persists=True,
)
_WAKES = Fix(
    _STAYS,
    alternatives=[
        Fix(Step(shell("nvidia-smi -pm 1"), undo=shell("nvidia-smi -pm 0"), note="as root"))
    ],
)
_ALONE = Fix(
    export(NCCL_NET_PLUGIN="none"),
    alternatives=[
        "no other host takes part: see the stack in the evidence; update the GPU driver, put "
        "CUDA_CACHE_PATH on a local disk"
    ],
)
_CACHE_OFF = "CUDA_CACHE_DISABLE"


def first_round(cluster: Cluster, deadline_s: float) -> Round:
    """The round in which the first rank of each host forms a group of its own."""
    ranks = [cluster.ranks_on(host)[0] for host in cluster.present_hosts]
    return Round(FIRST, tuple((rank.seat,) for rank in ranks), deadline_s)


def without_end(alone: Sequence[Attempt]) -> list[Attempt]:
    """Groups of one rank that never ended, though the rank reached the store."""
    return [a for a in alone if a.stuck and a.stuck[0].outcome.last_step != CONNECT]


def judge_first(cluster: Cluster, alone: Sequence[Attempt]) -> Iterator[Finding]:
    """Findings on first communicators without an end, then on slow starts."""
    due_s = driver_start_s(cluster) + FIRST_S
    for attempt in without_end(alone):
        if attempt.has_culprit:  # it was stopped, or its driver still starts
            yield from judge_groups({FIRST: [attempt]})
        elif attempt.stuck[0].outcome.duration_s >= due_s:  # else the run had no time for it
            yield _never_formed(attempt)
    yield from _slow_drivers(cluster)
    yield from _slow_communicators(cluster)


def _never_formed(attempt: Attempt) -> Finding:
    (member,) = attempt.stuck
    return Finding(
        INIT_HANG,
        f"no end of {step_of(member.outcome)} within {member.outcome.duration_s:.0f} s in a group "
        f"of this rank alone",
        member.where,
        what_they_did(attempt),
        fix=_ALONE,
        confidence=Confidence.LIKELY,
    )


def _slow_drivers(cluster: Cluster) -> Iterator[Finding]:
    """The finding on GPUs that take long to start, where groups use them."""
    if cluster.backend != "nccl":
        return
    slow = [(rank, took) for rank, took in driver_starts(cluster) if took >= _SLOW_S]
    if not slow:
        return
    asleep = {
        rank.host.id
        for rank, facts in cluster.facts("gpu_state")
        if any(gpu.get("persistence") == 0 for gpu in facts.get("gpus", ()))
    }
    ranks = _each_once(slow)
    words = f"the GPU driver took {_longest(slow)} to start"
    if all(rank.host.id in asleep for rank in ranks):
        words += ": persistence mode is off, so it starts again for the first process of each job"
    yield Finding(START_SLOW, words, place_of(ranks), fix=_WAKES)


def _slow_communicators(cluster: Cluster) -> Iterator[Finding]:
    """The finding on first communicators that took long; what the next one took says why."""
    first, later = group_times(cluster, FIRST), group_times(cluster, WORLD)
    slow = [(rank, took) for rank, took in first if took >= _SLOW_S]
    if not slow:
        return
    ranks = _each_once(slow)
    words = f"the first communicator took {_longest(slow)} after the GPU had started"
    next_s = max((took for _, took in later), default=None)
    if next_s is not None:
        words += f", the next one, of all ranks, {next_s:.1f} s"
    if any(rank.env.get(_CACHE_OFF) == "1" for rank in ranks):
        words += f"; {_CACHE_OFF}=1 turns the JIT cache off"
    elif next_s is not None and next_s < max(took for _, took in slow) / 2:
        words += ": the driver compiled NCCL's code for this GPU (JIT), which is cached now"
    elif next_s is not None:
        words += ": the driver compiles NCCL's code for this GPU (JIT) anew in each process"
    evidence = {"seconds": {str(rank.rank): round(took, 1) for rank, took in slow}}
    yield Finding(START_SLOW, words, place_of(ranks), evidence, confidence=Confidence.LIKELY)


def _each_once(slow: Sequence[tuple[Rank, float]]) -> list[Rank]:
    return list({rank.seat: rank for rank, _ in slow}.values())


def _longest(slow: Sequence[tuple[Rank, float]]) -> str:
    most = max(took for _, took in slow)
    return f"{most:.0f} s" if len(slow) == 1 else f"up to {most:.0f} s"
