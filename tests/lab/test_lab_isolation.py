"""Isolation in a cluster of 4 hosts x 2 ranks: one cut pair, one rank that hangs; nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.broken import broken
from tests.lab.faults import break_pair
from tests.lab.lab import Lab
from tests.lab.reading import SETTLE_S, check_cause, check_clean
from tests.lab.run import Run

HOSTS = ("nd0", "nd1", "nd2", "nd3")
JOIN_S = 20.0
"""Eight processes start, each of which imports torch: on a busy machine that takes its time."""
ATTEMPT_S = 6.0
"""So that none of eight good ranks is taken for a hanging one there."""
NAMED_S = 20.0
"""From the first time-out to the end of isolation."""


def took_s(run: Run) -> dict[str, float]:
    """Round of collectives → seconds that its slowest member took."""
    assert run.report is not None, str(run)
    rounds: dict[str, float] = {}
    for rank in run.report["ranks"]:
        for name, outcome in rank["facts"]["collectives"].items():
            rounds[name] = max(rounds.get(name, 0.0), outcome["duration_s"])
    return rounds


def examine(lab: Lab, **more: Any) -> tuple[Run, set[str]]:
    """Returns: the run, and the rounds that followed the first one."""
    run = lab.plain_doctor(
        *("--select", "collectives", "--join-timeout", f"{JOIN_S:g}"),
        *("--collective-timeout", f"{ATTEMPT_S:g}"),
        nproc=2,
        **more,
    )
    check_clean(run, JOIN_S + SETTLE_S + ATTEMPT_S + NAMED_S + SETTLE_S)
    rounds = took_s(run)
    first = rounds.pop("world")
    assert first >= ATTEMPT_S
    assert sum(rounds.values()) <= NAMED_S, rounds
    assert run.report is not None
    assert run.report["run"]["duration_s"] - first <= NAMED_S + JOIN_S, str(run)
    return run, set(rounds)


def test_a_cut_pair_of_hosts_is_named(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(*HOSTS)
    break_pair(lab, lab["nd1"], lab["nd2"])
    run, rounds = examine(lab)
    codes = ("group-init-hang", "collective-hang", "group-init-failed")
    root = check_cause(run, run.report, codes, ranks=[], links=[("nd1", "nd2"), ("nd2", "nd1")])
    assert root["confidence"] == "certain"
    assert rounds == {"each-host", "isolate-1", "isolate-2", "isolate-3"}


def test_a_rank_that_waits_as_all_others_do_is_named(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(*HOSTS)
    change = broken("meets_nobody") | {"TEST_BREAK_LOCAL_RANK": "1"}
    run, rounds = examine(lab, per_host={"nd2": change})
    root = check_cause(run, run.report, "group-init-hang", hosts=["nd2"], ranks=[5])
    assert root["confidence"] == "certain"
    assert rounds >= {"each-host", "isolate-1", "isolate-2"}


def test_a_rank_that_sleeps_is_named(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(*HOSTS)
    change = broken("sleeps_in_its_second_all_reduce") | {"TEST_BREAK_LOCAL_RANK": "1"}
    run, _ = examine(lab, per_host={"nd2": change})
    check_cause(run, run.report, ("rank-frozen", "collective-hang"), hosts=["nd2"], ranks=[5])
