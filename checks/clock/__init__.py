"""Do the clocks of all hosts tell the same time?

What it checks
--------------
The wall clock of every host against those of the others; of more than 32 hosts, against
log2(hosts) + 4 others, with which all are connected. Each host posts its time in the run's store,
twice, and notes when it has read the times of the others. This bounds the difference of two clocks
from both sides; the bounds are in the evidence. The check also notes whether the kernel reports its
clock as synchronized.

Why it matters
--------------
torchrun's c10d rendezvous compares wall-clock times of different hosts. Every host writes the time
of its clock each 5 s, and whoever reads one that is older than 15 s removes that host. So a host
whose clock is 9 s behind is removed now and then, when its last sign of life is a few seconds old,
and one that is 15 s behind always; a host that is ahead removes all the others. Smaller differences
give logs that cannot be compared, and certificates or tickets that are not yet valid.

How to fix
----------
On the host that is named: chronyc makestep, or timedatectl set-ntp true.

When it is wrong
----------------
With two hosts it is unknown which clock is right, unless the kernel reports only one of them as
synchronized; without that, both are named. If the store is so slow that it could hide five seconds,
the check is unknown. Other intervals (--rdzv-conf keep_alive_interval, keep_alive_max_attempt) are
known only from PET_RDZV_CONF, or a command behind `--`.

References
----------
PyTorch torch/distributed/elastic/rendezvous/dynamic_rendezvous.py (_sanitize, _should_keep_alive,
keep_alive_interval, keep_alive_max_attempt); adjtimex(2); RFC 5905.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Round,
    Severity,
    Skip,
    Step,
    Untested,
    Where,
    host_labels,
    master_host,
    shell,
)
from nccl_doctor.toolkit.c10d import KEEP_ALIVE, keep_alive, lines_above, rendezvous_of
from nccl_doctor.toolkit.peers.schedule import plan_schedule, schedule_of
from nccl_doctor.toolkit.peers.standing import Roads, roads_of_store

from .clocks import Offset, clock_is_synchronized, clock_offsets

CLOCK_SKEW = Kind(
    code="clock-skew",
    layer=Layer.HOST,
    title="The clocks of the hosts differ",
    why="torchrun's c10d rendezvous takes a host whose clock is 9 s behind for dead now and then, "
    "and removes it; a host that is ahead removes the others. Logs of different hosts cannot be "
    "compared.",
    fix=Fix(
        Step(shell("chronyc makestep"), persists=True),
        alternatives=[
            Fix(
                Step(
                    shell("timedatectl set-ntp true"),
                    undo=shell("timedatectl set-ntp false"),
                    persists=True,
                )
            )
        ],
    ),
    severity=Severity.WARN,
)

_WARN_S = 5.0
_LATE_S = 1.0
"""By which a sign of life is late: the agents look and write about once a second as they join."""
_LEAST_S = 0.5
"""A smaller difference than this is no fault: the exchange is not that exact."""
_EXCHANGES = 2
"""The first one waits for hosts that started late; the second is exact. On a lossy road each takes
seconds.
"""
_EXCHANGE_S = 3.0
_SLOW_S = 2.0
"""After a first exchange that took longer, a second one would be no better: the road is slow."""
_DEADLINE_S = 8.0
_ALL_PAIRS = 32
"""Hosts up to which each reads the times of all others: that work grows with the square."""
_ALL, _HEADS = "all", "heads"
"""Rounds; the second one is of older versions."""
_C10D = re.compile(r"--rdzv[-_]backend[= ]c10d( |$)", re.IGNORECASE)


class ClockFacts(TypedDict, total=False):
    """Facts that `observe` returns; another check reads `roads`."""

    group: int
    met: list[int]
    exchanges: list[list[Any]]
    synchronized: bool | None
    c10d: bool
    keep_alive: list[float]
    roads: Roads


class Clock(Check):
    """Exchanges times between hosts."""

    name = "clock"
    layer = Layer.HOST
    together = True
    kinds = (CLOCK_SKEW,)

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round of all hosts, rank 0's first."""
        if max(cluster.nnodes, len(cluster.hosts)) < 2:
            raise Skip("only one host: no clocks to compare")
        master = master_host(cluster)
        hosts = sorted(cluster.present_hosts, key=lambda host: host is not master)
        first = [cluster.first_on(host) for host in hosts]
        seats = tuple(rank.seat for rank in first if rank is not None)
        if not seats:
            return ()
        schedule = plan_schedule(cluster, seats, _ALL_PAIRS, more_at_full=False)
        params = {"present": len(seats), **schedule.to_params()}
        return [Round(_ALL, (seats,), _DEADLINE_S, params, may_shrink=True)]

    def observe(self, ctx: Context) -> ClockFacts:
        """Exchange times with the partners of this host.

        Returns: `group`: first seat of the round. `met`: seats of the partners; without it, all of
        the group are. `exchanges`: [seconds since the epoch before posting, the same after reading
        the others, seats that did not answer]. `synchronized`: as the kernel says. `c10d`: whether
        the launch is seen to use torchrun's c10d rendezvous. `keep_alive`: its seconds between two
        signs of life, and until a host is dead. `roads`: from `roads_of_store`, for check `loss`: a
        host that the first exchanges with the store lose has no connections there later.
        """
        if ctx.peers is None or ctx.params["present"] < 2:
            raise Untested("no other host signed in")
        schedule = schedule_of(ctx.group, ctx.params)
        met = sorted(schedule.partners(ctx.seat)) if schedule else []
        others = met or [seat for seat in ctx.group if seat != ctx.seat]
        exchanges, quickest = [], float("inf")
        start = time.monotonic()
        for number in range(_EXCHANGES):
            ctx.breadcrumb("exchanging times with the other hosts", exchange=number)
            began, sent = time.monotonic(), time.time()
            ctx.peers.post(f"time{number}", sent)
            # A partner that waits for one of its own that is gone posts its next time late.
            left = min(start + (number + 1) * _EXCHANGE_S - began, ctx.left())
            heard = ctx.peers.collect(f"time{number}", left, others)
            received, took = time.time(), time.monotonic() - began
            missed = [seat for seat in others if seat not in heard]
            exchanges.append([round(sent, 4), round(received, 4), missed])
            if len(missed) < len(others):
                quickest = min(quickest, took)
            if took > _SLOW_S:
                break
        if others and quickest > _WARN_S:
            raise Untested(
                "clocks were not compared: the store was too slow, or no other host answered"
            )
        facts: ClockFacts = {
            "group": ctx.group[0],
            "exchanges": exchanges,
            "synchronized": clock_is_synchronized(),
            "c10d": _uses_c10d(ctx),
            "keep_alive": list(keep_alive(rendezvous_of(ctx.job, ctx.env))),
            "roads": roads_of_store(ctx.launch.master_port),
        }
        if met:
            facts["met"] = met
        return facts

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on clocks that surely differ from those of most hosts."""
        reports = {rank.seat: facts for rank, facts in cluster.facts(self.name, _ALL)}
        heads = {rank.seat: facts for rank, facts in cluster.facts(self.name, _HEADS)}
        labels = host_labels(cluster)
        clocks = clock_offsets(reports, heads)
        limit_s = _limit(reports.values())
        apart_s = min(_WARN_S, limit_s)
        usual = _agreeing(clocks, apart_s)
        if len(usual) == len(clocks):
            return
        evidence = {
            "offsets": {
                labels[seat]: f"{clock.middle:+.3f} s ± {clock.error:.3f} s"
                for seat, clock in clocks.items()
            },
            "synchronized": {labels[seat]: f["synchronized"] for seat, f in reports.items()},
        }
        confidence = Confidence.CERTAIN
        if len(usual) * 2 <= len(clocks):
            # No majority: believe the synchronized clocks, if they agree.
            kept = {s: c for s, c in clocks.items() if reports[s]["synchronized"]}
            usual = _agreeing(kept, apart_s) if kept else ()
            usual = usual if len(usual) == len(kept) else ()
            confidence = Confidence.LIKELY
        if usual:
            yield from _odd(
                clocks,
                usual,
                labels,
                evidence,
                confidence=confidence,
                apart_s=apart_s,
                limit_s=limit_s,
            )
        else:
            yield _tie(clocks, labels, evidence, limit_s)


def _limit(reports: Iterable[Mapping[str, Any]]) -> float:
    """Seconds by which clocks may differ before a c10d rendezvous removes a host; else infinite.

    What is left of the time until a host is dead, when its last sign of life is as old as one can
    be.
    """
    told = [tuple(facts.get("keep_alive") or KEEP_ALIVE) for facts in reports if facts["c10d"]]
    return min(
        (max(_LEAST_S, dead_s - every_s - _LATE_S) for every_s, dead_s in told),
        default=float("inf"),
    )


def _uses_c10d(ctx: Context) -> bool:
    """True if the launch uses c10d: by torchrun's options in the environment or command line, or,
    with our own launcher, by a node rank that was assigned and not given by the user.
    """
    if rendezvous_of(ctx.job, ctx.env).backend.lower() == "c10d":
        return True
    launch = ctx.launch
    if launch.launcher not in ("torchrun", "accelerate"):
        return bool(launch.node_rank) and launch.sources.get("node_rank") == "default"
    return any(map(_C10D.search, lines_above(ctx.root)))


def _agreeing(clocks: Mapping[int, Offset], apart_s: float) -> tuple[int, ...]:
    """The largest set of seats whose clocks are not surely so far away from one of them."""
    lows = sorted(clock.low for clock in clocks.values())
    highs = sorted(clock.high for clock in clocks.values())

    def others(one: Offset) -> int:
        """Number of clocks that surely are so far away from one: ahead of it, or behind."""
        ahead = len(lows) - bisect_right(lows, one.high + apart_s)
        return ahead + bisect_left(highs, one.low - apart_s)

    one = min(clocks.values(), key=others, default=None)
    if one is None:
        return ()
    return tuple(
        seat
        for seat, clock in clocks.items()
        if clock.low <= one.high + apart_s and clock.high >= one.low - apart_s
    )


def _odd(
    clocks: Mapping[int, Offset],
    usual: Sequence[int],
    labels: Mapping[int, str],
    evidence: Mapping[str, Any],
    *,
    confidence: Confidence,
    apart_s: float,
    limit_s: float,
) -> Iterator[Finding]:
    middle = sorted((clocks[seat] for seat in usual), key=lambda clock: clock.middle)
    reference = middle[len(middle) // 2]
    for seat, clock in clocks.items():
        away = clock - reference
        if seat in usual or away.at_least <= apart_s:
            continue
        ahead = away.middle > 0
        fails = away.at_least > limit_s
        said = f"{abs(away.middle):.1f} s {'ahead of' if ahead else 'behind'} the others"
        then = "it removes the others" if ahead else "the others remove it"
        yield Finding(
            CLOCK_SKEW,
            f"{said} (± {away.error:.1f} s)"
            + (f": in the c10d rendezvous {then} as dead" if fails else ""),
            Where(hosts=(labels[seat],)),
            evidence,
            severity=Severity.FAIL if fails else None,
            confidence=confidence,
        )


def _tie(
    clocks: Mapping[int, Offset],
    labels: Mapping[int, str],
    evidence: Mapping[str, Any],
    limit_s: float,
) -> Finding:
    ordered = sorted(clocks.values(), key=lambda clock: clock.middle)
    apart = ordered[-1] - ordered[0]
    fails = apart.at_least > limit_s
    return Finding(
        CLOCK_SKEW,
        f"the clocks differ by {apart.middle:.1f} s (± {apart.error:.1f} s); which one is right "
        "is unknown"
        + ("; in the c10d rendezvous the one ahead removes the other" if fails else ""),
        Where(hosts=tuple(sorted(labels[seat] for seat in clocks))),
        evidence,
        severity=Severity.FAIL if fails else None,
        confidence=Confidence.POSSIBLE,
    )
