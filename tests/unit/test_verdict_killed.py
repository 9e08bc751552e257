"""A process that is killed while it observes: the host is named, unless the check says more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nccl_doctor.api import Outcome, OutcomeStatus
from nccl_doctor.model.kinds import RANK_KILLED
from nccl_doctor.model.report import Report
from tests.support.clusters import make_cluster
from tests.support.merging import report_of
from tests.support.peers import World


def with_killed(world: World, name: str, signal: str = "SIGKILL") -> Report:
    world.outcomes[name] = Outcome(OutcomeStatus.DIED, signal=signal)
    return report_of(world.cluster())


def test_a_process_of_a_check_that_was_killed_is_named_with_its_host() -> None:
    report = with_killed(World(3), "nd1")
    (cause,) = report.root_causes
    assert (cause.code, cause.where.hosts) == (RANK_KILLED.code, ("nd1",))
    assert cause.message == "killed by SIGKILL (firewall, round matrix)"
    assert (report.verdict, report.exit_code) == ("unknown", 3)


@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGABRT"])
def test_a_process_that_crashed_by_itself_was_killed_by_nobody(signal: str) -> None:
    report = with_killed(World(3), "nd1", signal)
    assert [cause.code for cause in report.root_causes] == []
    assert report.verdict == "unknown"


def test_what_the_check_itself_says_of_a_rank_that_died_is_enough() -> None:
    steps = ({"step": "init_process_group", "at_s": 0.0}, {"step": "all_reduce", "at_s": 1.0})
    died = Outcome(OutcomeStatus.DIED, signal="SIGKILL", breadcrumbs=steps)
    words = "RuntimeError: Connection closed by peer"
    failed = Outcome(OutcomeStatus.RAISED, reason=words, breadcrumbs=steps)
    made = make_cluster(["nd0", "nd1", "nd2"], nproc=1)
    ranks = [
        replace(rank, facts={"collectives": {"world": died if rank.rank == 1 else failed}})
        for rank in made.ranks
    ]
    report = report_of(replace(made, ranks=tuple(ranks)))
    assert {cause.code for cause in report.root_causes} == {"rank-crashed"}
