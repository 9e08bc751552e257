"""Comparison of the time-outs of a cluster with the time that rank 0 works alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nccl_doctor.model.cluster import Cluster, Host
from nccl_doctor.model.findings import Confidence, Finding, Severity, Where
from nccl_doctor.toolkit.advice import fix_of
from nccl_doctor.toolkit.shared_kinds import TIMEOUT_TOO_SHORT
from nccl_doctor.toolkit.timeouts.waits import Settings, Wait, waits
from nccl_doctor.toolkit.variables.table import table

CHECK = "timeouts"
"""Name of the check whose facts these are."""
CLOSE = 1.2
"""A time-out shorter than so many times the load may expire on a slow day."""
_ROOM = 1.5
"""Factor of the load that the advised time-outs have."""
_LONGEST_MINUTES = 599
"""More than that in DEEPSPEED_TIMEOUT looks like seconds, to the table of variables as well."""


def judge_timeouts(cluster: Cluster) -> Iterator[Finding]:
    """Findings on time-outs that are too short, by host; none without an expected load."""
    load_s = cluster.job.expect_load_s
    if load_s is None or cluster.world_size < 2:
        return
    for each in _seen(cluster):
        if each.waits_for_others:
            yield from _too_short(each, load_s)
        yield from _other_clocks(each, load_s)


def too_short_for_load(cluster: Cluster) -> frozenset[tuple[str, str]]:
    """(variable, host) of each time-out that is found too short for the expected load."""
    load_s = cluster.job.expect_load_s
    if load_s is None or cluster.world_size < 2:
        return frozenset()
    return frozenset(
        (wait.value.variable, each.host.label)
        for each in _seen(cluster)
        if each.waits_for_others
        for wait in _short(each.waits, load_s)
        if wait.value.variable
    )


@dataclass(frozen=True)
class _TimeoutFacts:
    host: Host
    waits: tuple[Wait, ...]
    settings: Settings
    variables: Mapping[str, str]
    launcher: str
    waits_for_others: bool
    many_hosts: bool


def _seen(cluster: Cluster) -> Iterator[_TimeoutFacts]:
    for rank, facts in cluster.facts(CHECK):
        deepspeed = cluster.job.deepspeed
        others = [other for other in cluster.ranks_on(rank.host) if other.rank != 0]
        yield _TimeoutFacts(
            rank.host,
            waits(facts, cluster.backend, deepspeed=deepspeed),
            Settings(facts, cluster.backend, deepspeed=deepspeed),
            facts["variables"],
            facts["launcher"],
            bool(others),
            cluster.is_multi_host(),
        )


def _short(found: tuple[Wait, ...], load_s: float) -> list[Wait]:
    """Time-outs whose clock the load itself starts, the shortest first. DeepSpeed's is part of the
    others, where it applies.
    """
    short = [
        wait
        for wait in found
        if wait.waiter.clock == "load"
        and wait.name != "DeepSpeed"
        and wait.seconds is not None
        and wait.seconds < CLOSE * load_s
    ]
    return sorted(short, key=lambda wait: wait.seconds or 0.0)


def _too_short(seen: _TimeoutFacts, load_s: float) -> Iterator[Finding]:
    short = _short(seen.waits, load_s)
    if not short:
        return
    first = short[0]
    assert first.seconds is not None
    alone = f"rank 0 works alone for {seconds(load_s)}"
    by = f"{', '.join(wait.name for wait in short)}; {_source(seen)}"
    killed = first.seconds < load_s
    if killed:
        message = f"{alone}, and the others wait for it {seconds(first.seconds)} ({by})"
    else:
        more = f"{100 * (first.seconds / load_s - 1):.0f} % more"
        message = f"{alone}, and the others wait {seconds(first.seconds)}, only {more} ({by})"
    # With a group that connects at once the store counts only if the load comes before it.
    sure = len(short) > 1 or not seen.settings.connects_at_once
    yield Finding(
        TIMEOUT_TOO_SHORT,
        message,
        Where(hosts=(seen.host.label,)),
        _evidence(seen, load_s),
        _fix(seen, first, load_s),
        Severity.FAIL if killed else Severity.WARN,
        Confidence.LIKELY if sure else Confidence.POSSIBLE,
    )


def _source(seen: _TimeoutFacts) -> str:
    """The source of the time-out that store, process group and watchdog share."""
    return seen.settings.given.source


def _fix(seen: _TimeoutFacts, first: Wait, load_s: float) -> str:
    """The command for the layer that set the time-out, and a way to avoid it."""
    wait = first
    if seen.settings.uses_deepspeed:
        wait = next(each for each in seen.waits if each.name == "DeepSpeed")
    before = "let rank 0 prepare its data in a step before the job"
    typed = wait.fix(_ROOM * load_s)
    if seen.settings.uses_deepspeed:
        if _ROOM * load_s > 60 * _LONGEST_MINUTES:
            return f"{before}: no time-out should be that long"
        typed += "; the deepspeed launcher passes it to other hosts only from .deepspeed_env"
    elif seen.launcher == "accelerate":
        inner = wait.fix(_ROOM * load_s).partition("init_process_group")[2].partition(" ")[0]
        typed += f"; or Accelerator(kwargs_handlers=[InitProcessGroupKwargs{inner}])"
    return fix_of(f"{typed}; or {before}")


def _other_clocks(seen: _TimeoutFacts, load_s: float) -> Iterator[Finding]:
    """Notes on shorter time-outs whose clock such a load starts only in special cases."""
    for wait in seen.waits:
        clock = wait.waiter.clock
        if clock not in ("launch", "stuck") or wait.seconds is None or wait.seconds >= load_s:
            continue
        if clock == "launch" and not seen.many_hosts:
            continue
        if _is_below_limit(wait, seen.variables):
            continue  # the check of variables reports it
        yield Finding(
            _ONLY_SOMETIMES,
            f"{wait.name}: {seconds(wait.seconds)} ({wait.value.source}) is less than the "
            f"{seconds(load_s)} that rank 0 works alone; it matters only if {_WHERE[clock]}",
            Where(hosts=(seen.host.label,)),
            _evidence(seen, load_s),
            fix_of(wait.fix(_ROOM * load_s)),
            Severity.INFO,
            Confidence.POSSIBLE,
        )


_ONLY_SOMETIMES = TIMEOUT_TOO_SHORT.variant(
    title="A time-out is shorter than the time that rank 0 works alone",
    why="Its clock does not run during that work in most programs; where it does, it ends a "
    "healthy job.",
)
_WHERE = {
    "launch": "that work is done before torchrun starts on its host",
    "stuck": "one CUDA or NCCL call lasts that long",
}


def _is_below_limit(wait: Wait, variables: Mapping[str, str]) -> bool:
    row = table().variables.get(wait.value.variable)
    if row is None or row.limit is None or wait.seconds is None:
        return False
    return row.name in variables and wait.seconds < row.limit.shortest


def _evidence(seen: _TimeoutFacts, load_s: float) -> dict[str, Any]:
    return {"expect_load_s": load_s, "layers": [wait.to_json() for wait in seen.waits]}


def seconds(number: float) -> str:
    """`1800 s`, `2.5 s`."""
    return f"{number:.0f} s" if number == int(number) else f"{number:.1f} s"
